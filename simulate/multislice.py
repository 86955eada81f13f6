"""The fast multislice: abTEM makes potential, probe and aperture, the propagation loop is ours.

What abTEM does anew for every batch of positions is done once: the transmission functions exp(i sigma V) for each
potential and energy, and only for the different slices of a period; the probe once for a sample, moved to its positions
by a phase; the plans once for a grid. The last propagation is left out, since it changes only the phase of what the
detector sees. Numbers agree with abTEM's within rounding (tests/physics/test_fast_against_abtem.py), and do not depend
on how positions are batched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.abtem_backend import AbtemSimulator
from exitwave.simulate.passes import propagations
from exitwave.simulate.propagation import KeptRows, Propagation, batch_waves, kept_rows, scales
from exitwave.simulate.scanning import scan_patterns
from exitwave.simulate.slices import Slices
from exitwave.simulate.tasks import SampleSpec

__all__ = ["KEPT_GRIDS", "KEPT_TRANSMISSION_BYTES", "FastSimulator"]

# What is kept for the samples that follow, in a worker: grids with their buffers and plans; transmission functions.
KEPT_GRIDS = 4
KEPT_TRANSMISSION_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, eq=False)
class _Beam:
    """A sample's optics as the loop wants them: (kept ky, kx), zero frequency first."""

    rows: KeptRows  # those that the antialias aperture passes, or that the probe holds before the first slice
    probe: NDArray[np.complexfloating]
    propagator: NDArray[np.complexfloating]
    aperture: NDArray[np.floating]  # whole, (x, y)
    incident: float  # total intensity of the probe


class FastSimulator(AbtemSimulator):
    """Multislice with abTEM's physics and our loop. `batch` positions pass through a slice together."""

    name = "fast"

    def __init__(self, *, precision: Literal["float32", "float64"] = "float32", batch: int | None = None) -> None:
        super().__init__(precision=precision)
        self.version = f"4+abtem{self.version}"
        self._batch = batch
        self._propagations: OrderedDict[Any, Propagation] = OrderedDict()
        self._transmissions: OrderedDict[Any, NDArray[np.complexfloating]] = OrderedDict()

    def patterns(self, spec: SampleSpec, slices: Slices) -> NDArray[np.float64]:
        return self._patterns_at([spec], slices)[0]

    def pass_patterns(self, members: Sequence[SampleSpec], slices: Slices) -> list[NDArray[np.float64]]:
        made: dict[int, NDArray[np.float64]] = {}
        for places in propagations(members):
            made |= zip(places, self._patterns_at([members[place] for place in places], slices), strict=True)
        return [made[place] for place in range(len(members))]

    def _patterns_at(self, members: Sequence[SampleSpec], slices: Slices) -> list[NDArray[np.float64]]:
        """Patterns of samples that differ in thickness alone, thinnest first, from one propagation."""
        from exitwave.simulate import kernels

        spec = members[-1]
        points = self.positions(spec)
        beam = self._beam(spec)
        detector = self.detector(spec).of_rows(beam.rows.take)
        planes = sorted({member.exit_plane for member in members})
        out = np.empty((len(planes), len(points), *spec.recipe.detector.shape))

        bands, line = detector.bands(), np.empty(spec.grid_yx[1])

        def detect(position: int, which: int, intensity: NDArray[np.float64]) -> None:
            if bands is None:
                out[which, position] = detector(intensity) / beam.incident
            else:
                kernels.resample(intensity, *bands, line, beam.incident, out[which, position])

        self._propagate(spec, beam, slices, points, planes, detect)
        return [scan_patterns(spec, out[planes.index(member.exit_plane)]) for member in members]

    def exit_intensity(self, spec: SampleSpec, slices: Slices, points_yx: NDArray[np.float64]) -> NDArray[np.float64]:
        """Diffraction intensity on the whole grid, (positions, Ny, Nx), zero frequency first; not normalised."""
        return self.exit_intensities(spec, slices, points_yx, (len(slices.order),))[0]

    def exit_intensities(
        self, spec: SampleSpec, slices: Slices, points_yx: NDArray[np.float64], exit_planes: Sequence[int]
    ) -> NDArray[np.float64]:
        """As `exit_intensity`, at several exit planes of one pass: (exit planes, positions, Ny, Nx)."""
        out = np.empty((len(exit_planes), len(points_yx), *spec.grid_yx))
        beam = self._beam(spec)

        def detect(position: int, exit_plane: int, intensity: NDArray[np.float64]) -> None:
            out[exit_plane, position] = beam.rows.spread(intensity)

        self._propagate(spec, beam, slices, points_yx, exit_planes, detect)
        return out

    # -- what the loop is given --------------------------------------------------------------------------------------

    def _beam(self, spec: SampleSpec) -> _Beam:
        import scipy.fft

        optics = self.optics(spec)
        probe = scipy.fft.fft2(optics.probe, workers=1).T  # (ky, kx)
        size = np.abs(probe).max(axis=1)
        lit = size > 64 * np.finfo(self.real).eps * size.max()
        rows = kept_rows((optics.aperture > 0).any(axis=0) | lit)
        return _Beam(
            rows=rows,
            probe=rows.take(probe),
            propagator=rows.take(optics.propagator.T),
            aperture=optics.aperture,
            incident=float((np.abs(probe.astype(np.complex128)) ** 2).sum()),
        )

    def _propagate(
        self,
        spec: SampleSpec,
        beam: _Beam,
        slices: Slices,
        points_yx: NDArray[np.float64],
        exit_planes: Sequence[int],
        detect: Callable[[int, int, NDArray[np.float64]], None],
    ) -> None:
        from exitwave.simulate import kernels

        (ny, nx), (ly, lx) = spec.grid_yx, spec.structure.extent_yx_A
        ky = beam.rows.take(np.fft.fftfreq(ny, ly / ny))
        kx = np.fft.fftfreq(nx, lx / nx)
        powers = scales(ny * nx, exit_planes[-1])
        weight = np.abs(beam.propagator.astype(np.complex128)) ** 2
        intensity = np.empty((len(beam.rows), nx))

        def observe(position: int, which: int, spectrum: NDArray[np.complexfloating]) -> None:
            kernels.intensity(spectrum, weight, powers.made_good[exit_planes[which]], intensity)
            detect(position, which, intensity)

        self._propagation(spec.grid_yx, beam.rows).run(
            probe=beam.probe * self.real.type(powers.larger),
            shifts=[
                (np.exp(-2j * np.pi * y * ky).astype(self.complex), np.exp(-2j * np.pi * x * kx).astype(self.complex))
                for y, x in points_yx
            ],
            transmissions=self.bandlimited(spec, slices, beam.aperture),
            order=slices.order,
            propagator=beam.propagator,
            scales=powers,
            exit_planes=exit_planes,
            observe=observe,
        )

    def _propagation(self, grid_yx: tuple[int, int], rows: KeptRows) -> Propagation:
        from exitwave.simulate.transforms import planned_with

        key = (grid_yx, rows, planned_with())
        if key not in self._propagations:
            if len(self._propagations) >= KEPT_GRIDS:
                self._propagations.popitem(last=False)
            batch = self._batch or batch_waves(grid_yx, self.complex.itemsize)
            self._propagations[key] = Propagation(grid_yx, rows, self.complex, batch=batch)
        self._propagations.move_to_end(key)
        return self._propagations[key]

    def bandlimited(
        self, spec: SampleSpec, slices: Slices, aperture: NDArray[np.floating]
    ) -> NDArray[np.complexfloating]:
        """Band-limited exp(i sigma V) of the different slices, (slices, x, y); kept for the samples that follow."""
        key = (slices.key, spec.grid_yx, spec.values["energy_keV"])
        if slices.key is not None and key in self._transmissions:
            self._transmissions.move_to_end(key)
            return self._transmissions[key]
        made = super().bandlimited(spec, slices, aperture)
        if slices.key is not None:
            self._transmissions[key] = made
            held = sum(array.nbytes for array in self._transmissions.values())
            while held > KEPT_TRANSMISSION_BYTES and len(self._transmissions) > 1:
                held -= self._transmissions.popitem(last=False)[1].nbytes
        return made
