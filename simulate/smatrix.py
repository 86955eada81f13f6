"""The exact scattering-matrix route: every beam of the aperture is sent through the specimen once, for all probes.

Multislice is linear in the wave that enters. A probe is a sum of plane waves, one for each point of diffraction space
to which the soft aperture gives any weight (a *beam*; Ophus, "A fast image simulation algorithm for scanning
transmission electron microscopy", Adv. Struct. Chem. Imaging 3 (2017) 13, with interpolation factor 1, which leaves
nothing out):

    psi_p(q) = sum_b  A(b) exp(-i chi(b)) exp(-2 pi i b.r_p)  S_b(q)

S depends on the potential, the energy and the tilt; position, defocus and aberrations stand in front of it, and the
sum is one product of matrices, (positions, beams) times (beams, points of the detector). Where probes times settings
outnumber the beams, that is less work than a multislice for each probe; see route.py.

Memory is bounded: S is kept only where the detector looks, and in bands of rows where even that is too much, each band
being a pass of its own through the specimen. Products have one shape for a sample, whatever else shares its pass, so
that its bits are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.detector import Resampling
from exitwave.simulate.multislice import FastSimulator
from exitwave.simulate.propagation import KeptRows, kept_rows, scales
from exitwave.simulate.route import MATRIX_BYTES
from exitwave.simulate.scanning import scan_patterns
from exitwave.simulate.slices import Slices
from exitwave.simulate.tasks import SampleSpec

__all__ = ["SMatrixSimulator", "beams_of"]

_TILE_POINTS = 4096  # of the detector's window in one product
_MOST_POSITIONS = 64  # in one product


@dataclass(frozen=True, kw_only=True, eq=False)
class _Window:
    """The part of diffraction space that the detector looks at, in tiles of whole rows.

    `rows` and `columns` index (kept ky, kx); the last tile is filled up with `padding` rows of zeros.
    """

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    tile_rows: int
    tiles: int
    weight: NDArray[np.float64]  # (tiles, tile rows * columns): what the antialias aperture leaves of an intensity
    detectors: tuple[Resampling, ...]  # what falls from each tile onto the detector


def beams_of(spec: SampleSpec) -> NDArray[np.intp]:
    """Points of the grid in diffraction space to which the soft aperture gives weight, (beams, 2) as (ky, kx).

    The aperture's edge falls linearly over one point: the weight is clip((alpha_max - alpha) / width + 1/2, 0, 1).
    """
    (ny, nx), (ly, lx) = spec.grid_yx, spec.structure.extent_yx_A
    ay = np.fft.fftfreq(ny, d=ly / ny)[:, None] * spec.wavelength_A
    ax = np.fft.fftfreq(nx, d=lx / nx)[None, :] * spec.wavelength_A
    alpha, phi = np.hypot(ax, ay), np.arctan2(ay, ax)
    width = np.hypot(np.cos(phi) * spec.wavelength_A / lx, np.sin(phi) * spec.wavelength_A / ly)
    reach = spec.values["semiangle_mrad"] * 1e-3 + width / 2 * (1 + 1e-5)  # abTEM's own edge is rounded to float32
    return np.argwhere((alpha < reach) | (alpha == 0))


class SMatrixSimulator(FastSimulator):
    """Multislice of beams instead of probes; the same potential, optics and loop as the fast multislice."""

    name = "smatrix"

    def pass_patterns(self, members: Sequence[SampleSpec], slices: Slices) -> list[NDArray[np.float64]]:
        spec = max(members, key=lambda member: member.exit_plane)
        planes = sorted({member.exit_plane for member in members})
        optics = self.optics(spec)
        beams_yx = beams_of(spec)
        lit = np.zeros(spec.grid_yx[0], dtype=bool)
        lit[beams_yx[:, 0]] = True
        rows = kept_rows((optics.aperture > 0).any(axis=0) | lit)
        propagator = rows.take(optics.propagator.T)
        window = self._window(spec, rows, np.abs(propagator.astype(np.complex128)) ** 2)
        fronts = [self._front(member, beams_yx) for member in members]
        found = [
            np.zeros((len(front), *member.recipe.detector.shape)) for front, member in zip(fronts, members, strict=True)
        ]
        transmissions = self.bandlimited(spec, slices, optics.aperture)
        made_good = scales(spec.grid_yx[0] * spec.grid_yx[1], planes[-1]).made_good
        for first, matrix in self._bands(spec, rows, propagator, transmissions, slices, planes, beams_yx, window):
            for member, front, out in zip(members, fronts, found, strict=True):
                plane = member.exit_plane
                self._reduce(front, matrix[planes.index(plane)], made_good[plane], first, window, out)
        return [scan_patterns(member, out) for member, out in zip(members, found, strict=True)]

    def _window(self, spec: SampleSpec, rows: KeptRows, weight: NDArray[np.float64]) -> _Window:
        detector = self.detector(spec).of_rows(rows.take)
        seen_rows, seen_columns = (np.flatnonzero(seen) for seen in detector.seen())
        tile_rows = max(1, _TILE_POINTS // len(seen_columns))
        tiles = -(-len(seen_rows) // tile_rows)
        padding = ((0, tiles * tile_rows - len(seen_rows)), (0, 0))
        cuts = (seen_rows[start : start + tile_rows] for start in range(0, len(seen_rows), tile_rows))
        return _Window(
            rows=seen_rows,
            columns=seen_columns,
            tile_rows=tile_rows,
            tiles=tiles,
            weight=np.pad(weight[np.ix_(seen_rows, seen_columns)], padding).reshape(tiles, -1),
            detectors=tuple(detector.of_part(cut, seen_columns, tile_rows) for cut in cuts),
        )

    def _front(self, spec: SampleSpec, beams_yx: NDArray[np.intp]) -> NDArray[np.complexfloating]:
        """What stands in front of the matrix: (positions, beams), as parts of the square root of the incident beam."""
        import scipy.fft

        probe = scipy.fft.fft2(self.optics(spec).probe.astype(np.complex128), workers=1).T  # (ky, kx)
        amplitude = probe[beams_yx[:, 0], beams_yx[:, 1]] / np.sqrt((np.abs(probe) ** 2).sum())
        (ny, nx), (ly, lx) = spec.grid_yx, spec.structure.extent_yx_A
        ky, kx = np.fft.fftfreq(ny, ly / ny)[beams_yx[:, 0]], np.fft.fftfreq(nx, lx / nx)[beams_yx[:, 1]]
        points = self.positions(spec)
        front: NDArray[np.complexfloating] = amplitude * np.exp(-2j * np.pi * (points[:, :1] * ky + points[:, 1:] * kx))
        return front.astype(self.complex)

    def _bands(
        self,
        spec: SampleSpec,
        rows: KeptRows,
        propagator: NDArray[np.complexfloating],
        transmissions: NDArray[np.complexfloating],
        slices: Slices,
        planes: Sequence[int],
        beams_yx: NDArray[np.intp],
        window: _Window,
    ) -> Iterator[tuple[int, NDArray[np.complexfloating]]]:
        """(first tile, S) of each band of tiles; S is (exit planes, tiles, beams, points of a tile)."""
        ny, nx = spec.grid_yx
        points = window.tile_rows * len(window.columns)
        tile_bytes = len(planes) * len(beams_yx) * points * self.complex.itemsize
        most = max(1, MATRIX_BYTES // tile_bytes)
        # A beam is a plane wave of amplitude 1: one point of its transform, over the number of points of the grid.
        one_y, one_x = (np.eye(count, dtype=self.complex) for count in (ny, nx))
        beams = [(rows.take(one_y[y]), one_x[x]) for y, x in beams_yx]
        powers = scales(ny * nx, planes[-1])
        unit = np.full((len(rows), nx), powers.larger, dtype=self.complex)
        for first in range(0, window.tiles, most):
            count = min(most, window.tiles - first)
            matrix = np.zeros((len(planes), count, len(beams_yx), points), dtype=self.complex)
            band = window.rows[first * window.tile_rows : (first + count) * window.tile_rows]
            cut = np.ix_(band, window.columns)

            def keep(
                beam: int,
                which: int,
                spectrum: NDArray[np.complexfloating],
                matrix: NDArray[np.complexfloating] = matrix,
                cut: tuple[NDArray[np.intp], ...] = cut,
            ) -> None:
                seen = spectrum[cut].reshape(-1)
                flat = np.zeros(matrix.shape[1] * points, dtype=seen.dtype)
                flat[: seen.size] = seen
                matrix[which, :, beam] = flat.reshape(-1, points)

            self._propagation(spec.grid_yx, rows).run(
                probe=unit,
                shifts=beams,
                transmissions=transmissions,
                order=slices.order,
                propagator=propagator,
                scales=powers,
                exit_planes=planes,
                observe=keep,
            )
            yield first, matrix

    def _reduce(
        self,
        front: NDArray[np.complexfloating],
        matrix: NDArray[np.complexfloating],
        scale: float,
        first: int,
        window: _Window,
        out: NDArray[np.float64],
    ) -> None:
        """Adds to `out` (positions, Qy, Qx) `scale` times what the tiles of `matrix` (tiles, beams, points) hold.

        Each product has one shape for a sample; BLAS rounds a product of another shape differently.
        """
        positions = min(_MOST_POSITIONS, -(-len(front) // 8) * 8)
        block = np.zeros((positions, front.shape[1]), dtype=front.dtype)
        for start in range(0, len(front), positions):
            some = front[start : start + positions]
            block[: len(some)], block[len(some) :] = some, 0
            for index, tile in enumerate(matrix, start=first):
                psi = block @ tile  # (positions, points of a tile)
                intensity = psi.real.astype(np.float64) ** 2 + psi.imag.astype(np.float64) ** 2
                intensity *= window.weight[index] * scale
                patterns = window.detectors[index](intensity.reshape(positions, window.tile_rows, -1))
                out[start : start + positions] += patterns[: len(some)]
