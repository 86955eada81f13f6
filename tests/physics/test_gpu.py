"""On a GPU the same numbers as on a CPU. Skipped, and said so, where CuPy or a GPU is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from sim_samples import four_atoms, recipe

from exitwave.ingest.errors import UsageError
from exitwave.simulate.abtem_backend import AbtemSimulator
from exitwave.simulate.tasks import SampleSpec, draw_sample

TOLERANCE: dict[Any, float] = {"float32": 5e-5, "float64": 1e-12}


def why_not() -> str | None:
    try:
        AbtemSimulator(device="gpu")
    except UsageError as error:
        return str(error)
    return None


WHY_NOT = why_not()
on_gpu = pytest.mark.skipif(WHY_NOT is not None, reason=f"not run on a GPU here: {WHY_NOT}")

SPECIFICATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tilted, aberrated": {"sampling": {"tilt_x_mrad": 6, "C30_A": 1e5, "C12_A": 30, "defocus_A": 80}},
    "finite projections": {"grid": {"sampling_A": 0.25, "projection": "finite"}},
    "phonons": {"phonons": {"count": 2, "rms_A": 0.1}},
    "not square": {"cell": (9.0, 14.0)},
}


def specification(changes: dict[str, Any]) -> SampleSpec:
    rest = dict(changes)
    y, x = rest.pop("cell", (12.0, 12.0))
    common: dict[str, Any] = {"grid": {"sampling_A": 0.25}, "scan": {"shape": [2, 2], "step_A": 0.9}}
    sampling = {"thickness_A": 40, "semiangle_mrad": 20} | rest.pop("sampling", {})
    return draw_sample(four_atoms(x_A=x, y_A=y), recipe(sampling=sampling, **(common | rest)), 0, "train")


@on_gpu
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_a_gpu_gives_what_a_cpu_gives(name: str, precision: Any) -> None:
    spec = specification(SPECIFICATIONS[name])
    (host,), (device,) = (
        list(AbtemSimulator(precision=precision, device=where).simulate([spec])) for where in ("cpu", "gpu")
    )
    largest = host.arrays["cbed"].max()
    # Samples are stored in float32, whatever they were computed in.
    within = max(TOLERANCE[precision], float(np.finfo(np.float32).eps))
    assert np.abs(host.arrays["cbed"] - device.arrays["cbed"]).max() <= within * largest
    assert np.abs(host.arrays["potential"] - device.arrays["potential"]).max() <= (
        within * np.abs(host.arrays["potential"]).max()
    )


@on_gpu
def test_whole_grids_agree_in_float64() -> None:
    spec = specification({})
    found = []
    for where in ("cpu", "gpu"):
        simulator = AbtemSimulator(precision="float64", device=where)  # type: ignore[arg-type]
        with simulator.configured():
            found.append(simulator.exit_intensity(spec, simulator.static_slices(spec), simulator.positions(spec)))
    assert np.abs(found[0] - found[1]).max() <= 1e-12 * found[0].max()


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_a_machine_without_cupy_is_told_what_is_missing() -> None:
    with pytest.raises(UsageError, match="CuPy is not installed"):
        AbtemSimulator(device="gpu")
