"""Ptychography of some samples of a data set, for `exitwave evaluate --ptychography`: a classical method at its best.

    python benchmarks/peers/ptychography.py DATASET --split new_composition --peer ENVIRONMENT/bin/python --out FILE.npz

ENVIRONMENT is one of its own with py4DSTEM (`pip install py4DSTEM==0.14.18`), which needs an older NumPy than exitwave.

1. Samples are spread evenly over the split, others over the validation split (training, where there is none).
2. Each is simulated again with the same structure, thickness, zone axis, rotation and scanned field, but with a
   defocused probe: a square scan of --positions a side whose step leaves --overlap of the probe's diameter, 2 α
   defocus, in common. The dose of the field stays what it was: --dose electrons a pattern of the data set's own scan.
   A detector pixel is one over the cell's extent, so that the cell is the window in which a probe must fit, and the
   detector reaches nearly as far as the grid is free of aliases. The vacuum pattern goes through the same detector.
3. py4dstem_ptychography.py reconstructs them. Its settings are chosen on the validation samples by `rmse_V`, each with
   the one non-negative scale that every classical method gets: first a model (one slice, at the entrance or half way;
   or several), then one change after another as long as it helps.
4. The split's samples are reconstructed with these settings and scaled.

Multislice models take each sample's true thickness, and all take the true defocus; --single-slice leaves the thickness
out. Prints what was chosen, with every trial, as JSON; --work keeps patterns and trials, and a second run finds those.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest import open_dataset
from exitwave.ingest.files import write_atomic
from exitwave.simulate.detector import resampling
from exitwave.simulate.physics import antialias_angle_mrad, wavelength_A
from exitwave.simulate.plan import Plan
from exitwave.simulate.simulator import get_simulator
from exitwave.simulate.spec import DetectorSpec, ScanSpec
from exitwave.simulate.tasks import SampleSpec, draw_sample
from exitwave.train.dense_scan import at_dose, check_same_experiment
from exitwave.train.keys import generator
from exitwave.train.loader import open_split
from exitwave.train.metrics import fit_scale, score
from exitwave.train.scored import scored_region
from exitwave.workflows.campaigns import read_campaign

PEER = Path(__file__).with_name("py4dstem_ptychography.py")
# What a defocused, round probe has none of.
_NOTHING = ("C12_A", "C21_A", "C23_A", "C30_A", "C32_A", "C34_A", "C50_A", "tilt_x_mrad", "tilt_y_mrad")
_BLURRING = ("source_fwhm_A", "scan_jitter_A")
ONE_SLICE: tuple[dict[str, Any], ...] = ({}, {"plane": 0.5})
SLICES: tuple[dict[str, Any], ...] = (
    *({"slice_A": thickness, "identical": alike} for thickness in (20.0, 10.0) for alike in (False, True)),
    {"slice_A": 5.0},
)
CHANGES: tuple[dict[str, Any], ...] = (
    {"step": 1.0},
    {"step": 0.2},
    {"batch": 16},
    {"tolerance": 0.001, "most": 600},
    {"lowpass_per_A": 1.2},
    {"positive": False},
    {"blur": 0.75},
)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The defocused scan: positions a side, overlap of neighbouring probes, dose of the data set's own scan."""

    positions: int
    overlap: float
    dose_e_per_pattern: float

    def step_A(self, field_A: float) -> float:
        return field_A / self.positions

    def defocus_A(self, field_A: float, semiangle_mrad: float) -> float:
        """By which the probe is as wide as the overlap asks for: diameter 2 α |defocus| = step / (1 - overlap)."""
        return self.step_A(field_A) / (1.0 - self.overlap) / (2e-3 * semiangle_mrad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a data set that exitwave simulated")
    parser.add_argument("--split", default="test")
    parser.add_argument("--peer", type=Path, required=True, help="Python of an environment with py4DSTEM")
    parser.add_argument("--out", type=Path, required=True, help="the file for exitwave evaluate --ptychography")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--validation", type=int, default=4, help="samples to choose the settings on")
    parser.add_argument("--positions", type=int, default=4, help="of the scan, along a side")
    parser.add_argument("--overlap", type=float, default=0.6)
    parser.add_argument("--dose", type=float, default=1e4, help="electrons a pattern of the data set's own scan")
    parser.add_argument("--single-slice", action="store_true", help="without the samples' thickness")
    parser.add_argument("--settings", type=json.loads, help="JSON: take these settings, try no others")
    parser.add_argument("--work", type=Path, help="work here and keep what is made")
    args = parser.parse_args()
    geometry = Geometry(positions=args.positions, overlap=args.overlap, dose_e_per_pattern=args.dose)
    plan = read_campaign(args.data / "campaign.yaml").plan
    assert isinstance(plan, Plan)
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        known = Experiments.made(plan, args.data, _validation(args.data, args.split), args.validation, geometry, work)
        models = ONE_SLICE if args.single_slice else ONE_SLICE + SLICES
        trials = tuned(known, args.peer, models) if args.settings is None else [known.trial(args.peer, args.settings)]
        best = min(trials, key=lambda trial: float(trial["rmse_V"]))
        asked = Experiments.made(plan, args.data, args.split, args.samples, geometry, work)
        made = asked.reconstructed(args.peer, best["settings"])
        outcome = report(asked, made, best, trials, geometry)
        write_file(args.out, asked, made, best, outcome)
    print(json.dumps(outcome, indent=1))


def _validation(data: Path, split: str) -> str:
    return "val" if "val" in open_dataset(data).splits and split != "val" else "train"


@dataclass(frozen=True, kw_only=True)
class Experiments:
    """Samples of a split and, in `folder`, their defocused scans as the peer reads them."""

    folder: Path
    truth: np.ndarray[Any, Any]
    params: np.ndarray[Any, Any]
    uids: list[int]
    step_A: float
    defocus_A: list[float]

    @classmethod
    def made(cls, plan: Plan, data: Path, split: str, most: int, geometry: Geometry, work: Path) -> Experiments:
        """Simulates what `work` does not hold yet."""
        dataset = open_split(data, split, cache=None)
        chosen = [dataset[i * len(dataset) // most] for i in range(min(most, len(dataset)))]
        folder = work / split
        folder.mkdir(parents=True, exist_ok=True)
        structures = {structure.index: structure for structure in plan.structures}
        defocus = []
        for at, sample in enumerate(chosen):
            params = sample["params"]
            spec = draw_sample(
                structures[int(params["structure"])], plan.spec.recipe(), int(params["sample_index"]), split
            )
            spec = defocused(spec, geometry)
            defocus.append(spec.values["defocus_A"])
            path = folder / f"sample-{at:03d}.npz"
            if not path.exists():
                began = time.perf_counter()
                arrays = experiment(spec, sample, plan.simulator, geometry)
                np.savez(path.with_suffix(".tmp.npz"), **arrays)
                path.with_suffix(".tmp.npz").rename(path)
                seconds = time.perf_counter() - began
                print(f"{split}: {spec.structure.formula}, simulated in {seconds:.1f} s", file=sys.stderr)
        return cls(
            folder=folder,
            truth=np.stack([sample["potential"] for sample in chosen]).astype(np.float64),
            params=np.array([sample["params"] for sample in chosen]),
            uids=[int(sample["uid"]) for sample in chosen],
            step_A=geometry.step_A(_field_A(plan.spec.recipe().scan)),
            defocus_A=defocus,
        )

    def reconstructed(self, peer: Path, *settings: dict[str, Any]) -> list[dict[str, Any]]:
        """What the peer made with each of the settings: `image_VA` (samples, H, W) and figures (samples,)."""
        (self.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        done = subprocess.run(
            [str(peer), str(PEER), str(self.folder)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        )
        version = json.loads(done.stdout.splitlines()[-1])["version"]
        files = [np.load(self.folder / f"made-{at:03d}.npz") for at in range(len(self.uids))]
        return [
            {"version": version, **{name: np.stack([file[name][k] for file in files]) for name in files[0].files}}
            for k in range(len(settings))
        ]

    def trials(self, peer: Path, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Settings with their score on these samples, each in the one scale that suits it best."""
        region = scored_region(self.params, self.truth.shape[1:])
        depth = self.params["thickness_A"].astype(np.float64)
        truth = region.inside(self.truth)
        rows = []
        for chosen, made in zip(settings, self.reconstructed(peer, *settings), strict=True):
            images = region.inside(made["image_VA"])
            scale = fit_scale(
                [i / d for i, d in zip(images, depth, strict=True)], [t / d for t, d in zip(truth, depth, strict=True)]
            )
            scores = score([scale * i for i in images], truth, depth)
            rows.append(
                {
                    "settings": chosen,
                    "rmse_V": scores.rmse_V,
                    "ssim": scores.ssim,
                    "scale": scale,
                    "iterations": made["iterations"].tolist(),
                    "converged": int(made["converged"].sum()),
                    "seconds": float(made["seconds"].sum()),
                }
            )
            print(f"{chosen}: {scores.rmse_V:.3f} V, scale {scale:.3f}", file=sys.stderr)
        return rows

    def trial(self, peer: Path, settings: dict[str, Any]) -> dict[str, Any]:
        return self.trials(peer, [settings])[0]


def _field_A(scan: ScanSpec) -> float:
    if scan.shape[0] != scan.shape[1]:
        raise SystemExit(f"the driver scans squares; the data set's scan is {list(scan.shape)}")
    return scan.shape[0] * scan.step_A


def defocused(spec: SampleSpec, geometry: Geometry) -> SampleSpec:
    """The same sample in the defocused scan; the detector lies along the scan, which a round probe does not notice."""
    odd = [name for name in (*_NOTHING, *_BLURRING) if spec.values[name]]
    if odd or spec.recipe.phonons.count:
        raise SystemExit(f"the driver's probe has nothing but a defocus; the data set has {odd or ['phonons']}")
    recipe, extents = spec.recipe, spec.structure.extent_yx_A
    field = _field_A(recipe.scan)
    # a trifle wider than the cell's own points, which then spread over one pixel
    pixel = 1.0001 / min(extents)
    sampling = max(length / points for length, points in zip(extents, spec.grid_yx, strict=True))
    energy = spec.values["energy_keV"]
    reach = 0.95 * antialias_angle_mrad(energy, sampling) * 1e-3 / wavelength_A(energy)
    half = int(reach / pixel)
    there = recipe.model_copy(
        update={
            "scan": ScanSpec(shape=(geometry.positions, geometry.positions), step_A=geometry.step_A(field)),
            "detector": DetectorSpec(shape=(2 * half, 2 * half), max_q_per_A=half * pixel),
            "fields": ("cbed",),
            "images": None,
            "volume": None,
            "encoding": {},
        }
    )
    values = {
        **spec.values,
        "defocus_A": geometry.defocus_A(field, spec.values["semiangle_mrad"]),
        "crystal_rotation_deg": spec.values["crystal_rotation_deg"] - spec.values["scan_rotation_deg"],
        "scan_rotation_deg": 0.0,
    }
    return replace(spec, recipe=there, values=values)


def vacuum_pattern(spec: SampleSpec) -> np.ndarray[Any, Any]:
    """The soft aperture of the simulation, as the detector sees it: (Q, Q), sum 1. A rim one point of the grid wide."""
    (ny, nx), (ly, lx) = spec.grid_yx, spec.structure.extent_yx_A
    ky, kx = np.fft.fftfreq(ny, d=ly / ny)[:, None], np.fft.fftfreq(nx, d=lx / nx)[None, :]
    k = np.hypot(ky, kx)
    along = np.arctan2(ky, kx)
    radius = spec.values["semiangle_mrad"] * 1e-3 / wavelength_A(spec.values["energy_keV"])
    aperture = np.clip((radius - k) / np.hypot(np.cos(along) / lx, np.sin(along) / ly) + 0.5, 0.0, 1.0)
    detector = resampling(
        (ny, nx),
        (ly, lx),
        spec.recipe.detector.shape,
        spec.q_sampling_yx_per_A,
        spec.values["crystal_rotation_deg"],
    )
    return detector(aperture**2) / (aperture**2).sum()


def experiment(
    spec: SampleSpec, sample: dict[str, Any], simulator: str, geometry: Geometry
) -> dict[str, np.ndarray[Any, Any]]:
    """One file of the peer: noisy counts of the defocused scan, and what an experimenter knows."""
    made = next(iter(get_simulator(simulator).simulate([spec])))
    here, there = sample["params"], made.params
    check_same_experiment(here, there, where="the defocused scan", but=("defocus_A",))
    noise = generator("dose-ptychography", 0, int(sample["uid"]))
    return {
        "counts": at_dose(made.arrays["cbed"], here, there, geometry.dose_e_per_pattern, noise),
        "vacuum": vacuum_pattern(spec),
        "energy_eV": np.array(1e3 * float(there["energy_keV"])),
        "defocus_A": np.array(float(there["defocus_A"])),
        "q_per_A": np.array(float(there["Q_sampling_y_per_A"])),
        "step_A": np.array(float(there["R_sampling_y_A"])),
        "thickness_A": np.array(float(there["thickness_A"])),
        "label_shape": np.array(sample["potential"].shape),
        "label_A": np.array(float(here["potential_sampling_A"])),
        "label_blur_A": np.array(float(here["label_blur_A"])),
    }


def tuned(known: Experiments, peer: Path, models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All trials: the models, then changes of the best so far, each kept where it helps."""
    trials = known.trials(peer, models)
    for change in CHANGES:
        best = min(trials, key=lambda trial: float(trial["rmse_V"]))
        trials.append(known.trial(peer, best["settings"] | change))
    return trials


def report(
    asked: Experiments,
    made: list[dict[str, Any]],
    best: dict[str, Any],
    trials: list[dict[str, Any]],
    geometry: Geometry,
) -> dict[str, Any]:
    return {
        "library": f"py4DSTEM {made[0]['version']}",
        "samples": len(asked.uids),
        "positions": geometry.positions,
        "overlap": geometry.overlap,
        "step_A": asked.step_A,
        "defocus_A": [min(asked.defocus_A), max(asked.defocus_A)],
        "dose_e_per_pattern": geometry.dose_e_per_pattern,
        "chosen": best,
        "iterations": made[0]["iterations"].tolist(),
        "converged": int(made[0]["converged"].sum()),
        "seconds_per_sample": float(made[0]["seconds"].mean()),
        "trials": trials,
    }


def write_file(
    out: Path, asked: Experiments, made: list[dict[str, Any]], best: dict[str, Any], outcome: dict[str, Any]
) -> None:
    several = best["settings"].get("slice_A")
    slices = "one slice" if several is None else f"slices of about {several:g} Å, true thickness"
    low, high = outcome["defocus_A"]
    side = outcome["positions"]
    how = (
        f"{slices}; known probe (true defocus, {low:.0f} to {high:.0f} Å); {side}x{side} positions with "
        f"{100 * outcome['overlap']:.0f} % overlap and the dose of the whole field; settings "
        f"{json.dumps(best['settings'])} and scale {best['scale']:.3f} chosen on validation samples; "
        f"{outcome['converged']} of {outcome['samples']} converged"
    )
    buffer = io.BytesIO()
    np.savez(
        buffer,
        uid=np.array(asked.uids, dtype=np.uint64),
        image_VA=best["scale"] * made[0]["image_VA"],
        library=outcome["library"],
        how=how,
    )
    write_atomic(out, buffer.getvalue())


if __name__ == "__main__":
    main()
