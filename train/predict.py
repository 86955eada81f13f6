"""A trained network on a scan of any size: conditions, estimates, windows, one calibrated image.

1. `resolve`: what the microscopist says, else what the file says, else what the patterns tell (`calibrate`); each with
   where it came from.
2. `complaints`: what lies outside of the training, in words.
3. `predict`: the patterns are brought row by row to the trained detector (never more than one row of the file is in
   memory; what is kept is small, or lies in a scratch file), then windows are predicted in all eight views that the
   training's augmentation knows, and stitched (`tiling`).

The uncertainty is the deviation over windows and views: what the network is not sure of. It is a lower bound of the
error, since views that share a mistake agree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.microscopy import Scan4D
from exitwave.train.calibrate import find_disc, find_turn
from exitwave.train.classical import centre_of_mass, probe_diameter_A, wavelength_A
from exitwave.train.preprocess import mirrored, network_input, unmirrored
from exitwave.train.resample import DetectorMap, scan_positions, scan_rows
from exitwave.train.run import TrainedModel
from exitwave.train.tiling import Stitched, starts, stitch

__all__ = ["Conditions", "Given", "Prediction", "complaints", "predict", "resolve"]

Array = npt.NDArray[np.floating[Any]]

_LOOK = 48  # positions each way that estimates look at
_LOOK_BYTES = 1 << 28
_IN_MEMORY = 1 << 30  # bytes of reduced patterns kept in memory; more lie in a scratch file
_MARGIN = 0.05  # relative: how far outside of the trained range still counts as inside
_PARAMS = np.dtype(
    [
        (name, "<f8")
        for name in (
            "energy_keV",
            "semiangle_mrad",
            "R_sampling_y_A",
            "R_sampling_x_A",
            "Q_sampling_y_per_A",
            "Q_sampling_x_per_A",
            "scan_rotation_deg",
            "thickness_A",
            "defocus_A",
        )
    ]
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the caller says of the experiment; None: ask the file, then the patterns."""

    energy_keV: float | None = None
    semiangle_mrad: float | None = None
    scan_step_A: tuple[float, float] | None = None
    q_sampling_per_A: float | None = None
    rotation_deg: float | None = None
    transpose: bool | None = None
    flip: tuple[bool, bool] = (False, False)
    center: tuple[float, float] | None = None
    gain: float | None = None
    defocus_A: float | None = None
    thickness_A: float | None = None


_SAME = 0.01  # relative: what a file says is often rounded


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The experiment as the network is told of it. `origin`: name -> given, file or estimated. `contradicted`: what the
    file says otherwise than what was given, which is taken."""

    energy_keV: float
    semiangle_mrad: float
    scan_step_A: tuple[float, float]
    q_sampling_per_A: tuple[float, float]
    center: tuple[float, float]
    rotation_deg: float
    transposed: bool
    flip: tuple[bool, bool]
    thickness_A: float | None
    defocus_A: float | None
    counts_per_pattern: float
    origin: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    contradicted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Projected potential [V·Å] and its uncertainty (H, W), a pixel's width [Å], and how many windows made it."""

    potential_VA: Array
    uncertainty_VA: Array
    sampling_A: float
    windows: int
    views: int
    scan_step_A: float


def resolve(scan: Scan4D, given: Given) -> Conditions:
    """Everything the network needs to be told. Raises UsageError naming the option for what cannot be estimated."""
    block = _looked_at(scan)
    if not np.isfinite(block).all():
        raise DamagedDataError(f"{scan.title}: the patterns hold values that are not finite (NaN or infinity)")
    if not block.any():
        raise UsageError(f"{scan.title}: the patterns are empty (all zero)")
    origin: dict[str, str] = {}
    notes: list[str] = []
    contradicted: list[str] = []

    def known(name: str, said: Any, read: Any) -> Any:
        if said is not None or read is not None:
            origin[name] = "given" if said is not None else "file"
        if said is not None and read is not None and not np.allclose(said, read, rtol=_SAME, atol=0):
            mine, its = (", ".join(f"{value:g}" for value in np.unique(each)) for each in (said, read))
            contradicted.append(f"{name}: the file says {its}; {mine} was given, and is taken")
        return said if said is not None else read

    energy = known("energy_keV", given.energy_keV, scan.energy_keV)
    if energy is None:
        raise UsageError("the file does not say the beam's energy: give --energy-keV")
    if not 1 <= energy <= 1000:
        raise UsageError(f"--energy-keV: {energy:g}: expected 1..1000 keV; given in eV?")
    step = known("scan_step_A", given.scan_step_A, scan.scan_step_A)
    if step is None:
        raise UsageError("the file does not say the distance of probe positions: give --scan-step-A")
    wavelength = wavelength_A(energy)
    semiangle = known("semiangle_mrad", given.semiangle_mrad, scan.semiangle_mrad)
    angle = scan.q_sampling_mrad
    from_angle = None if angle is None else (angle[0] * 1e-3 / wavelength, angle[1] * 1e-3 / wavelength)
    told = None if given.q_sampling_per_A is None else (given.q_sampling_per_A, given.q_sampling_per_A)
    q = known("q_sampling_per_A", told, scan.q_sampling_per_A or from_angle)
    disc = find_disc(block.mean(axis=(0, 1)))
    if disc is None and (semiangle is None or q is None):
        raise UsageError(
            "no bright-field disc stands out in the mean pattern: give --semiangle-mrad and --q-sampling-per-A"
        )
    if q is None and semiangle is None:
        raise UsageError(
            "the file says neither the semi-angle nor the detector's sampling, and one cannot be told without the "
            "other: give --semiangle-mrad or --q-sampling-per-A"
        )
    if q is None and disc is not None:
        assert semiangle is not None
        q = (semiangle * 1e-3 / wavelength / disc.radius,) * 2
        origin["q_sampling_per_A"] = "estimated"
        notes.append(f"detector sampling {q[0]:.4g} /Å from the bright-field disc's radius of {disc.radius:.1f} pixels")
    if semiangle is None and disc is not None:
        semiangle = disc.radius * float(np.sqrt(q[0] * q[1])) * wavelength * 1e3
        origin["semiangle_mrad"] = "estimated"
        notes.append(f"semi-angle {semiangle:.3g} mrad from the bright-field disc's radius of {disc.radius:.1f} pixels")
    center = known("center", given.center, scan.center)
    if center is None:
        center = disc.center if disc is not None else (block.shape[2] // 2, block.shape[3] // 2)
        origin["center"] = "estimated"
        notes.append(f"zero frequency at pixel ({center[0]:.2f}, {center[1]:.2f}), the bright-field disc's centre")
    rotation = known("rotation_deg", given.rotation_deg, scan.rotation_deg)
    transposed = given.transpose
    if rotation is None:
        com = _com(block, q, center, given.flip)
        turn = find_turn(com, transposed=transposed)
        rotation, transposed = turn.rotation_deg, turn.transposed
        origin["rotation_deg"] = "estimated"
        doubt = "" if turn.curl < 0.3 else ", which is too much to trust it: give --rotation-deg if you know it"
        notes.append(
            f"scan rotation {rotation:.1f} degrees{' and a transposed detector' if transposed else ''} from the curl "
            f"of the centre of mass ({100 * turn.curl:.0f} % of its power left{doubt})"
        )
    counts = float(block.sum(axis=(2, 3)).mean()) / (given.gain or 1.0)
    return Conditions(
        energy_keV=float(energy),
        semiangle_mrad=float(semiangle),
        scan_step_A=(float(step[0]), float(step[1])),
        q_sampling_per_A=(float(q[0]), float(q[1])),
        center=(float(center[0]), float(center[1])),
        rotation_deg=float(rotation),
        transposed=bool(transposed),
        flip=given.flip,
        thickness_A=given.thickness_A,
        defocus_A=known("defocus_A", given.defocus_A, scan.defocus_A),
        counts_per_pattern=counts,
        origin=origin,
        notes=tuple(notes),
        contradicted=tuple(contradicted),
    )


def complaints(model: TrainedModel, scan: Scan4D, conditions: Conditions) -> list[str]:
    """What lies outside of what the model was trained on; empty where all is inside."""
    trained = model.preprocessing.trained
    found: list[str] = []
    for name, value, unit in (
        ("energy_keV", conditions.energy_keV, "keV"),
        ("semiangle_mrad", conditions.semiangle_mrad, "mrad"),
        ("thickness_A", conditions.thickness_A, "Å"),
        ("defocus_A", conditions.defocus_A, "Å"),
    ):
        if value is not None and name in trained and not _inside(value, trained[name]):
            low, high = trained[name]
            span = f"{low:g}" if high - low <= 1e-6 * abs(high) else f"{low:.4g} to {high:.4g}"
            found.append(f"{name} is {value:.4g} {unit}, the model was trained on {span} {unit}")
    if "R_sampling_A" in trained:
        low, high = trained["R_sampling_A"]
        coarse = max(conditions.scan_step_A)
        if coarse > high * (1 + _MARGIN):
            found.append(f"the scan step is {coarse:.3g} Å, the model was trained on {high:.3g} Å: too coarse for it")
    target_q = _target_q(model)
    shape = model.preprocessing.detector_shape
    for axis in (0, 1):
        reach = conditions.q_sampling_per_A[axis] * scan.shape[2 + axis] / 2
        wanted = target_q * shape[axis] / 2
        if reach < 0.9 * wanted:
            found.append(
                f"the detector reaches {reach:.3g} /Å along {'yx'[axis]}, the model was trained on patterns up to "
                f"{wanted:.3g} /Å"
            )
        bins = model.spec.data.detector_bin or shape[axis]
        coarsest = target_q * shape[axis] / min(bins, shape[axis])
        if conditions.q_sampling_per_A[axis] > coarsest * (1 + _MARGIN):
            found.append(
                f"a detector pixel is {conditions.q_sampling_per_A[axis]:.3g} /Å wide along {'yx'[axis]}, the model "
                f"sees pixels of {coarsest:.3g} /Å"
            )
    return list(dict.fromkeys(found))


def predict(
    model: TrainedModel, scan: Scan4D, conditions: Conditions, *, progress: Callable[[int, int], None] | None = None
) -> Prediction:
    """The projected potential of the whole scan. `progress(done, total)` counts rows read and rows of windows.

    Raises UsageError where the scan is smaller than the network's window, DamagedDataError for values not finite.
    """
    prepared = model.preprocessing
    for name, value in (("thickness_A", conditions.thickness_A), ("defocus_A", conditions.defocus_A)):
        if name in model.spec.data.conditions and value is None:
            raise UsageError(f"this model wants to be told {name}: give --{name.replace('_', '-')}")
    step, positions = _scan_grid(model, scan, conditions)
    window, label = prepared.scan_shape, prepared.label_shape
    shape = (len(positions[0]), len(positions[1]))
    if shape[0] < window[0] or shape[1] < window[1]:
        raise UsageError(
            f"the scan has {shape[0]}x{shape[1]} positions of {step:.3g} Å, the network's window needs "
            f"{window[0]}x{window[1]}: a larger scan is expected"
        )
    params = np.zeros((), dtype=_PARAMS)
    params["energy_keV"], params["semiangle_mrad"] = conditions.energy_keV, conditions.semiangle_mrad
    params["R_sampling_y_A"] = params["R_sampling_x_A"] = step
    params["Q_sampling_y_per_A"] = params["Q_sampling_x_per_A"] = _target_q(model)
    params["thickness_A"], params["defocus_A"] = conditions.thickness_A or 0.0, conditions.defocus_A or 0.0
    scale = (label[0] / window[0], label[1] / window[1])
    margin = int(np.ceil(probe_diameter_A(conditions.energy_keV, conditions.semiangle_mrad) / step))
    grain = [n // int(np.gcd(n, m)) for n, m in zip(window, label, strict=True)]
    rows, columns = (
        starts(shape[axis], window[axis], margin=min(margin, window[axis] // 3), grain=grain[axis]) for axis in (0, 1)
    )
    with tempfile.TemporaryDirectory(prefix="exitwave-predict-") as scratch:
        total = scan.shape[0] + len(rows)

        def tell(done: int) -> None:
            if progress is not None:
                progress(done, total)

        cube = _reduced(model, scan, conditions, positions, Path(scratch), tell)
        images, spreads, corners = [], [], []
        for k, y in enumerate(rows):
            for x in columns:
                mean, spread = _window_image(model, cube[y : y + window[0], x : x + window[1]], params)
                images.append(mean)
                spreads.append(spread)
                corners.append((round(y * scale[0]), round(x * scale[1])))
            tell(scan.shape[0] + k + 1)
        del cube
    whole: tuple[int, int] = (corners[-1][0] + label[0], corners[-1][1] + label[1])
    done: Stitched = stitch(
        np.stack(images), np.stack(spreads), corners, whole, margin=max(1, int(np.ceil(margin * scale[0])))
    )
    return Prediction(
        potential_VA=done.image,
        uncertainty_VA=done.spread,
        sampling_A=step / scale[0],
        windows=len(images),
        views=len(_views(model)),
        scan_step_A=step,
    )


# --- patterns --------------------------------------------------------------------------------------------------------


def _reduced(
    model: TrainedModel,
    scan: Scan4D,
    conditions: Conditions,
    positions: tuple[Array, Array],
    scratch: Path,
    tell: Callable[[int], None],
) -> Array:
    """All patterns on the trained detector and scan grid, (Ry', Rx', Qy', Qx'); read by the row."""
    target = model.preprocessing.detector_shape
    grid = DetectorMap(
        source=scan.shape[2:],
        source_q=conditions.q_sampling_per_A,
        center=conditions.center,
        target=target,
        target_q=(_target_q(model),) * 2,
        rotation_deg=conditions.rotation_deg,
        transposed=conditions.transposed,
        flip=conditions.flip,
    )
    matrix = grid.matrix()
    ny, nx = len(positions[0]), len(positions[1])
    shape = (ny, nx, *target)
    out: Array
    if 4 * int(np.prod(shape)) <= _IN_MEMORY:
        out = np.empty(shape, dtype=np.float32)
    else:
        out = np.memmap(scratch / "patterns.f4", dtype=np.float32, mode="w+", shape=shape)
    kept: dict[int, Array] = {}  # rows of the file on the trained detector and along x already resampled
    done = 0
    for i, at in enumerate(positions[0]):
        low = min(int(np.floor(at)), max(scan.shape[0] - 2, 0))
        high = min(low + 1, scan.shape[0] - 1)
        for row in (low, high):
            if row not in kept:
                raw = scan.block(slice(row, row + 1))
                if not np.isfinite(raw).all():
                    raise DamagedDataError(f"{scan.title}: scan row {row} holds values that are not finite")
                kept[row] = scan_rows(grid.apply(matrix, raw), (np.zeros(1), positions[1]))[0]
        fraction = np.float32(at - low)
        out[i] = kept[low] if fraction == 0 else kept[low] * (1 - fraction) + kept[high] * fraction
        kept = {row: kept[row] for row in (low, high) if row >= low}
        if low > done:
            done = low
            tell(done)
    return out


def _window_image(model: TrainedModel, patterns: Array, params: Any) -> tuple[Array, Array]:
    """Mean over the views [V·Å] and deviation, both (h, w)."""
    record = params[()]  # the record itself, which can be copied and changed
    prepared, spec = model.preprocessing, model.spec.data
    counts = np.ascontiguousarray(patterns, dtype=np.float32)
    inputs = []
    for view in _views(model):
        turned, there = mirrored(counts, record, view)
        inputs.append(network_input(turned, there, spec, prepared))
    with torch.inference_mode():
        out = model.module(torch.from_numpy(np.stack(inputs))).numpy()
    images = prepared.to_VA(out)
    back = np.stack(
        [unmirrored(image, prepared.scan_shape, view) for image, view in zip(images, _views(model), strict=True)]
    )
    # each view is sure of its image up to a constant
    level = np.nanmean(back, axis=(1, 2), keepdims=True)
    back = back - level + level.mean()
    known = np.isfinite(back).sum(axis=0)
    mean = np.nansum(back, axis=0) / np.maximum(known, 1)
    spread = np.sqrt(np.nansum((back - mean) ** 2, axis=0) / np.maximum(known, 1))
    return mean, spread


def _views(model: TrainedModel) -> Sequence[int]:
    square = model.preprocessing.scan_shape[0] == model.preprocessing.scan_shape[1]
    if model.spec.data.augment == "none":
        return (0,)
    return range(8) if square else range(4)


def _scan_grid(model: TrainedModel, scan: Scan4D, conditions: Conditions) -> tuple[float, tuple[Array, Array]]:
    """The step that the network is given and the positions in units of the file's steps, along y and x."""
    low, high = model.preprocessing.trained.get("R_sampling_A", (conditions.scan_step_A[0],) * 2)
    here = conditions.scan_step_A
    if abs(here[0] - here[1]) <= 0.01 * here[0] and low * (1 - _MARGIN) <= here[0] <= high * (1 + _MARGIN):
        return here[0], (np.arange(scan.shape[0], dtype=float), np.arange(scan.shape[1], dtype=float))
    step = min(max(float(np.sqrt(here[0] * here[1])), low), high)
    return step, (scan_positions(scan.shape[0], here[0], step), scan_positions(scan.shape[1], here[1], step))


def _target_q(model: TrainedModel) -> float:
    """The detector pixel that the network was trained on [1/Å]."""
    low, high = model.preprocessing.trained.get("Q_sampling_per_A", (0.0, 0.0))
    if not high > 0:
        raise UsageError("this model does not say what it was trained on (it is older than prediction): train it again")
    return 0.5 * (low + high)


def _inside(value: float, span: tuple[float, float]) -> bool:
    slack = _MARGIN * max(abs(span[0]), abs(span[1]), 1e-9)
    return span[0] - slack <= value <= span[1] + slack


def _looked_at(scan: Scan4D) -> Array:
    """A block of neighbouring patterns from the middle of the scan, at most 256 MB of them."""
    ry, rx, qy, qx = scan.shape
    most = max(1, min(_LOOK, int((_LOOK_BYTES / (4 * qy * qx)) ** 0.5)))
    rows, columns = (slice(max(0, (n - most) // 2), max(0, (n - most) // 2) + min(most, n)) for n in (ry, rx))
    return scan.block(rows, columns)


def _com(block: Array, q: tuple[float, float], center: tuple[float, float], flip: tuple[bool, bool]) -> Array:
    com = centre_of_mass(np.maximum(block, 0), q)
    shift = [(block.shape[2 + axis] // 2 - center[axis]) * q[axis] for axis in (0, 1)]
    com = com + np.array(shift)[:, None, None]
    return com * np.array([-1.0 if f else 1.0 for f in flip])[:, None, None]
