"""From a stored sample to what the network sees, and back to V·Å.

Everything here is a function of the sample, the configuration and a key (seed, epoch, uid): which rank does it, and in
which order, changes nothing. The steps, for one sample:

1. counts: Poisson noise at `dose_e_per_pattern` mean counts per pattern of incident beam (`noisy_counts`). The same
   function makes the patterns of the classical reconstructions.
2. augmentation: a mirror and a transposition of scan, detector and label together (`augment`).
3. detector binned, normalised by the detected sum, square root; images of the centre of mass; conditions
   (`network_input`).
4. label standardised with the training set's mean and deviation (`Preprocessing`, which travels with the model).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from exitwave.ingest.detector_model import DetectorModel, detect
from exitwave.ingest.errors import UsageError
from exitwave.train.classical import (
    along_scan_axes,
    centre_of_mass,
    integrate_gradient,
    interaction_parameter_rad_per_VA,
    wavelength_A,
)
from exitwave.train.keys import generator
from exitwave.train.spec import DataSpec

__all__ = [
    "Preprocessing",
    "augment",
    "input_channels",
    "mirrored",
    "network_input",
    "noisy_counts",
    "unmirrored",
]

Array = npt.NDArray[np.floating[Any]]

# Conditions are brought to order one: (value - centre) / scale.
_CONDITION_SCALE = {
    "energy_keV": (150.0, 100.0),
    "semiangle_mrad": (20.0, 10.0),
    "R_sampling_A": (0.6, 0.5),
    "thickness_A": (100.0, 100.0),
    "defocus_A": (0.0, 100.0),
}


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What was fixed before the first step and must be the same at prediction.

    target_mean_VA: over all label pixels of the training set.
    target_std_VA: deviation of a label's pixels from that label's own mean, pooled over the training set.
    com_std, icom_std: deviation of the centre of mass over the disc's radius, and of its integral [V·Å].
    trained: least and largest value of what the experiment was like, by the parameter's name.
    """

    layout: str
    scan_shape: tuple[int, int]
    detector_shape: tuple[int, int]
    label_shape: tuple[int, int]
    target_mean_VA: float
    target_std_VA: float
    com_std: float
    icom_std_VA: float
    trained: dict[str, tuple[float, float]] = field(default_factory=dict)

    def standardise(self, potential_VA: Array) -> npt.NDArray[np.float32]:
        """V·Å -> standard deviations."""
        return ((potential_VA - self.target_mean_VA) / self.target_std_VA).astype(np.float32)

    def to_VA(self, standardised: Array) -> Array:
        """Standard deviations -> V·Å."""
        return standardised.astype(np.float64) * self.target_std_VA + self.target_mean_VA

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocessing:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        values["trained"] = {k: (float(v[0]), float(v[1])) for k, v in data.get("trained", {}).items()}
        return cls(**values)


def noisy_counts(
    cbed: Array, spec: DataSpec, *, seed: int, epoch: int, uid: int, params: np.void | None = None
) -> npt.NDArray[np.float32]:
    """Counts of a noise-free sample (Ry, Rx, Qy, Qx) [fraction of the beam]; expected counts where no dose is given.

    `params`, the sample's record, is needed where the scan's step matters: a source, or a dose in e/Å².
    """
    options = spec.detector.model_dump()
    per_A2 = options.pop("dose_e_per_A2")
    if spec.dose_e_per_pattern is not None:  # an evaluation at a dose of its own
        per_A2 = None
    model = DetectorModel(dose_e_per_pattern=spec.dose_e_per_pattern, dose_e_per_A2=per_A2, **options)
    if params is None and (model.source_fwhm_A or model.dose_e_per_A2 is not None):
        raise UsageError("data.detector: source_fwhm_A and dose_e_per_A2 need the sample's parameters, none came")
    record = np.zeros(1, dtype=[("none", "u1")])[0] if params is None else params
    return detect(cbed, record, model, lambda purpose: generator(purpose, seed, epoch, uid))


def augment(
    counts: npt.NDArray[np.float32],
    potential: Array,
    params: np.void,
    spec: DataSpec,
    *,
    seed: int,
    epoch: int,
    uid: int,
) -> tuple[npt.NDArray[np.float32], Array, npt.NDArray[np.float32], np.void]:
    """One of the eight mirrors and quarter turns of the experiment, drawn by (seed, epoch, uid).

    A mirrored specimen scatters into mirrored patterns, so scan, detector and label are turned over together. Pixel 0
    of scan and label is the same point but the label reaches beyond the last probe: after a mirror its pixels there
    are unknown, and the returned weight is 0 for them.

    Returns:
        counts, potential, weight (H, W), params (sampling along y and x exchanged where axes are, scan rotation
        turned over with each mirror)
    """
    weight = np.ones(potential.shape, dtype=np.float32)
    if spec.augment == "none":
        return counts, potential, weight, params
    element = int(generator("augment", seed, epoch, uid).integers(8))
    scan = counts.shape[:2]
    counts, params = mirrored(counts, params, element)
    transposed = bool(element & 4) and _square(scan, counts.shape[2:])
    potential, weight = (_turned(image, scan, element, transposed=transposed) for image in (potential, weight))
    return counts, potential, weight, params


def mirrored(counts: npt.NDArray[np.float32], params: np.void, element: int) -> tuple[npt.NDArray[np.float32], np.void]:
    """Scan and detector turned over by one of the eight elements (bits: along y, along x, transposed), and parameters.

    A transposition is left away where scan or detector are not square.
    """
    params = params.copy()
    for axis, flipped in ((0, element & 1), (1, element & 2)):
        if flipped:
            params["scan_rotation_deg"] *= -1
            counts = _mirror_detector(np.flip(counts, axis=axis), axis=axis + 2)
    if element & 4 and _square(counts.shape[:2], counts.shape[2:]):
        counts = counts.transpose(1, 0, 3, 2)
        params["scan_rotation_deg"] *= -1
        for a, b in (("Q_sampling_y_per_A", "Q_sampling_x_per_A"), ("R_sampling_y_A", "R_sampling_x_A")):
            params[a], params[b] = params[b].copy(), params[a].copy()
    return np.ascontiguousarray(counts), params


def unmirrored(image: Array, scan: tuple[int, int], element: int) -> Array:
    """An image on the label's grid (H, W) of a `mirrored` experiment, turned back; NaN where nothing is known."""
    if element & 4:
        image = image.T
    for axis, flipped in ((0, element & 1), (1, element & 2)):
        if flipped:
            known = _mirror_label(np.ones(image.shape), scan[axis], axis=axis) > 0
            image = np.where(known, _mirror_label(image, scan[axis], axis=axis), np.nan)
    return image


def _turned(image: Array, scan: tuple[int, ...], element: int, *, transposed: bool) -> Array:
    for axis, flipped in ((0, element & 1), (1, element & 2)):
        if flipped:
            image = _mirror_label(image, scan[axis], axis=axis)
    return image.T if transposed else image


def _square(scan: tuple[int, ...], detector: tuple[int, ...]) -> bool:
    return scan[0] == scan[1] and detector[0] == detector[1]


def _mirror_detector(counts: npt.NDArray[np.float32], *, axis: int) -> npt.NDArray[np.float32]:
    """q -> -q along one axis, the zero frequency staying at n//2.

    With an even number of pixels the most negative frequency has no partner and keeps its place.
    """
    flipped = np.flip(counts, axis=axis)
    return np.roll(flipped, 1, axis=axis) if counts.shape[axis] % 2 == 0 else flipped


def _mirror_label(image: Array, n_probes: int, *, axis: int) -> Array:
    """x -> (position of the last probe) - x; zero where that lies outside the label."""
    n = image.shape[axis]
    last = (n_probes - 1) * n // n_probes  # the label pixel at the last probe
    source = last - np.arange(n)
    known = source >= 0
    taken = np.take(image, np.where(known, source, 0), axis=axis)
    shape = [1, 1]
    shape[axis] = n
    return np.where(known.reshape(shape), taken, 0)


def input_channels(spec: DataSpec, layout: str, scan: tuple[int, int], detector: tuple[int, int]) -> int:
    """Number of channels that `network_input` makes."""
    if layout == "probes-as-channels":
        return scan[0] * scan[1] + len(spec.conditions)
    binned = _binned_shape(spec, detector)
    physics = {"com": 2, "icom": 1}
    return binned[0] * binned[1] + sum(physics[name] for name in spec.physics) + len(spec.conditions)


def network_input(
    counts: npt.NDArray[np.float32], params: np.void, spec: DataSpec, prepared: Preprocessing
) -> npt.NDArray[np.float32]:
    """Channels of one sample: (C, Ry, Rx) or (C, Qy, Qx) float32, by the layout.

    detector-as-channels: binned detector pixels, centre of mass (y, x), its integral, conditions.
    probes-as-channels: patterns of all probe positions, conditions.
    """
    ry, rx = counts.shape[:2]
    binned = bin_detector(counts, _binned_shape(spec, (counts.shape[2], counts.shape[3])))
    pixels = binned.shape[2] * binned.shape[3]
    if spec.normalise == "detected-sum":
        # mean over all pixels and positions becomes one
        binned = binned * (ry * rx * pixels / max(float(binned.sum(dtype=np.float64)), 1e-20))
    if spec.transform == "sqrt":
        binned = np.sqrt(binned)
    elif spec.transform == "log1p":
        binned = np.log1p(binned)
    elif spec.transform == "zscore":
        spread = binned.std(axis=(2, 3), keepdims=True)
        binned = (binned - binned.mean(axis=(2, 3), keepdims=True)) / np.maximum(spread, 1e-6)
    if prepared.layout == "probes-as-channels":
        # (Ry, Rx, Qy, Qx) -> (Ry·Rx, Qy, Qx)
        parts = [binned.reshape(ry * rx, *binned.shape[2:])]
    else:
        # (Ry, Rx, Qy, Qx) -> (Qy·Qx, Ry, Rx)
        parts = [
            binned.transpose(2, 3, 0, 1).reshape(pixels, ry, rx),
            *_physics_channels(counts, params, spec, prepared),
        ]
    plane = parts[0].shape[1:]
    parts += [np.full((1, *plane), _condition(name, params), dtype=np.float32) for name in spec.conditions]
    return np.concatenate(parts).astype(np.float32)


def centre_of_mass_images(counts: Array, params: np.void) -> tuple[Array, Array]:
    """Centre of mass over the disc's radius (2, Ry, Rx), and its integral (1, Ry, Rx) [V·Å]."""
    energy = float(params["energy_keV"])
    com = centre_of_mass(counts, (float(params["Q_sampling_y_per_A"]), float(params["Q_sampling_x_per_A"])))
    com = along_scan_axes(com, params)
    gradient = com * (2 * np.pi / interaction_parameter_rad_per_VA(energy))
    icom = integrate_gradient(gradient, (float(params["R_sampling_y_A"]), float(params["R_sampling_x_A"])))
    return com / (float(params["semiangle_mrad"]) * 1e-3 / wavelength_A(energy)), icom[None]


def bin_detector(counts: Array, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Sums detector pixels: (Ry, Rx, Qy, Qx) -> (Ry, Rx, *shape)."""
    ry, rx, qy, qx = counts.shape
    if (qy, qx) == shape:
        return counts.astype(np.float32)
    # (Ry, Rx, by, Qy/by, bx, Qx/bx), summed over the pixels of a bin
    split = counts.reshape(ry, rx, shape[0], qy // shape[0], shape[1], qx // shape[1])
    return split.sum(axis=(3, 5), dtype=np.float32)


def _physics_channels(counts: Array, params: np.void, spec: DataSpec, prepared: Preprocessing) -> list[Array]:
    if not spec.physics:
        return []
    com, icom = centre_of_mass_images(counts, params)
    made = {"com": com / prepared.com_std, "icom": icom / prepared.icom_std_VA}
    return [made[name].astype(np.float32) for name in spec.physics]


def _binned_shape(spec: DataSpec, detector: tuple[int, int]) -> tuple[int, int]:
    if spec.detector_bin is None:
        return detector
    shape = (min(spec.detector_bin, detector[0]), min(spec.detector_bin, detector[1]))
    if detector[0] % shape[0] or detector[1] % shape[1]:
        raise UsageError(
            f"data.detector_bin: {spec.detector_bin} does not divide the detector's {detector[0]}x{detector[1]} pixels"
        )
    return shape


def _condition(name: str, params: np.void) -> float:
    value = float(params["R_sampling_y_A"] if name == "R_sampling_A" else params[name])
    centre, scale = _CONDITION_SCALE[name]
    return (value - centre) / scale
