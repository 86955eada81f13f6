"""Small formulas of electron optics, and the sizes that follow from them. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = [
    "ANTIALIAS_CUTOFF",
    "ANTIALIAS_TAPER",
    "antialias_angle_mrad",
    "atomic_number",
    "cell_points",
    "chemical_symbol",
    "interaction_parameter",
    "probe_radius_A",
    "slices_per_period",
    "smooth_size",
    "wavelength_A",
]

# abTEM's anti-aliasing aperture: everything beyond this part of the Nyquist frequency is zeroed, over a cosine edge
# that begins `taper` before it (Kirkland, "Advanced Computing in Electron Microscopy", section 6.8).
ANTIALIAS_CUTOFF = 2.0 / 3.0
ANTIALIAS_TAPER = 0.01

_REST_ENERGY_EV = 510998.95  # m c^2, CODATA 2018
_HC_EV_A = 12398.419843320026  # h c in eV Å, exact in the SI of 2019


def wavelength_A(energy_keV: float) -> float:
    """Relativistic electron wavelength in Å (Kirkland, eq. 2.5)."""
    energy = energy_keV * 1e3
    return _HC_EV_A / math.sqrt(energy * (2.0 * _REST_ENERGY_EV + energy))


def interaction_parameter(energy_keV: float) -> float:
    """sigma in rad / (V Å): exp(i sigma V) for a projected potential V in V Å (Kirkland, eq. 5.6)."""
    energy = energy_keV * 1e3
    relativistic = (_REST_ENERGY_EV + energy) / (2.0 * _REST_ENERGY_EV + energy)
    return 2.0 * math.pi / (wavelength_A(energy_keV) * energy) * relativistic


def antialias_angle_mrad(energy_keV: float, sampling_A: float) -> float:
    """The largest scattering angle that a grid of this sampling carries, mrad."""
    cutoff = ANTIALIAS_CUTOFF - ANTIALIAS_TAPER
    return 1e3 * wavelength_A(energy_keV) * cutoff / (2.0 * sampling_A)


def smooth_size(least: float) -> int:
    """The smallest even number of points >= `least` whose only prime factors are 2, 3, 5 and 7 (fast transforms)."""
    n = max(2, math.ceil(least - 1e-9))
    n += n % 2
    while not _is_smooth(n):
        n += 2
    return n


def cell_points(least: float, cells: int) -> int:
    """The smallest number of points >= `least` in one of so many cells: prime factors as above, even in all cells."""
    n = max(2, math.ceil(least - 1e-9))
    while not _is_smooth(n) or n * cells % 2:
        n += 1
    return n


def _is_smooth(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1


def slices_per_period(period_A: float, slice_thickness_A: float) -> int:
    """Slices that one period along the beam is cut into, so that every slice boundary repeats with the crystal."""
    return max(1, round(period_A / slice_thickness_A))


def probe_radius_A(values: Mapping[str, float], thickness_A: float) -> float:
    """A safe estimate of the probe's radius anywhere in the specimen, Å.

    The radius of the Airy disc (0.61 lambda / alpha) plus the largest ray displacement, the gradient of the aberration
    function at the edge of the aperture, taken at the entrance and at the exit of the specimen.
    """
    alpha = values["semiangle_mrad"] * 1e-3
    airy = 0.61 * wavelength_A(values["energy_keV"]) / alpha
    defocus = values["defocus_A"]
    focus = max(abs(defocus), abs(defocus - thickness_A)) + abs(values["C12_A"])
    rays = (
        focus * alpha
        + (abs(values["C21_A"]) + abs(values["C23_A"])) * alpha**2
        + (abs(values["C30_A"]) + abs(values["C32_A"]) + abs(values["C34_A"])) * alpha**3
        + abs(values["C50_A"]) * alpha**5
    )
    return airy + rays


def atomic_number(symbol: str) -> int:
    """Z of an element. ValueError for what is none."""
    from ase.data import atomic_numbers

    number = int(atomic_numbers.get(symbol, 0))
    if number == 0:
        raise ValueError(f"{symbol!r} is no chemical element; symbols such as Ga expected")
    return number


def chemical_symbol(number: int) -> str:
    """The element of atomic number Z."""
    from ase.data import chemical_symbols

    return str(chemical_symbols[number])
