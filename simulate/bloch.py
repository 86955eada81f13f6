"""The Bloch route: a crystal that repeats across the beam is propagated on one of its cells, for each beam.

A supercell of N x M equal cells, on a grid that has whole points in each, is the same from cell to cell. A product with
such a transmission function couples a frequency k only to k + G, G being the reciprocal lattice of one cell, and the
propagator couples nothing: multislice is block diagonal in the Bloch vector (the theorem of Bloch, Z. Phys. 52 (1929)
555; Kirkland, "Advanced Computing in Electron Microscopy", section 6.4, for the step itself). A point of diffraction
space with index n belongs to the class n mod N, and is number n // N within it:

    psi(r) = exp(2 pi i kappa.r) u(r),    u periodic in one cell,    u <- F^-1 [ P(kappa + G) F [ t u ] ]

Every beam b of the soft aperture is therefore sent through one cell alone, by the loop of the fast multislice, with the
propagator of its class; and a point q of the detector's window hears only of the beams of its own class:

    psi_p(q) = sum_(b in class of q)  A(b) exp(-i chi(b)) exp(-2 pi i b.r_p)  S_b(q)

Nothing is left out: potential, grid, antialias aperture and propagator are those of the whole supercell, and what comes
out differs from multislice by rounding. Where atoms are displaced, or cells hold no whole number of points, no class
stands alone and the route does not exist (`route.repeats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from exitwave.ingest.errors import UsageError
from exitwave.simulate.abtem_backend import Optics
from exitwave.simulate.detector import Resampling
from exitwave.simulate.fitness import unfit
from exitwave.simulate.propagation import KeptRows, kept_rows, scales
from exitwave.simulate.scanning import scan_patterns
from exitwave.simulate.slices import Slices
from exitwave.simulate.smatrix import SMatrixSimulator, beams_of
from exitwave.simulate.tasks import SampleSpec

__all__ = ["BlochSimulator"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Classes:
    """The beams of a sample, sorted by class: class c has those from `firsts[c]` to `firsts[c + 1]`."""

    beams_yx: NDArray[np.intp]  # (beams, 2), points of the whole grid
    kappas_yx: NDArray[np.intp]  # (classes, 2)
    firsts: NDArray[np.intp]  # (classes + 1,)
    numbers: NDArray[np.intp]  # (Ny, Nx) of kappa -> class, -1 where it has no beam


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seen:
    """The points of the detector's window that any class reaches, sorted by class.

    `places` index the window (rows, columns), flat; `sources` index (kept rows, columns) of a cell's spectrum, flat;
    `weight` is what the antialias aperture leaves of an intensity.
    """

    shape: tuple[int, int]
    firsts: NDArray[np.intp]  # (classes + 1,)
    places: NDArray[np.intp]
    sources: NDArray[np.intp]
    weight: NDArray[np.float64]
    detector: Resampling


class BlochSimulator(SMatrixSimulator):
    """Multislice of beams, each on one cell of a crystal that repeats; for samples of which `route.repeats` is true."""

    name = "bloch"

    def pass_patterns(self, members: Sequence[SampleSpec], slices: Slices) -> list[NDArray[np.float64]]:
        spec = max(members, key=lambda member: member.exit_plane)
        if (reason := unfit(spec, "bloch")) is not None:
            raise UsageError(f"{spec.structure.source}: {reason}")
        planes = sorted({member.exit_plane for member in members})
        optics = self.optics(spec)
        classes = _classes(spec)
        rows = _kept(spec, optics, classes)
        matrix = self._matrix(spec, optics, slices, planes, classes, rows)
        seen = self._seen(spec, optics, classes, rows)
        height = spec.grid_yx[0] // spec.structure.repeat_xy[1] * (spec.grid_yx[1] // spec.structure.repeat_xy[0])
        made_good = scales(height, planes[-1]).made_good
        parts = [_of_points(of_plane, classes, seen) for of_plane in matrix]
        return [
            self._reduced(
                member,
                self._front(member, classes.beams_yx),
                parts[planes.index(member.exit_plane)],
                made_good[member.exit_plane],
                classes,
                seen,
            )
            for member in members
        ]

    def _matrix(
        self,
        spec: SampleSpec,
        optics: Optics,
        slices: Slices,
        planes: Sequence[int],
        classes: _Classes,
        rows: KeptRows,
    ) -> NDArray[np.complexfloating]:
        """S: each beam's spectrum behind each exit plane, (exit planes, beams, kept ky of a cell, kx of a cell)."""
        rx, ry = spec.structure.repeat_xy
        cell_yx = spec.grid_yx[0] // ry, spec.grid_yx[1] // rx
        cell = replace(
            slices,
            different=slices.different[:, : cell_yx[1], : cell_yx[0]],
            key=None if slices.key is None else ("cell", slices.key),
        )
        transmissions = self.bandlimited(spec, cell, optics.aperture[::rx, ::ry])
        propagator = optics.propagator.T
        powers = scales(cell_yx[0] * cell_yx[1], planes[-1])
        unit = np.full((len(rows), cell_yx[1]), powers.larger, dtype=self.complex)
        one_y, one_x = (np.eye(count, dtype=self.complex) for count in cell_yx)
        made = np.empty((len(planes), len(classes.beams_yx), len(rows), cell_yx[1]), dtype=self.complex)
        propagation = self._propagation(cell_yx, rows)
        for (ky, kx), first, last in zip(classes.kappas_yx, classes.firsts, classes.firsts[1:], strict=False):
            beams = classes.beams_yx[first:last]
            of_class = made[:, first:last]

            def keep(
                beam: int,
                which: int,
                spectrum: NDArray[np.complexfloating],
                of_class: NDArray[np.complexfloating] = of_class,
            ) -> None:
                of_class[which, beam] = spectrum

            propagation.run(
                probe=unit,
                shifts=[(rows.take(one_y[y // ry]), one_x[x // rx]) for y, x in beams],
                transmissions=transmissions,
                order=slices.order,
                propagator=rows.take(propagator[ky::ry, kx::rx]),
                scales=powers,
                exit_planes=planes,
                observe=keep,
            )
        return made

    def _seen(self, spec: SampleSpec, optics: Optics, classes: _Classes, rows: KeptRows) -> _Seen:
        rx, ry = spec.structure.repeat_xy
        columns_of_cell = spec.grid_yx[1] // rx
        kept = np.full(rows.points, -1)
        kept[rows.take(np.arange(rows.points))] = np.arange(len(rows))
        detector = self.detector(spec)
        in_y, in_x = (np.flatnonzero(hit) for hit in detector.seen())
        weight = np.abs(optics.propagator.T[np.ix_(in_y, in_x)].astype(np.complex128)) ** 2
        number = classes.numbers[np.ix_(in_y % ry, in_x % rx)]
        source = kept[in_y // ry][:, None] * columns_of_cell + (in_x // rx)[None, :]
        reached = np.flatnonzero((number >= 0) & (kept[in_y // ry] >= 0)[:, None] & (weight > 0))
        places = reached[np.argsort(number.ravel()[reached], kind="stable")]
        return _Seen(
            shape=(len(in_y), len(in_x)),
            firsts=np.searchsorted(number.ravel()[places], np.arange(len(classes.kappas_yx) + 1)),
            places=places,
            sources=source.ravel()[places],
            weight=weight.ravel()[places],
            detector=detector.of_part(in_y, in_x, len(in_y)),
        )

    def _reduced(
        self,
        spec: SampleSpec,
        front: NDArray[np.complexfloating],
        parts: tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.intp]],
        scale: float,
        classes: _Classes,
        seen: _Seen,
    ) -> NDArray[np.float64]:
        """Patterns of one sample from what stands in front of the matrix, (positions, beams), position by position."""
        from exitwave.simulate import kernels

        bands = seen.detector.bands()
        out = np.empty((len(front), *spec.recipe.detector.shape))
        intensity, line = np.zeros(seen.shape), np.empty(seen.shape[1])
        room = np.empty((2, int(np.diff(seen.firsts).max(initial=0))), dtype=self.real)
        weight = seen.weight * scale
        for position, amplitudes in enumerate(front):
            kernels.combine(
                amplitudes, classes.firsts, seen.firsts, *parts, seen.places, weight, room, intensity.reshape(-1)
            )
            if bands is None:
                out[position] = seen.detector(intensity)
            else:
                kernels.resample(intensity, *bands, line, 1.0, out[position])
        return scan_patterns(spec, out)


def _classes(spec: SampleSpec) -> _Classes:
    rx, ry = spec.structure.repeat_xy
    beams_yx = beams_of(spec)
    kappa = beams_yx % np.array([ry, rx])
    flat = kappa[:, 0] * rx + kappa[:, 1]
    order = np.argsort(flat, kind="stable")
    found, firsts = np.unique(flat[order], return_index=True)
    numbers = np.full(ry * rx, -1)
    numbers[found] = np.arange(len(found))
    return _Classes(
        beams_yx=beams_yx[order],
        kappas_yx=np.stack([found // rx, found % rx], axis=1),
        firsts=np.append(firsts, len(beams_yx)),
        numbers=numbers.reshape(ry, rx),
    )


def _kept(spec: SampleSpec, optics: Optics, classes: _Classes) -> KeptRows:
    """Rows of a cell's spectrum in which any class has anything."""
    ry = spec.structure.repeat_xy[1]
    used = np.asarray((optics.aperture > 0).any(axis=0))  # (Ny,)
    used[classes.beams_yx[:, 0]] = True
    return kept_rows(np.asarray(used.reshape(-1, ry).any(axis=1)))  # point kappa + ry j stands at [j, kappa]


def _of_points(
    matrix: NDArray[np.complexfloating], classes: _Classes, seen: _Seen
) -> tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.intp]]:
    """Of S (beams, kept ky, kx) what the window sees: real and imaginary parts, class by class, (its beams, its points)
    each and flat, and where each class begins."""
    flat = matrix.reshape(len(matrix), -1)
    pieces = [
        flat[first:last][:, seen.sources[at:end]]
        for first, last, at, end in zip(classes.firsts, classes.firsts[1:], seen.firsts, seen.firsts[1:], strict=False)
    ]
    firsts = np.concatenate([[0], np.cumsum([piece.size for piece in pieces])]).astype(np.intp)
    held = np.concatenate([piece.ravel() for piece in pieces])
    return np.ascontiguousarray(held.real), np.ascontiguousarray(held.imag), firsts
