"""All that a recipe can ask for, at once, on every route: the reference's numbers, and no sample disturbs another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_samples import DATA, campaign, four_atoms, recipe

from exitwave.ingest import open_dataset
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.passes import passes, sample_bytes_of
from exitwave.simulate.plan import make_plan
from exitwave.simulate.simulator import get_simulator, simulate_sample
from exitwave.simulate.tasks import SampleSpec, draw_sample

EVERYTHING: dict[str, Any] = {
    "sampling": {
        "energy_keV": 120,
        "semiangle_mrad": 12,
        "thickness_A": {"uniform": [6, 24]},
        "defocus_A": {"uniform": [-40, 60]},
        "C30_A": {"loguniform": [1e3, 1e5]},
        "tilt_x_mrad": 5,
        "tilt_y_mrad": -3,
        "scan_rotation_deg": 25,
        "crystal_rotation_deg": -40,
        "source_fwhm_A": 1.9,
        "scan_jitter_A": 0.1,
        "scan_origin": "random",
    },
    "fan_out": {"thickness_A": 2, "defocus_A": 2},
    "scan": {"shape": [3, 2], "step_A": 0.9},
    "label": {"shape": [12, 8], "blur_A": 0.3},
    "images": {"focus_A": [-30, 0, 40], "aperture_mrad": 20, "focal_spread_A": 10},
    "volume": {"slabs": 2},
    "grid": {"sampling_A": 0.25, "commensurate": True},
    "detector": {"shape": [14, 18], "max_angle_mrad": 30},
}
PHONONS: dict[str, Any] = {
    "phonons": {"count": 2, "rms_A": {"Au": 0.05, "Si": 0.08, "O": 0.1, "Ga": 0.07}},
    "label": EVERYTHING["label"] | {"atoms": "phonon-mean"},
}
COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("fast", PHONONS),
    "smatrix": ("smatrix", PHONONS),
    "bloch": ("bloch", {}),
    "auto": ("auto", {}),
    "auto, finite projections": ("auto", {"grid": EVERYTHING["grid"] | {"projection": "finite"}}),
    "fast, finite projections": ("fast", PHONONS | {"grid": {"sampling_A": 0.25, "projection": "finite"}}),
}


def samples(changes: dict[str, Any]) -> list[SampleSpec]:
    structure = replace(four_atoms(x_A=4.1, y_A=5.3), repeat_xy=(3, 2))
    return [draw_sample(structure, recipe(**EVERYTHING | changes), k, "train") for k in range(4)]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long if "finite" in case else ()) for case in COMBINATIONS],
)
def test_every_field_is_the_reference_s_and_no_neighbour_matters(case: str) -> None:
    name, changes = COMBINATIONS[case]
    specs = samples(changes)
    simulator = get_simulator(name)
    together = list(simulator.simulate(specs))
    theirs = list(get_simulator("abtem").simulate(specs))
    for ours, other in zip(together, theirs, strict=True):
        assert set(ours.arrays) == {"cbed", "potential", "images", "focus_A", "volume"}
        for field, array in other.arrays.items():
            assert np.abs(array - ours.arrays[field]).max() <= 5e-5 * np.abs(array).max(), field
        volume, label = (ours.arrays[field] for field in ("volume", "potential"))
        assert np.abs(volume.sum(axis=0) - label).max() <= 1e-5 * np.abs(label).max()
    (alone,) = simulator.simulate(specs[-1:])
    assert all(array.tobytes() == together[-1].arrays[field].tobytes() for field, array in alone.arrays.items())
    assert alone.params.tobytes() == together[-1].params.tobytes()


def test_a_pass_counts_everything_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and slabs weigh as patterns do: a pass of more than its bytes is cut, and no bit moves."""
    specs = samples({})
    monkeypatch.setattr("exitwave.simulate.passes.PASS_BYTES", 2 * sample_bytes_of(specs[0]))
    assert [len(one) for one in passes(specs)] == [2, 2]
    monkeypatch.undo()
    assert [len(one) for one in passes(specs)] == [4]
    large = samples({"volume": {"slabs": 2}, "label": {"shape": [1200, 800]}})
    assert sample_bytes_of(large[0]) > 8 * 3 * 1200 * 800


def test_a_campaign_of_everything_is_what_its_samples_are(tmp_path: Path) -> None:
    """Through plan, worker, shards and codecs: half precision to 2^-10 of a value, all else to the bit."""
    changes = {key: value for key, value in EVERYTHING.items() if key != "grid"}
    spec = campaign(
        **changes,
        structures=[{"library": ["Si"]}],
        split={},
        samples_per_structure=8,
        samples_per_shard=4,
        grid={"sampling_A": 0.25, "commensurate": True},
        encoding={"cbed": "sqrt-f2", "images": "sqrt-f2"},
    )
    plan = make_plan(spec, base_dir=DATA)
    run_campaign(plan, tmp_path / "data", make_cluster("inline", workers=1))
    dataset = open_dataset(tmp_path / "data")
    made = {int(dataset.uids[k]): dataset[k] for k in range(len(dataset))}
    assert len(made) == plan.n_samples
    for sample in list(plan.samples())[::3]:
        told, read = simulate_sample(sample), made[sample.uid]
        for field, array in told.arrays.items():
            if field in ("cbed", "images"):
                assert (np.abs(read[field] - array) <= 2.0**-10 * np.abs(array) + 1e-9).all(), field
            else:
                assert read[field].tobytes() == array.tobytes(), field
