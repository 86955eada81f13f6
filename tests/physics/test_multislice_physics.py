"""The reference simulator against textbooks and symmetry: potential, kinematics, propagation, aberrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_samples import campaign, sample, single_atom

from exitwave.simulate.abtem_backend import AbtemSimulator
from exitwave.simulate.physics import interaction_parameter, probe_radius_A, wavelength_A
from exitwave.simulate.plan import make_plan
from exitwave.simulate.tasks import SampleSpec, draw_sample
from exitwave.simulate.weak_phase import probe_spectrum


@pytest.fixture(scope="module")
def simulator() -> AbtemSimulator:
    return AbtemSimulator()


def crystal(builder: dict[str, Any], **changes: Any) -> SampleSpec:
    spec = campaign(structures=[{"builder": builder, **changes.pop("source", {})}], split={}, **changes)
    structure = make_plan(spec, base_dir=Path()).structures[0]
    return draw_sample(structure, spec.recipe(), 0, "train")


def bulk_cell(name: str, *args: Any) -> dict[str, Any]:
    return {"name": "bulk", "args": [name, *args], "kwargs": {"cubic": True}}


ABERRATIONS = {
    "defocus_A": 80.0,
    "C12_A": 30.0,
    "phi12_deg": 25.0,
    "C21_A": 400.0,
    "phi21_deg": -40.0,
    "C23_A": 300.0,
    "phi23_deg": 10.0,
    "C30_A": 2e4,
    "C32_A": 1e4,
    "phi32_deg": 70.0,
    "C34_A": 1.5e4,
    "phi34_deg": 5.0,
    "C50_A": 2e6,
}


@pytest.mark.parametrize("names", [(name,) for name in ABERRATIONS if name[0] != "p"] + [tuple(ABERRATIONS)], ids=str)
def test_aberrations_follow_the_stated_convention(simulator: AbtemSimulator, names: tuple[str, ...]) -> None:
    """abTEM's probe against the polar expansion written out in NumPy, one coefficient at a time and all together."""
    chosen = {
        n: v for n, v in ABERRATIONS.items() if n in names or n.replace("phi", "C").replace("_deg", "_A") in names
    }
    spec = sample(single_atom(width_A=24.0), sampling=chosen)
    built = simulator._probe(spec).build(simulator._scan(np.zeros((1, 2))), lazy=False)
    ours = probe_spectrum(spec.values, spec.grid_yx, spec.structure.extent_yx_A)
    theirs = np.fft.fft2(np.asarray(built.array)[0]).T
    theirs = theirs / np.sqrt((np.abs(theirs) ** 2).sum())
    phase = np.vdot(theirs, ours)
    assert abs(phase) == pytest.approx(1.0, abs=1e-5)
    assert np.abs(theirs * phase - ours).max() < 2e-3 * np.abs(ours).max()


def test_frozen_phonons_repeat_and_soften_the_discs(simulator: AbtemSimulator) -> None:
    common: dict[str, Any] = {"sampling": {"thickness_A": 16, "semiangle_mrad": 15}}
    cold = crystal(bulk_cell("Au"), **common)
    warm = crystal(bulk_cell("Au"), phonons={"count": 2, "rms_A": 0.12}, **common)
    first, again = (next(iter(simulator.simulate([warm]))) for _ in range(2))
    still = next(iter(simulator.simulate([cold])))
    assert first.arrays["cbed"].tobytes() == again.arrays["cbed"].tobytes()
    assert np.abs(first.arrays["cbed"] - still.arrays["cbed"]).max() > 1e-4
    assert first.arrays["potential"].tobytes() == still.arrays["potential"].tobytes()  # the label is of static atoms
    assert first.params["phonon_seed"] != 0 and still.params["phonon_seed"] == 0


def test_finite_projection_has_the_same_total(simulator: AbtemSimulator) -> None:
    infinite, finite = (
        simulator.static_slices(crystal(bulk_cell("Si"), grid={"sampling_A": 0.2, "projection": p})).stacked()
        for p in ("infinite", "finite")
    )
    assert finite.shape == infinite.shape
    # In real space the cusps of the atoms are sampled, in Fourier space they are not: a grid of 0.2 Å tells them apart.
    assert finite.mean() == pytest.approx(float(infinite.mean()), rel=0.1)


def test_wavelength_and_interaction_parameter() -> None:
    """Kirkland, table 2.2 and eq. 5.6."""
    assert wavelength_A(100.0) == pytest.approx(0.0370144, abs=1e-6)
    assert wavelength_A(200.0) == pytest.approx(0.0250793, abs=1e-6)
    assert interaction_parameter(100.0) == pytest.approx(0.924e-3, rel=1e-3)
    assert interaction_parameter(200.0) == pytest.approx(0.7288e-3, rel=1e-3)


def test_the_probe_radius_knows_large_aberrations() -> None:
    values = {n: 0.0 for n in ABERRATIONS} | {"energy_keV": 200.0, "semiangle_mrad": 35.0}
    assert probe_radius_A(values | {"C30_A": 1.3e7}, 0.0) == pytest.approx(557, rel=0.02)
    assert probe_radius_A(values | {"energy_keV": 60.0, "semiangle_mrad": 1.0}, 0.0) == pytest.approx(30, rel=0.02)
