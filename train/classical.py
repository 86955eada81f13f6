"""The classical reconstructions that a network is compared with: centre of mass and iDPC, both integrated.

For a thin specimen with projected potential V [V·Å] the exit wave at probe position r is P(x - r)·exp(iσV(x)). The
centre of mass of its diffraction pattern is the expectation of the momentum,

    com(r) = (σ / 2π) · ∇(|P|² ⋆ V)(r)        [1/Å],  σ in rad/(V·Å),

(Müller et al., Nature Communications 5, 5653 (2014); Lazić, Bosch, Lazar, Ultramicroscopy 160, 265 (2016)), so the
integral of (2π/σ)·com is the potential blurred by the probe's intensity, without its mean. A quadrant detector
estimates the centre of mass from differences of half-plane sums (iDPC): for a uniformly filled disc of radius k_α
shifted by a little, difference / sum = 4·shift / (π k_α).

Integration is the least-squares one with free boundaries: the image whose forward differences come nearest to the
measured ones. Its normal equations are a Poisson equation with Neumann boundaries, solved exactly by a cosine
transform (Simchony, Chellappa, Shao, IEEE PAMI 12, 435 (1990)).

Array axes are (y, x) throughout; com[0] is the y component.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import constants
from scipy.fft import dctn, idctn
from scipy.ndimage import map_coordinates

__all__ = [
    "along_scan_axes",
    "centre_of_mass",
    "coarsest_step_A",
    "detector_frequencies",
    "integrate_gradient",
    "interaction_parameter_rad_per_VA",
    "probe_diameter_A",
    "quadrant_dpc",
    "reconstruct",
    "rotated",
    "to_label_grid",
    "wavelength_A",
]

Array = npt.NDArray[np.floating[Any]]


def wavelength_A(energy_keV: float) -> float:
    """Relativistic de Broglie wavelength [Å] (Kirkland, Advanced Computing in Electron Microscopy, eq. 2.5)."""
    energy = energy_keV * 1e3 * constants.e
    rest = constants.m_e * constants.c**2
    return float(constants.h * constants.c / np.sqrt(energy * (2 * rest + energy)) * 1e10)


def interaction_parameter_rad_per_VA(energy_keV: float) -> float:
    """σ [rad/(V·Å)] of the transmission function exp(iσV) (Kirkland, eq. 5.6)."""
    rest_keV = constants.m_e * constants.c**2 / constants.e * 1e-3
    relativistic = (rest_keV + energy_keV) / (2 * rest_keV + energy_keV)
    return float(2 * np.pi / (wavelength_A(energy_keV) * energy_keV * 1e3) * relativistic)


def coarsest_step_A(energy_keV: float, semiangle_mrad: float) -> float:
    """The scan step [Å] up to which the probe's intensity is sampled without aliasing: λ / (4 α).

    The intensity's transform reaches to 2 α / λ, twice the aperture's radius (Nyquist).
    """
    return wavelength_A(energy_keV) / (4.0 * semiangle_mrad * 1e-3)


def probe_diameter_A(energy_keV: float, semiangle_mrad: float) -> float:
    """Diameter [Å] of the first dark ring of an unaberrated probe: 1.22 λ/α."""
    return 1.22 * wavelength_A(energy_keV) / (semiangle_mrad * 1e-3)


def detector_frequencies(n: int, sampling_per_A: float) -> Array:
    """(n,) spatial frequency [1/Å] of each detector pixel along one axis; zero at n//2."""
    return (np.arange(n) - n // 2) * sampling_per_A


def centre_of_mass(patterns: Array, q_sampling_per_A: tuple[float, float]) -> Array:
    """Centre of mass of each pattern: (Ry, Rx, Qy, Qx) -> (2, Ry, Rx) [1/Å]. Empty patterns give zero."""
    qy = detector_frequencies(patterns.shape[-2], q_sampling_per_A[0])
    qx = detector_frequencies(patterns.shape[-1], q_sampling_per_A[1])
    total = _safe(patterns.sum(axis=(-2, -1), dtype=np.float64))
    y = patterns.sum(axis=-1, dtype=np.float64) @ qy / total
    x = patterns.sum(axis=-2, dtype=np.float64) @ qx / total
    return np.stack([y, x])


def quadrant_dpc(patterns: Array, q_sampling_per_A: tuple[float, float], *, disc_radius_per_A: float) -> Array:
    """Centre of mass as a four-quadrant detector estimates it: (Ry, Rx, Qy, Qx) -> (2, Ry, Rx) [1/Å].

    The row (and column) of pixels through zero counts to neither half.
    """
    del q_sampling_per_A  # half-plane sums do not know where within the half a count fell
    sign_y = np.sign(detector_frequencies(patterns.shape[-2], 1.0))
    sign_x = np.sign(detector_frequencies(patterns.shape[-1], 1.0))
    total = _safe(patterns.sum(axis=(-2, -1), dtype=np.float64))
    y = patterns.sum(axis=-1, dtype=np.float64) @ sign_y / total
    x = patterns.sum(axis=-2, dtype=np.float64) @ sign_x / total
    return np.stack([y, x]) * (np.pi * disc_radius_per_A / 4)


def along_scan_axes(vectors: Array, params: np.void) -> Array:
    """Components along the scan axes of vectors given along the detector's: (2, Ry, Rx) -> (2, Ry, Rx).

    Probe (i, j) lies at y = y0 + i cos + j sin, x = x0 + j cos - i sin (in steps), by `scan_rotation_deg`.
    """
    return rotated(vectors, float(params["scan_rotation_deg"]))


def rotated(vectors: Array, scan_rotation_deg: float) -> Array:
    """`along_scan_axes` for an angle in degrees: (2, …) -> (2, …)."""
    angle = np.deg2rad(scan_rotation_deg)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([cos * vectors[0] - sin * vectors[1], sin * vectors[0] + cos * vectors[1]])


def integrate_gradient(gradient: Array, step: tuple[float, float]) -> Array:
    """The image, of mean zero, whose differences are nearest to a measured gradient in the least-squares sense.

    Args:
        gradient: (2, Ry, Rx), along the scan axes, unit per Å.
        step: distance of neighbouring positions along y and x [Å].

    Returns:
        (Ry, Rx) in the gradient's unit times Å.
    """
    _, ny, nx = gradient.shape
    # difference between neighbours by the trapezoidal rule: (Ry-1, Rx) and (Ry, Rx-1)
    dy = 0.5 * (gradient[0, 1:, :] + gradient[0, :-1, :]) * step[0]
    dx = 0.5 * (gradient[1, :, 1:] + gradient[1, :, :-1]) * step[1]
    # minimise |D image - d|²: Dᵀ D image = Dᵀ d
    rhs = np.zeros((ny, nx))
    rhs[1:, :] += dy
    rhs[:-1, :] -= dy
    rhs[:, 1:] += dx
    rhs[:, :-1] -= dx
    eigen_y = 2 - 2 * np.cos(np.pi * np.arange(ny) / ny)
    eigen_x = 2 - 2 * np.cos(np.pi * np.arange(nx) / nx)
    eigen = eigen_y[:, None] + eigen_x[None, :]
    eigen[0, 0] = 1.0
    spectrum = dctn(rhs, type=2, norm="ortho") / eigen
    spectrum[0, 0] = 0.0
    image: Array = idctn(spectrum, type=2, norm="ortho")
    return image


def to_label_grid(image: Array, shape: tuple[int, int]) -> Array:
    """Cubic interpolation of an image over probe positions onto the label's pixels: (Ry, Rx) -> (H, W).

    The label covers the scan field and pixel 0 lies at probe 0, so pixel i lies at i·Ry/H in units of scan steps. The
    outermost values are held beyond the last probe.
    """
    positions = [
        np.minimum(np.arange(n_out) * n_in / n_out, n_in - 1) for n_in, n_out in zip(image.shape, shape, strict=True)
    ]
    grid = np.meshgrid(*positions, indexing="ij")
    out: Array = map_coordinates(image, grid, order=3, mode="nearest")
    return out


def reconstruct(patterns: Array, params: np.void, label_shape: tuple[int, int], *, method: str) -> Array:
    """Projected potential [V·Å] of mean zero, by `method` "com" or "idpc": (Ry, Rx, Qy, Qx) -> (H, W).

    `params` is the sample's row of `PARAMS_DTYPE`.
    """
    energy = float(params["energy_keV"])
    q_sampling = (float(params["Q_sampling_y_per_A"]), float(params["Q_sampling_x_per_A"]))
    if method == "com":
        com = centre_of_mass(patterns, q_sampling)
    elif method == "idpc":
        radius = float(params["semiangle_mrad"]) * 1e-3 / wavelength_A(energy)
        com = quadrant_dpc(patterns, q_sampling, disc_radius_per_A=radius)
    else:
        raise ValueError(f"method: expected com or idpc, got {method!r}")
    gradient = along_scan_axes(com, params) * (2 * np.pi / interaction_parameter_rad_per_VA(energy))
    step = (float(params["R_sampling_y_A"]), float(params["R_sampling_x_A"]))
    return to_label_grid(integrate_gradient(gradient, step), label_shape)


def _safe(total: Array) -> Array:
    return np.where(total > 0, total, 1.0)
