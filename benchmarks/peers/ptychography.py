"""Ptychography of some samples of a data set, for `exitwave evaluate --ptychography`: a classical method at its best.

    python benchmarks/peers/ptychography.py DATASET --split new_composition --peer ENVIRONMENT/bin/python --out FILE.npz

ENVIRONMENT is one of its own with py4DSTEM (`pip install py4DSTEM==0.14.18`), which needs an older NumPy than exitwave.

1. Samples are spread evenly over the split, others over the validation split (training, where there is none).
2. Each is simulated again with the same structure, thickness, zone axis, rotation and scanned field, but with a
   defocused probe: a square scan of 4 to 12 positions a side whose step leaves --overlap of the probe's diameter, 2 α
   defocus, in common. The dose of the field stays what it was: --dose electrons a pattern of the data set's own scan.
   A detector pixel is one over the cell's extent, so that the cell is the window in which a probe must fit, and the
   detector reaches nearly as far as the grid is free of aliases. The vacuum pattern goes through the same detector.
3. py4dstem_ptychography.py reconstructs them. Its settings are chosen on the validation samples by `rmse_V`, each with
   the one non-negative scale that every classical method gets: first how many positions, then one slice (at the
   entrance or half way) with one change after another as long as it helps, then several slices. The number of
   iterations and the blur of the result are chosen with each, from what a reconstruction leaves on its way.
4. The split's samples are reconstructed with these settings, with as many more iterations as their error needs to
   flatten (`--most`), and scaled.

*Converged* means that the algorithm's own error has flattened: it fell by less than 0.2 % in the last ten iterations.
Whether the image is right is another question, which the scores answer.

Multislice models take each sample's true thickness, and all take the true defocus; --single-slice leaves the thickness
out. Prints what was chosen, every trial and every sample, as JSON, and its progress on the way. With --work, each
simulated and each reconstructed sample is a file there, and the same command goes on where it was stopped.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ptychography_scans import Geometry, defocused, experiment, field_A

from exitwave.ingest import open_dataset
from exitwave.ingest.files import write_atomic
from exitwave.simulate.plan import Plan
from exitwave.simulate.tasks import draw_sample
from exitwave.train.loader import open_split
from exitwave.train.metrics import fit_scale, score
from exitwave.train.scored import scored_region
from exitwave.workflows.campaigns import read_campaign

PEER = Path(__file__).with_name("py4dstem_ptychography.py")
# `positions` is the scan's, all else the peer's
POSITIONS: tuple[dict[str, Any], ...] = tuple({"plane": 0.5, "positions": n} for n in (4, 6, 8, 12))
ONE_SLICE: tuple[dict[str, Any], ...] = ({"plane": 0.0},)
SLICES: tuple[dict[str, Any], ...] = ({"slice_A": 20.0}, {"slice_A": 10.0})
CHANGES: tuple[dict[str, Any], ...] = ({"step": 1.0}, {"step": 0.2}, {"positive": False}, {"batch": 16})
OF_SLICES: tuple[dict[str, Any], ...] = ({"identical": True}, {"slice_A": 5.0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a data set that exitwave simulated")
    parser.add_argument("--split", default="test")
    parser.add_argument("--peer", type=Path, required=True, help="Python of an environment with py4DSTEM")
    parser.add_argument("--out", type=Path, required=True, help="the file for exitwave evaluate --ptychography")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--validation", type=int, default=6, help="samples to choose the settings on")
    parser.add_argument("--overlap", type=float, default=0.6)
    parser.add_argument("--dose", type=float, default=1e4, help="electrons a pattern of the data set's own scan")
    parser.add_argument("--most", type=int, default=600, help="iterations of a sample that does not come to rest")
    parser.add_argument("--single-slice", action="store_true", help="without the samples' thickness")
    parser.add_argument("--settings", type=json.loads, help="JSON: take these settings, try no others")
    parser.add_argument("--work", type=Path, help="work here and keep what is made")
    args = parser.parse_args()
    plan = read_campaign(args.data / "campaign.yaml").plan
    assert isinstance(plan, Plan)
    with tempfile.TemporaryDirectory() as scratch:
        work = Work(
            plan=plan,
            data=args.data,
            folder=args.work or Path(scratch),
            peer=args.peer,
            geometry=Geometry(positions=POSITIONS[0]["positions"], overlap=args.overlap, dose_e_per_pattern=args.dose),
            progress=Progress(n_trials(args.single_slice, args.settings) * args.validation + args.samples),
        )
        known = partial(work.trial, _validation(args.data, args.split), args.validation)
        trials = [known(args.settings)] if args.settings else tuned(known, single_slice=args.single_slice)
        best = best_of(trials)
        asked = work.experiments(args.split, args.samples, best["settings"])
        made = asked.reconstructed(work.peer, best["settings"] | {"most": args.most}, work.progress)
        outcome = report(asked, made, best, trials, work.of(best["settings"]))
        write_file(args.out, asked, made, best, outcome)
    print(json.dumps(outcome, indent=1))


def _validation(data: Path, split: str) -> str:
    return "val" if "val" in open_dataset(data).splits and split != "val" else "train"


class Progress:
    """A line for each reconstruction, and about how long the others will take."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.fresh, self.began = total, 0, 0, time.perf_counter()

    def tell(self, what: str, row: dict[str, Any]) -> None:
        self.done += 1
        self.fresh += not row["kept"]
        mean = (time.perf_counter() - self.began) / max(1, self.fresh)
        how = "found" if row["kept"] else f"{row['seconds']:.1f} s"
        left = f"about {mean * (self.total - self.done) / 60:.0f} min left"
        print(f"{self.done} of {self.total}: {what}, {how}; {left}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Made:
    """What the peer made of some samples with the same settings, in their order."""

    files: list[dict[str, np.ndarray[Any, Any]]]
    version: str

    def images_VA(self, stop: int | None, blur: float) -> np.ndarray[Any, Any]:
        """(n, H, W) after `stop` iterations, or where it ended if that was before, or if None."""
        every = []
        for file in self.files:
            at = int(np.searchsorted(file["stops"], stop)) if stop is not None else len(file["stops"])
            every.append(file["image_VA"][min(at, len(file["stops"]) - 1), file["blurs"].tolist().index(blur)])
        return np.stack(every)

    @property
    def iterations(self) -> list[int]:
        return [len(file["errors"]) for file in self.files]

    @property
    def converged(self) -> list[bool]:
        return [bool(file["converged"]) for file in self.files]

    @property
    def seconds(self) -> list[float]:
        return [float(file["seconds"]) for file in self.files]


@dataclass(frozen=True, kw_only=True)
class Experiments:
    """Samples of a split and, in `folder`, their defocused scans as the peer reads them."""

    folder: Path
    truth: np.ndarray[Any, Any]
    params: np.ndarray[Any, Any]
    uids: list[int]
    formulas: list[str]
    step_A: float
    defocus_A: list[float]

    @classmethod
    def made(cls, plan: Plan, data: Path, split: str, most: int, geometry: Geometry, work: Path) -> Experiments:
        """Simulates what `work` does not hold yet."""
        dataset = open_split(data, split, cache=None)
        chosen = [dataset[i * len(dataset) // most] for i in range(min(most, len(dataset)))]
        name = f"{split}-{len(chosen)}-of-{geometry.positions}x{geometry.positions}"
        folder = work / f"{name}-{geometry.overlap:g}-{geometry.dose_e_per_pattern:g}"
        folder.mkdir(parents=True, exist_ok=True)
        structures = {structure.index: structure for structure in plan.structures}
        specs = []
        for at, sample in enumerate(chosen):
            params = sample["params"]
            spec = draw_sample(
                structures[int(params["structure"])], plan.spec.recipe(), int(params["sample_index"]), split
            )
            specs.append(defocused(spec, geometry))
            path = folder / f"sample-{at:03d}.npz"
            if not path.exists():
                began = time.perf_counter()
                arrays = experiment(specs[-1], sample, plan.simulator, geometry)
                np.savez(path.with_suffix(".tmp.npz"), **arrays)
                path.with_suffix(".tmp.npz").rename(path)
                seconds = time.perf_counter() - began
                print(f"{name}: {spec.structure.formula}, simulated in {seconds:.1f} s", file=sys.stderr, flush=True)
        return cls(
            folder=folder,
            truth=np.stack([sample["potential"] for sample in chosen]).astype(np.float64),
            params=np.array([sample["params"] for sample in chosen]),
            uids=[int(sample["uid"]) for sample in chosen],
            formulas=[spec.structure.formula for spec in specs],
            step_A=geometry.step_A(field_A(plan.spec.recipe().scan)),
            defocus_A=[spec.values["defocus_A"] for spec in specs],
        )

    def reconstructed(self, peer: Path, settings: dict[str, Any], progress: Progress) -> Made:
        """What the peer makes of each; what it made before is found."""
        theirs = {name: value for name, value in settings.items() if name != "positions"}
        process = subprocess.Popen(
            [str(peer), str(PEER), str(self.folder), json.dumps([theirs])],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        )
        files, version = [], ""
        assert process.stdout is not None
        for row in (json.loads(line) for line in process.stdout if line.startswith("{")):
            if "file" in row:
                with np.load(self.folder / row["file"]) as file:
                    files.append(dict(file))
                progress.tell(f"{settings}, {self.formulas[len(files) - 1]}", row)
            version = row.get("version", version)
        if process.wait():
            raise SystemExit(f"{PEER.name} ended with {process.returncode}; its own message says why")
        return Made(files=files, version=version)

    def trial(self, peer: Path, settings: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Settings with their score on these samples: the iterations, blur and scale that suit them best."""
        made = self.reconstructed(peer, settings, progress)
        stops = sorted({int(stop) for file in made.files for stop in file["stops"][:-1]})
        rows = [self._scored(made, stop, float(blur)) for stop in (None, *stops) for blur in made.files[0]["blurs"]]
        best = min(rows, key=lambda row: row["rmse_V"])
        at_rest = min((row for row in rows if row["stop"] is None), key=lambda row: row["rmse_V"])
        print(
            f"{settings}: {best['rmse_V']:.3f} V after {best['stop'] or 'all'} iterations, {at_rest['rmse_V']:.3f} V "
            f"after all {made.iterations}; scale {best['scale']:.3f}, blur {best['blur']}",
            file=sys.stderr,
            flush=True,
        )
        return {
            "settings": settings,
            **best,
            "rmse_V_at_the_end": at_rest["rmse_V"],
            "iterations": made.iterations,
            "converged": sum(made.converged),
            "seconds": sum(made.seconds),
        }

    def _scored(self, made: Made, stop: int | None, blur: float) -> dict[str, Any]:
        region = scored_region(self.params, self.truth.shape[1:])
        depth = self.params["thickness_A"].astype(np.float64)
        truth, images = region.inside(self.truth), region.inside(made.images_VA(stop, blur))
        scale = fit_scale(
            [i / d for i, d in zip(images, depth, strict=True)], [t / d for t, d in zip(truth, depth, strict=True)]
        )
        scores = score([scale * i for i in images], truth, depth)
        return {"stop": stop, "blur": blur, "scale": scale, "rmse_V": scores.rmse_V, "ssim": scores.ssim}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the whole run has in common."""

    plan: Plan
    data: Path
    folder: Path
    peer: Path
    geometry: Geometry
    progress: Progress

    def of(self, settings: dict[str, Any]) -> Geometry:
        return replace(self.geometry, positions=settings.get("positions", self.geometry.positions))

    def experiments(self, split: str, most: int, settings: dict[str, Any]) -> Experiments:
        return Experiments.made(self.plan, self.data, split, most, self.of(settings), self.folder)

    def trial(self, split: str, most: int, settings: dict[str, Any]) -> dict[str, Any]:
        return self.experiments(split, most, settings).trial(self.peer, settings, self.progress)


def n_trials(single_slice: bool, settings: dict[str, Any] | None) -> int:
    one = len(POSITIONS) + len(ONE_SLICE) + len(CHANGES)
    several = 0 if single_slice else len(SLICES) + len(OF_SLICES)
    return 1 if settings else one + several


def best_of(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(trials, key=lambda trial: float(trial["rmse_V"]))


def tuned(trial: Callable[[dict[str, Any]], dict[str, Any]], *, single_slice: bool) -> list[dict[str, Any]]:
    """All trials: how many positions; then one slice, with one change after another, each kept where it helps; then
    several slices likewise, with changes of their own where they are better than one.
    """

    def improved(trials: list[dict[str, Any]], changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        for change in changes:
            trials = [*trials, trial(best_of(trials)["settings"] | change)]
        return trials

    one = [trial(settings) for settings in POSITIONS]
    scan = {"positions": best_of(one)["settings"]["positions"]}
    one = improved([*one, *(trial(scan | model) for model in ONE_SLICE)], CHANGES)
    if single_slice:
        return one
    likewise = {name: value for name, value in best_of(one)["settings"].items() if name != "plane"}
    several = [trial(likewise | model) for model in SLICES]
    if best_of(several)["rmse_V"] < best_of(one)["rmse_V"]:
        several = improved(several, OF_SLICES)
    return one + several


def report(
    asked: Experiments, made: Made, best: dict[str, Any], trials: list[dict[str, Any]], geometry: Geometry
) -> dict[str, Any]:
    return {
        "library": f"py4DSTEM {made.version}",
        "samples": len(asked.uids),
        "positions": geometry.positions,
        "overlap": geometry.overlap,
        "step_A": asked.step_A,
        "defocus_A": [min(asked.defocus_A), max(asked.defocus_A)],
        "dose_e_per_pattern": geometry.dose_e_per_pattern,
        "chosen": best,
        "converged": sum(made.converged),
        "seconds_per_sample": float(np.mean(made.seconds)),
        "each": each(asked, made, best),
        "trials": trials,
    }


def each(asked: Experiments, made: Made, best: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every sample whether the algorithm came to rest, and, apart from that, how right it is."""
    region = scored_region(asked.params, asked.truth.shape[1:])
    chosen, end = (region.inside(made.images_VA(stop, best["blur"])) for stop in (best["stop"], None))
    rows = []
    for at, truth in enumerate(region.inside(asked.truth)):
        depth = float(asked.params[at]["thickness_A"])
        errors = made.files[at]["errors"]
        rows.append(
            {
                "formula": asked.formulas[at],
                "uid": f"{asked.uids[at]:016x}",
                "thickness_A": depth,
                "label_std_V": float(truth.std()) / depth,
                "rmse_V": score([best["scale"] * chosen[at]], [truth], np.array([depth])).rmse_V,
                "correlation": float(np.corrcoef(chosen[at].ravel(), truth.ravel())[0, 1]),
                "correlation_at_the_end": float(np.corrcoef(end[at].ravel(), truth.ravel())[0, 1]),
                "iterations": len(errors),
                "converged": made.converged[at],
                "last_fall": float(1 - errors[-1] / errors[-11]) if len(errors) > 10 else None,
                "seconds": made.seconds[at],
            }
        )
    return rows


def write_file(out: Path, asked: Experiments, made: Made, best: dict[str, Any], outcome: dict[str, Any]) -> None:
    several = best["settings"].get("slice_A")
    slices = "one slice" if several is None else f"slices of about {several:g} Å, true thickness"
    low, high = outcome["defocus_A"]
    side = outcome["positions"]
    stop = "the last iteration" if best["stop"] is None else f"at most {best['stop']} iterations"
    how = (
        f"{slices}; known probe (true defocus, {low:.0f} to {high:.0f} Å); {side}x{side} positions with "
        f"{100 * outcome['overlap']:.0f} % overlap and the dose of the whole field; settings "
        f"{json.dumps(best['settings'])}, {stop}, blur {best['blur']:g} and scale {best['scale']:.3f} chosen on "
        f"validation samples; {outcome['converged']} of {outcome['samples']} converged"
    )
    buffer = io.BytesIO()
    np.savez(
        buffer,
        uid=np.array(asked.uids, dtype=np.uint64),
        image_VA=best["scale"] * made.images_VA(best["stop"], best["blur"]),
        library=outcome["library"],
        how=how,
    )
    write_atomic(out, buffer.getvalue())


if __name__ == "__main__":
    main()
