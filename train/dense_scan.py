"""The classical methods' best case where the network's scan is too coarse for them: more probes, the same dose.

Integrated DPC needs a scan step of at most λ/(4α). A coarser scan (3 Å, say) starves it, and beating it there proves
nothing. So the same campaign is simulated again with a denser scan,

    exitwave simulate DATASET/campaign.yaml --out DENSE --set 'scan.shape=[64, 64]' --set scan.step_A=0.25 \\
        --set 'fields=[cbed]'

whose draws are the same, since they are keyed by structure and sample. A field's dose in e/Å² is kept: with n times as
many patterns each gets 1/n of the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest import open_dataset
from exitwave.ingest.dataset import Dataset
from exitwave.ingest.errors import UsageError
from exitwave.train.classical import coarsest_step_A
from exitwave.train.keys import generator
from exitwave.train.spec import DataSpec

__all__ = ["DenseScan"]

_SAME = ("energy_keV", "semiangle_mrad", "thickness_A", "defocus_A", "scan_origin_y_A", "scan_origin_x_A")


@dataclass(frozen=True, kw_only=True)
class DenseScan:
    """A denser data set, and the place in it of each (structure, sample) of the campaign."""

    data: Dataset
    places: dict[tuple[int, int], int]

    @classmethod
    def open(cls, path: Path) -> DenseScan:
        data = open_dataset(path)
        params = data.params
        return cls(
            data=data,
            places={(int(p["structure"]), int(p["sample_index"])): i for i, p in enumerate(params)},
        )

    def counts(self, params: np.void, spec: DataSpec, seed: int) -> tuple[np.ndarray[Any, Any], np.void]:
        """Noisy patterns (Ry, Rx, Qy, Qx) of the same sample scanned more densely, and their parameters.

        Raises UsageError where the sample is missing, or another experiment than `params` says.
        """
        key = (int(params["structure"]), int(params["sample_index"]))
        if key not in self.places:
            raise UsageError(f"{self.data.root}: sample {key[1]} of structure {key[0]} is not in this denser scan")
        batch = self.data.read([self.places[key]], ["cbed"])
        cbed, there = batch["cbed"][0], batch["params"][0]
        wrong = [name for name in _SAME if not np.isclose(float(params[name]), float(there[name]))]
        if wrong:
            raise UsageError(
                f"{self.data.root}: sample {key[1]} of structure {key[0]} has {wrong[0]} {float(there[wrong[0]]):g}, "
                f"expected {float(params[wrong[0]]):g}: not a denser scan of the same campaign"
            )
        dose = spec.dose_e_per_pattern
        if dose is None:
            return cbed.astype(np.float32), there
        # the dose of the field is kept: positions a Å² grow, counts a position fall
        ratio = (float(there["R_sampling_y_A"]) * float(there["R_sampling_x_A"])) / (
            float(params["R_sampling_y_A"]) * float(params["R_sampling_x_A"])
        )
        noise = generator("dose-dense", seed, int(batch["uid"][0]))
        return noise.poisson(np.maximum(cbed, 0).astype(np.float64) * dose * ratio).astype(np.float32), there

    def note(self, params: np.ndarray[Any, Any]) -> str:
        """What the classical methods were given."""
        steps = float(self.data.params["R_sampling_y_A"].max())
        limit = min(coarsest_step_A(float(p["energy_keV"]), float(p["semiangle_mrad"])) for p in params)
        ours = float(params["R_sampling_y_A"].max())
        still = "" if steps <= 1.001 * limit else f" (still above λ/(4α), down to {limit:.2f} Å)"
        return (
            f"iDPC and centre of mass got a denser scan of the same dose per area: a step of {steps:.2f} Å{still} "
            f"instead of the network's {ours:.2f} Å"
        )
