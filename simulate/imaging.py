"""A plane wave through the specimen, and what an objective lens makes of it: a through-focal series of images.

The illumination is parallel, along the zone axis but for the sample's tilt. What leaves the specimen is imaged by a
lens with the sample's own aberrations (in a scanning microscope the same coefficients describe the lens before the
specimen): C_nm and phi_nm of `/params`. Its focus is the series' own, and takes the place of `defocus_A`:

    psi_f(r) = sum_k  psi(k) A(k) exp(-i chi_f(k)) exp(2 pi i k.r),        I_f = |psi_f|^2

with chi_f of `aberration_phase` at defocus f (Kirkland, "Advanced Computing in Electron Microscopy", eqs. 2.22 and
3.4). Focus is positive where the lens is weakened (underfocus): the image then shows the wave at a plane `focus_A`
upstream of the exit surface, so that one convention holds for probe and image. A is the objective's aperture, soft over
one pixel of diffraction space as that of the probe is.

Fluctuations of focus are an incoherent sum over a Gaussian of deviation `focal_spread_A`, by Gauss-Hermite quadrature:
exact also for the non-linear part of an image, which the usual envelope is not. Intensities are relative to the beam,
whose image without a specimen and without an aperture's loss is 1 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.label import lattice_phases
from exitwave.simulate.physics import wavelength_A

__all__ = ["QUADRATURE", "aberration_phase", "focal_images", "objective", "plane_wave"]

QUADRATURE = 7  # points over the focal spread


def aberration_phase(
    alpha: NDArray[np.float64], phi: NDArray[np.float64], values: Mapping[str, float]
) -> NDArray[np.float64]:
    """chi in rad at angle `alpha` (rad) and azimuth `phi` from the x axis towards y.

    chi = 2 pi / lambda sum_nm alpha^(n+1) / (n+1) C_nm cos(m (phi - phi_nm)) (Kirkland, eq. 2.22), C10 = -defocus.
    """
    chi = alpha**2 / 2 * -values["defocus_A"]
    for n, m in ((1, 2), (2, 1), (2, 3), (3, 0), (3, 2), (3, 4), (5, 0)):
        turned = np.cos(m * (phi - math.radians(values[f"phi{n}{m}_deg"]))) if m else 1.0
        chi = chi + alpha ** (n + 1) / (n + 1) * values[f"C{n}{m}_A"] * turned
    return 2.0 * np.pi / wavelength_A(values["energy_keV"]) * chi


def objective(
    values: Mapping[str, float],
    grid_yx: tuple[int, int],
    extent_yx_A: tuple[float, float],
    aperture_mrad: float | None,
) -> NDArray[np.complex128]:
    """A(k) exp(-i chi(k)) of a lens on the grid of diffraction space, (Ny, Nx), zero frequency first.

    The aperture's edge falls linearly over one pixel, as the part of the pixel inside the circle; None: no aperture.
    """
    (ny, nx), (ly, lx) = grid_yx, extent_yx_A
    wavelength = wavelength_A(values["energy_keV"])
    ay = np.fft.fftfreq(ny, d=ly / ny)[:, None] * wavelength
    ax = np.fft.fftfreq(nx, d=lx / nx)[None, :] * wavelength
    alpha, phi = np.hypot(ax, ay), np.arctan2(ay, ax)
    transfer = np.exp(-1j * aberration_phase(alpha, phi, values))
    if aperture_mrad is not None:
        width = np.hypot(np.cos(phi) * wavelength / lx, np.sin(phi) * wavelength / ly)
        transfer *= np.clip((aperture_mrad * 1e-3 - alpha) / width + 0.5, 0.0, 1.0)
    return transfer


def plane_wave(
    transmissions: Sequence[NDArray[np.complexfloating]],
    order: Iterable[int],
    propagator: NDArray[np.complexfloating],
    exit_planes: Sequence[int],
) -> NDArray[np.complexfloating]:
    """The spectrum of the wave behind each exit plane, (exit planes, a, b), zero frequency first, incident beam 1.

    Through slice after slice: transmit, then propagate to the next (Kirkland, section 6.4). `transmissions` are
    band-limited, (a, b) each in any one order of axes, as is `propagator`; exit planes count slices and ascend.

    In double precision whatever these are in: it is one wave among many probes, and transforms in single precision are
    wrong by the same factors at every slice (of 1 / points and of their own constants), 2e-5 of a wave after 240.
    """
    import scipy.fft

    spectrum = np.zeros(propagator.shape, dtype=np.complex128)
    spectrum[0, 0] = 1.0
    found = [spectrum] if exit_planes[0] == 0 else []
    wave = np.ones(propagator.shape, dtype=np.complex128)
    for count, index in enumerate(order, start=1):
        if count > exit_planes[-1]:
            break
        spectrum = scipy.fft.fft2(wave * transmissions[index], workers=1, norm="forward") * propagator
        if count in exit_planes:
            found.append(spectrum)
        wave = scipy.fft.ifft2(spectrum, workers=1, norm="forward")
    return np.stack(found)


def focal_images(
    spectrum: NDArray[np.complexfloating],
    extent_yx_A: tuple[float, float],
    values: Mapping[str, float],
    focus_A: Sequence[float],
    *,
    shape: tuple[int, int],
    sampling_A: float,
    origin_yx_A: tuple[float, float],
    rotation_deg: float,
    aperture_mrad: float | None = None,
    focal_spread_A: float = 0.0,
) -> NDArray[np.float64]:
    """Images (F, H, W) of an exit wave, from its spectrum (Ny, Nx), zero frequency first.

    Pixel [i, j] is the intensity at the label's point [i, j]: see `label.lattice_points`. It is evaluated there, not
    integrated over a pixel: a camera's transfer belongs to the detector model.
    """
    ny, nx = spectrum.shape
    lens = objective({**values, "defocus_A": 0.0}, (ny, nx), extent_yx_A, aperture_mrad)
    ky = np.broadcast_to(np.fft.fftfreq(ny, d=extent_yx_A[0] / ny)[:, None], (ny, nx))
    kx = np.broadcast_to(np.fft.fftfreq(nx, d=extent_yx_A[1] / nx)[None, :], (ny, nx))
    wave = spectrum.astype(np.complex128) * lens
    held = np.abs(wave) > 1e-12 * np.abs(wave).max()  # what apertures leave: (beams,)
    ky, kx, wave = ky[held], kx[held], wave[held]
    left, right = lattice_phases(ky, kx, shape, sampling_A, origin_yx_A, rotation_deg)  # (H, beams), (W, beams)
    # exp(-i chi) with C10 = -focus: exp(+i pi lambda k^2 focus)
    per_A = np.pi * wavelength_A(values["energy_keV"]) * (ky**2 + kx**2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE if focal_spread_A else 1)
    images = np.zeros((len(focus_A), *shape))
    for image, focus in zip(images, focus_A, strict=True):
        for node, weight in zip(nodes, weights / weights.sum(), strict=True):
            focused = wave * np.exp(1j * per_A * (focus + node * focal_spread_A))
            image += weight * np.abs((left * focused) @ right.T) ** 2
    return images
