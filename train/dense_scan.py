"""The classical methods' best case where the network's scan is too coarse for them: more probes, the same dose.

Integrated DPC needs a scan step of at most λ/(4α). A coarser scan (3 Å, say) starves it, and beating it there proves
nothing. So the same campaign is simulated again with a denser scan,

    exitwave simulate DATASET/campaign.yaml --out DENSE --set 'scan.shape=[64, 64]' --set scan.step_A=0.25 \\
        --set 'fields=[cbed]'

whose draws are the same, since they are keyed by structure and sample. A field's dose in e/Å² is kept: with n times as
many patterns each gets 1/n of the counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exitwave.ingest import open_dataset
from exitwave.ingest.dataset import Dataset
from exitwave.ingest.errors import UsageError
from exitwave.train.classical import coarsest_step_A
from exitwave.train.keys import generator
from exitwave.train.spec import DataSpec

__all__ = ["DenseScan", "at_dose", "check_same_experiment"]

_SAME = ("energy_keV", "semiangle_mrad", "thickness_A", "defocus_A", "scan_origin_y_A", "scan_origin_x_A")


def check_same_experiment(params: np.void, there: np.void, *, where: str, but: Collection[str] = ()) -> None:
    """That two samples are one experiment scanned differently, but for the parameters in `but`. Raises UsageError."""
    wrong = [name for name in _SAME if name not in but and not np.isclose(float(params[name]), float(there[name]))]
    if wrong:
        raise UsageError(
            f"{where}: sample {int(params['sample_index'])} of structure {int(params['structure'])} has {wrong[0]} "
            f"{float(there[wrong[0]]):g}, expected {float(params[wrong[0]]):g}: not another scan of the same campaign"
        )


def at_dose(
    cbed: npt.NDArray[Any], params: np.void, there: np.void, dose_e_per_pattern: float, noise: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Poisson counts of a scan `there` that gives the field the dose of the scan `params` at so much a pattern.

    Where positions a Å² grow, counts a position fall.
    """
    ratio = (float(there["R_sampling_y_A"]) * float(there["R_sampling_x_A"])) / (
        float(params["R_sampling_y_A"]) * float(params["R_sampling_x_A"])
    )
    return noise.poisson(np.maximum(cbed, 0).astype(np.float64) * dose_e_per_pattern * ratio).astype(np.float32)


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
        check_same_experiment(params, there, where=str(self.data.root))
        dose = spec.dose_e_per_pattern
        if dose is None:
            return cbed.astype(np.float32), there
        return at_dose(cbed, params, there, dose, generator("dose-dense", seed, int(batch["uid"][0]))), there

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
