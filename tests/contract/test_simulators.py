"""One suite for every simulator: shapes, normalisation, axes, handedness, registration, repeatability."""

from __future__ import annotations

import numpy as np
import pytest
from sim_samples import plan, sample, single_atom

from exitwave.ingest.errors import UsageError
from exitwave.simulate.label import lattice_points
from exitwave.simulate.simulator import Sample, Simulator, get_simulator, simulate_sample, simulator_names


@pytest.fixture(scope="module", params=simulator_names())
def simulator(request: pytest.FixtureRequest) -> Simulator:
    return get_simulator(request.param)


def run(simulator: Simulator, spec: object) -> Sample:
    (made,) = simulator.simulate([spec])  # type: ignore[list-item]
    return made


def centre_of_mass(patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(y, x) centre of mass of each pattern, in pixels from [Qy//2, Qx//2].

    An even detector has one row and one column without a partner on the other side: they are left out.
    """
    assert patterns.shape[-2] % 2 == 0 and patterns.shape[-1] % 2 == 0
    patterns = patterns[..., 1:, 1:].astype(np.float64)
    rows, columns = patterns.shape[-2:]
    total = patterns.sum((-2, -1))
    y = (patterns.sum(-1) * (np.arange(rows) - rows // 2)).sum(-1) / total
    x = (patterns.sum(-2) * (np.arange(columns) - columns // 2)).sum(-1) / total
    return y, x


def test_a_sample_is_what_its_specification_says(simulator: Simulator) -> None:
    specs = list(plan().samples())[:3]
    samples = list(simulator.simulate(specs))
    assert [s.uid for s in samples] == [s.uid for s in specs]
    for spec, made in zip(specs, samples, strict=True):
        assert set(made.arrays) == set(spec.recipe.fields)
        cbed, potential = made.arrays["cbed"], made.arrays["potential"]
        assert cbed.shape == (2, 2, 16, 16) and cbed.dtype == np.float32
        assert potential.shape == (8, 8) and potential.dtype == np.float32
        assert np.isfinite(cbed).all() and cbed.min() >= 0
        assert cbed.sum((-2, -1)).max() <= 1 + 1e-5
        assert made.params["captured_fraction"] == pytest.approx(cbed.sum((-2, -1)).mean(), abs=1e-5)
        assert made.params["thickness_A"] == pytest.approx(spec.exit_plane * spec.structure.slice_thickness_A)
        assert made.params["exit_plane"] == spec.exit_plane
        assert made.params["defocus_A"] == spec.values["defocus_A"]
        assert made.params["split"] == spec.split.encode()
        assert tuple(made.params["zone_axis"]) == spec.structure.zone_axis


def test_only_the_asked_fields_are_made(simulator: Simulator) -> None:
    assert set(run(simulator, sample(single_atom(), fields=["potential"])).arrays) == {"potential"}


def test_the_same_specification_makes_the_same_bits(simulator: Simulator) -> None:
    spec, other = list(plan().samples())[:2]
    first = run(simulator, spec)
    run(simulator, other)
    again = run(simulator, spec)
    for name, array in first.arrays.items():
        assert array.tobytes() == again.arrays[name].tobytes()
    assert first.params.tobytes() == again.params.tobytes()


def test_without_matter_the_disc_is_centred_and_whole(simulator: Simulator) -> None:
    """A hydrogen atom far away: intensity within the aperture, the same on both sides of [Qy//2, Qx//2]."""
    spec = sample(single_atom(1, at_xy=(1.0, 1.0), width_A=20.0), sampling={"scan_origin": [11, 11]})
    pattern = run(simulator, spec).arrays["cbed"][0, 0]
    y, x = np.indices(pattern.shape) - 16
    angle = np.hypot(y, x) * spec.q_sampling_yx_per_A[0] * spec.wavelength_A * 1e3
    assert pattern[angle <= 23].sum() > 0.999
    inner = pattern[1:, 1:]
    assert np.abs(inner - inner[::-1, ::-1]).max() < 1e-2 * inner.max()


@pytest.mark.parametrize(("axis", "sign"), [("x", -1), ("x", 1), ("y", -1), ("y", 1)])
def test_handedness(simulator: Simulator, axis: str, sign: int) -> None:
    """A single gold atom; the probe 0.5 Å at -x moves the centre of mass towards +Qx and not along y."""
    shift = {"x": (0.0, sign * 0.5), "y": (sign * 0.5, 0.0)}[axis]
    spec = sample(single_atom(), sampling={"scan_origin": [8 + shift[0], 8 + shift[1]]})
    y, x = centre_of_mass(run(simulator, spec).arrays["cbed"][0, 0])
    along, across = (x, y) if axis == "x" else (y, x)
    assert -sign * along > 0.1
    assert abs(across) < 1e-3


@pytest.mark.parametrize("rotation", [0.0, 30.0, 200.0])
def test_label_and_probes_lie_on_one_map(simulator: Simulator, rotation: float) -> None:
    """An atom under label pixel [12, 20] and probe [3, 5]: the label peaks there, the probe is on axis there."""
    origin = (5.3, 6.1)
    y, x = lattice_points((32, 32), 0.125, origin, rotation)[12, 20]
    spec = sample(
        single_atom(at_xy=(float(x), float(y))),
        sampling={"scan_origin": list(origin), "scan_rotation_deg": rotation, "semiangle_mrad": 25},
        scan={"shape": [8, 8], "step_A": 0.5},
        label={"shape": [32, 32], "blur_A": 0.2},
    )
    made = run(simulator, spec)
    label, cbed = made.arrays["potential"], made.arrays["cbed"]
    assert np.unravel_index(label.argmax(), label.shape) == (12, 20)
    ky, kx = np.indices((32, 32)) - 16
    outside = np.hypot(ky, kx) * spec.q_sampling_yx_per_A[0] * spec.wavelength_A * 1e3 > 29
    dark_field = (cbed * outside).sum((-2, -1))
    assert np.unravel_index(dark_field.argmax(), dark_field.shape) == (3, 5)
    # abTEM lays an atom between grid points by bilinear weights, by which its centre moves by up to 0.004 Å.
    on_axis = np.hypot(*centre_of_mass(cbed[3, 5]))
    assert on_axis < 0.05 * np.hypot(*centre_of_mass(cbed[3, 4]))
    # The neighbour at -x of the scan is deflected along the scan's own x axis, turned by the rotation.
    com_y, com_x = centre_of_mass(cbed[3, 4])
    angle = np.degrees(np.arctan2(com_y, com_x))
    assert abs((angle - rotation + 180) % 360 - 180) < 3


def test_a_rectangular_scan_and_detector_keep_their_axes(simulator: Simulator) -> None:
    spec = sample(
        single_atom(),
        scan={"shape": [2, 3], "step_A": 0.5},
        label={"shape": [4, 6], "blur_A": 0.3},
        detector={"shape": [24, 32], "max_angle_mrad": 40},
    )
    made = run(simulator, spec)
    assert made.arrays["cbed"].shape == (2, 3, 24, 32) and made.arrays["potential"].shape == (4, 6)
    assert made.params["Q_sampling_y_per_A"] == pytest.approx(made.params["Q_sampling_x_per_A"] * 32 / 24)


def test_positions_beyond_the_cell_are_its_periodic_images(simulator: Simulator) -> None:
    near, far = (
        run(simulator, sample(single_atom(), sampling={"scan_origin": [7.5 + 16 * k, 8.25 - 16 * k]})) for k in (0, 1)
    )
    assert np.abs(near.arrays["cbed"] - far.arrays["cbed"]).max() < 1e-6
    assert np.abs(near.arrays["potential"] - far.arrays["potential"]).max() < 1e-2


def test_an_unknown_simulator_is_named_with_those_that_exist() -> None:
    known = "auto, fast, smatrix, bloch, abtem, weak-phase"
    with pytest.raises(UsageError, match=f"'fdtd' does not exist; there are {known}"):
        get_simulator("fdtd")


def test_one_sample_in_this_process() -> None:
    spec = sample(single_atom())
    assert simulate_sample(spec).uid == spec.uid
