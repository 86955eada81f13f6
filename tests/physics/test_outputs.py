"""What a sample holds beside patterns and label, from both simulators: slabs, through-focal images, their registration,
the crystal's rotation, displacements by element, the label's mean over phonons, source and jitter."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_samples import four_atoms, plan, recipe, sample, single_atom

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.encoding import SQRT_F2_RELATIVE_ERROR
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.abtem_backend import AbtemSimulator
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.label import slab_weights
from exitwave.simulate.multislice import FastSimulator
from exitwave.simulate.plan import make_plan
from exitwave.simulate.scanning import probe_positions, reach_steps
from exitwave.simulate.simulator import Simulator
from exitwave.simulate.smatrix import SMatrixSimulator
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.tasks import SampleSpec, fields_of, reject_sample
from exitwave.simulate.weak_phase import WeakPhaseSimulator

SIMULATORS: dict[str, Simulator] = {
    "abtem": AbtemSimulator(),
    "fast": FastSimulator(),
    "smatrix": SMatrixSimulator(),
    "weak-phase": WeakPhaseSimulator(),
}
BOTH = pytest.mark.parametrize("name", ["abtem", "fast"])
ALL = pytest.mark.parametrize("name", list(SIMULATORS))


def made(name: str, spec: SampleSpec) -> dict[str, np.ndarray]:
    (found,) = SIMULATORS[name].simulate([spec])
    return found.arrays


# -- slabs -----------------------------------------------------------------------------------------------------------


def test_slabs_share_slices_out() -> None:
    weights = slab_weights(5, 3)
    assert weights.sum(axis=0) == pytest.approx(1.0) and weights.sum(axis=1) == pytest.approx(5 / 3)
    assert weights[0] == pytest.approx([1, 2 / 3, 0, 0, 0])


@BOTH
def test_slabs_add_up_and_hold_their_own_atoms(name: str) -> None:
    """The gold atom lies in the first slice of each period, gallium in the second: each in its own slab."""
    common: dict[str, Any] = {
        "grid": {"sampling_A": 0.15},
        "scan": {"shape": [8, 8], "step_A": 1.5},
        "label": {"shape": [16, 16]},
    }
    spec = sample(four_atoms(), sampling={"thickness_A": 8, "scan_origin": [0, 0]}, volume={"slabs": 4}, **common)
    arrays = made(name, spec)
    assert arrays["volume"].shape == (4, 16, 16)
    total = arrays["volume"].astype(np.float64).sum(axis=0)
    assert np.abs(total - arrays["potential"]).max() <= 1e-6 * arrays["potential"].max()
    gold, silicon, oxygen = ((round(y / 0.75), round(x / 0.75)) for y, x in ((2.4, 1.2), (4.2, 6.6), (10.8, 9.6)))
    means = [[float(slab[place]) for slab in arrays["volume"]] for place in (gold, silicon, oxygen)]
    assert means[0][0] > 20 * abs(means[0][1]) and means[0][0] == pytest.approx(means[0][2])
    assert means[2][1] > 5 * abs(means[2][0])
    thin = sample(four_atoms(), sampling={"thickness_A": 8, "scan_origin": [0, 0]}, volume={"slabs": 3}, **common)
    uneven = made(name, thin)["volume"].astype(np.float64).sum(axis=0)
    assert np.abs(uneven - arrays["potential"]).max() <= 1e-6 * arrays["potential"].max()
    assert thin.params(captured_fraction=1)["volume_slab_A"] == pytest.approx(8 / 3)
    finest = sample(four_atoms(), sampling={"thickness_A": 8}, volume={"slabs": 5}, **common)
    assert "there is nothing between slices" in str(reject_sample(finest))


# -- images ----------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(("scan", "crystal"), [(0.0, 0.0), (30.0, 0.0), (-20.0, 65.0)])
def test_images_and_label_are_registered(name: str, scan: float, crystal: float) -> None:
    """The image of a single atom, off the middle of the field, stands where the label has it, pixel for pixel."""
    angle = np.radians(scan - crystal)
    down, right = 4.2, 1.1  # Å from the first pixel to the atom
    y = 9.5 - down * np.cos(angle) - right * np.sin(angle)
    x = 7.0 + down * np.sin(angle) - right * np.cos(angle)
    spec = sample(
        single_atom(at_xy=(7.0, 9.5)),
        sampling={"scan_origin": [y, x], "scan_rotation_deg": scan, "crystal_rotation_deg": crystal},
        scan={"shape": [6, 4], "step_A": 1.0},
        label={"shape": [24, 16]},
        images={"focus_A": [-40, 40], "aperture_mrad": 25},
    )
    arrays = made(name, spec)
    assert arrays["images"].shape == (2, 24, 16) and arrays["focus_A"].tolist() == [-40, 40]
    contrast = np.abs(arrays["images"].astype(np.float64) - 1) ** 2
    label = np.maximum(arrays["potential"], 0).astype(np.float64)
    i, j = np.unravel_index(int(label.argmax()), label.shape)
    assert (i, j) == (17, 4)
    for image in contrast:
        i_image, j_image = np.unravel_index(int(image.argmax()), image.shape)
        assert abs(i_image - i) <= 1 and abs(j_image - j) <= 1


def test_all_routes_make_the_same_of_everything() -> None:
    spec = sample(
        four_atoms(y_A=15.0),
        sampling={
            "thickness_A": 12,
            "tilt_x_mrad": 4,
            "defocus_A": 30,
            "crystal_rotation_deg": 25,
            "source_fwhm_A": 1.0,
            "scan_jitter_A": 0.1,
        },
        grid={"sampling_A": 0.25},
        scan={"shape": [2, 2], "step_A": 0.5},
        phonons={"count": 2, "rms_A": {"Au": 0.1, "Si": 0.05, "O": 0.0, "Ga": 0.07}},
        label={"shape": [8, 8], "atoms": "phonon-mean"},
        images={"focus_A": [-10, 60], "shape": [4, 4], "aperture_mrad": 20, "focal_spread_A": 15},
        volume={"slabs": 2},
    )
    assert reject_sample(replace(spec, recipe=spec.recipe)) is not None  # the cell is small for the probe: no matter
    theirs = made("abtem", spec)
    for name, field in product(("fast", "smatrix"), fields_of(spec.recipe)):
        ours = made(name, spec)
        assert list(ours) == [field.name for field in fields_of(spec.recipe)]
        assert ours[field.name].shape == field.shape and ours[field.name].dtype == np.float32
        apart = np.abs(ours[field.name] - theirs[field.name]).max() / np.abs(theirs[field.name]).max()
        assert apart <= 5e-5, field.name


def test_a_series_goes_about_the_sample_s_defocus() -> None:
    spec = sample(single_atom(), sampling={"defocus_A": -30}, images={"focus_A": [0, 50]})
    assert spec.focus_A == (-30.0, 20.0)
    assert spec.recipe.array_fields == ("cbed", "potential", "images", "focus_A")
    row = spec.params(captured_fraction=1)
    assert (row["images_sampling_A"], row["images_aperture_mrad"]) == (0.125, 0.0)


def test_images_without_patterns() -> None:
    """A campaign of images alone propagates no probe; captured is what the plane wave has left."""
    spec = sample(single_atom(), fields=[], images={"focus_A": [0], "aperture_mrad": 20})
    (found,) = SIMULATORS["fast"].simulate([spec])
    assert list(found.arrays) == ["images", "focus_A"] and 0.9 < found.params["captured_fraction"] <= 1


# -- the crystal's rotation --------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("angle", [90.0, 37.0, -120.0])
def test_turning_a_single_atom_changes_nothing_but_its_cell(name: str, angle: float) -> None:
    """An atom has no orientation: with the probe at the same place of the microscope's axes, the same pattern."""
    optics = {"C12_A": 40.0, "phi12_deg": 20.0, "C21_A": 500.0, "phi21_deg": 70.0}
    if name != "weak-phase":  # which knows no tilt
        optics |= {"tilt_x_mrad": 5, "tilt_y_mrad": -2}
    atom, away = np.array([16.0, 16.0]), np.array([0.4, -0.7])  # (y, x)
    found = []
    for turn in (0.0, angle):
        c, s = np.cos(np.radians(turn)), np.sin(np.radians(turn))
        back = np.array([away[0] * c - away[1] * s, away[1] * c + away[0] * s])  # R(-turn) of (y, x)
        spec = sample(
            single_atom(at_xy=(16.0, 16.0), width_A=32.0, height_A=8.0),
            sampling={"scan_origin": list(atom + back), "crystal_rotation_deg": turn, "thickness_A": 8, **optics},
            grid={"sampling_A": 0.2},
            detector={"shape": [24, 24], "max_angle_mrad": 36},
        )
        found.append(made(name, spec)["cbed"][0, 0].astype(np.float64))
    straight, turned = found
    assert np.abs(straight - turned).max() < 0.05 * straight.max()
    q = np.arange(24) - 12
    centres = [np.array([(p.sum(1) * q).sum(), (p.sum(0) * q).sum()]) / p.sum() for p in found]
    assert np.abs(centres[0]).max() > 0.05
    assert np.abs(centres[0] - centres[1]).max() < 0.02 * np.abs(centres[0]).max() + 0.01


def test_turning_the_crystal_by_90_degrees_turns_the_pattern() -> None:
    """Without aberrations: the pattern of a crystal without symmetry, turned x towards y about [Q//2, Q//2]."""
    found = []
    for turn in (0.0, 90.0):
        spec = sample(
            four_atoms(),
            sampling={"scan_origin": [2.0, 1.9], "crystal_rotation_deg": turn, "thickness_A": 24},
            grid={"sampling_A": 0.25},
        )
        found.append(made("fast", spec)["cbed"][0, 0, 1:, 1:])
    straight, turned = found
    assert np.abs(straight - turned).max() > 0.05 * straight.max()
    assert np.abs(np.rot90(straight, -1) - turned).max() < 1e-3 * straight.max()


# -- phonons -----------------------------------------------------------------------------------------------------------


def test_displacements_by_element() -> None:
    common: dict[str, Any] = {"grid": {"sampling_A": 0.2}, "sampling": {"thickness_A": 8}}
    each = {symbol: 0.1 for symbol in ("Au", "Si", "O", "Ga")}
    one = sample(four_atoms(), phonons={"count": 1, "rms_A": 0.1}, **common)
    same = sample(four_atoms(), phonons={"count": 1, "rms_A": each}, **common)
    still = sample(four_atoms(), phonons={"count": 1, "rms_A": {**each, "Au": 0.0}}, **common)
    patterns = [made("fast", spec)["cbed"] for spec in (one, same, still)]
    assert patterns[0].tobytes() == patterns[1].tobytes()
    assert np.abs(patterns[0] - patterns[2]).max() > 1e-3 * patterns[0].max()
    row = still.params(captured_fraction=1)
    assert row["phonon_elements"].tolist() == [8, 14, 31, 79, 0, 0, 0, 0]
    assert row["phonon_element_rms_A"].tolist() == [0.1, 0.1, 0.1, 0, 0, 0, 0, 0]
    assert row["phonon_rms_A"] == pytest.approx(0.1 * np.sqrt(3 / 4))
    lacking = sample(four_atoms(), phonons={"count": 1, "rms_A": {"Au": 0.1, "Si": 0.1}}, cell={"min_extent_A": 9})
    assert "no displacement for O, Ga" in str(reject_sample(replace(lacking, structure=wide(lacking))))
    with pytest.raises(ValueError, match="'Xx' is no chemical element"):
        recipe(phonons={"count": 1, "rms_A": {"Xx": 0.1}})


def wide(spec: SampleSpec) -> Any:
    return replace(spec.structure, repeat_xy=(4, 4))


def test_the_mean_over_phonons_is_a_blurred_label() -> None:
    """Displacements of 0.25 Å act on the mean potential as a Gaussian of that width (Debye and Waller)."""
    common: dict[str, Any] = {
        "grid": {"sampling_A": 0.25},
        "sampling": {"thickness_A": 40, "scan_origin": [0, 0]},
        "scan": {"shape": [4, 4], "step_A": 3.0},
        "fields": ["potential"],
        "images": {"focus_A": [0], "aperture_mrad": 20},
    }
    phonons = {"count": 16, "rms_A": 0.25}
    atoms = four_atoms()
    mean, static, blurred = (
        made("fast", sample(atoms, phonons=p, label={"shape": [48, 48], **label}, **common))["potential"]
        for p, label in (
            (phonons, {"blur_A": 0.3, "atoms": "phonon-mean"}),
            (phonons, {"blur_A": 0.3}),
            ({"count": 0}, {"blur_A": np.hypot(0.3, 0.25)}),
        )
    )
    assert (mean - blurred).std() < 0.3 * (static - blurred).std()
    with pytest.raises(ValueError, match="phonon-mean needs phonons"):
        recipe(label={"shape": [4, 4], "atoms": "phonon-mean"})
    (field,) = fields_of(recipe(label={"shape": [4, 4], "atoms": "phonon-mean"}, phonons=phonons, fields=["potential"]))
    assert "mean over the frozen phonons" in field.meaning


# -- source and jitter -------------------------------------------------------------------------------------------------


def scanned(**sampling: Any) -> SampleSpec:
    return sample(
        single_atom(),
        sampling={"scan_origin": [7.4, 7.1], "scan_rotation_deg": 15, **sampling},
        scan={"shape": [2, 3], "step_A": 0.4},
        label={"shape": [2, 3]},
        detector={"shape": [16, 16], "max_angle_mrad": 45},
    )


@ALL
def test_a_source_is_the_integral_over_positions(name: str) -> None:
    """Against a direct sum over 21 x 21 places of the probe within 3.2 deviations."""
    spec = scanned(source_fwhm_A=0.8)
    assert reject_sample(spec) is None and reach_steps(spec) == 3
    sharp, blurred = made(name, scanned())["cbed"], made(name, spec)["cbed"]
    sigma = 0.8 / 2.3548200450309493
    steps = np.linspace(-3.2, 3.2, 21)
    weights = np.exp(-(steps**2) / 2)
    simulator = SIMULATORS["weak-phase" if name == "weak-phase" else "fast"]
    dense = []
    for y in steps:
        for x in steps:
            moved = replace(scanned(), scan_origin_yx_A=(7.4 + sigma * y, 7.1 + sigma * x))
            dense.append(replace(moved, recipe=moved.recipe.model_copy(update={"fields": ("cbed",)})))
    if name == "abtem":  # the same patterns within rounding, sooner
        simulator = SIMULATORS["fast"]
    patterns = np.stack([found.arrays["cbed"] for found in simulator.simulate(dense)]).astype(np.float64)
    outer = np.outer(weights, weights).ravel()
    expected = np.tensordot(outer / outer.sum(), patterns, 1)
    assert np.abs(blurred - expected).max() < 0.01 * np.abs(sharp - expected).max()


def test_a_source_too_small_for_the_scan_is_refused() -> None:
    assert "scan.step_A of 0.25 would do" in str(reject_sample(scanned(source_fwhm_A=0.5)))
    assert reject_sample(scanned(source_fwhm_A=0.0)) is None


def test_jitter_moves_each_position_by_its_own_step() -> None:
    still, moved, again = scanned(), scanned(scan_jitter_A=0.05), scanned(scan_jitter_A=0.05)
    steps = probe_positions(moved) - probe_positions(still)
    assert np.array_equal(probe_positions(moved), probe_positions(again)) and moved.scan_jitter_seed > 0
    assert (np.abs(steps) > 0).all() and np.abs(steps).max() < 0.2
    assert not np.array_equal(steps, probe_positions(replace(moved, scan_jitter_seed=5)) - probe_positions(still))
    many = sample(single_atom(), sampling={"scan_jitter_A": 0.05}, scan={"shape": [40, 40], "step_A": 0.1})
    spread = probe_positions(many) - probe_positions(replace(many, values={**many.values, "scan_jitter_A": 0.0}))
    assert spread.std(axis=0) == pytest.approx([0.05, 0.05], rel=0.06)
    row = moved.params(captured_fraction=1)
    assert (row["scan_jitter_A"], row["scan_jitter_seed"]) == (0.05, moved.scan_jitter_seed)
    assert still.params(captured_fraction=1)["scan_jitter_seed"] == 0


# -- campaigns ---------------------------------------------------------------------------------------------------------


def test_uids_of_version_1_stay() -> None:
    """The data set that version 1 wrote, planned again today: the same samples under the same names."""
    old = Path(__file__).resolve().parents[1] / "data" / "dataset-version-1"
    campaign = CampaignSpec.model_validate(json.loads((old / "campaign.yaml").read_text()))
    planned = [spec.uid for task in make_plan(campaign, base_dir=old).tasks for spec in task.samples()]
    assert planned == open_dataset(old).uids.tolist()


def test_a_campaign_with_every_field(tmp_path: Path) -> None:
    made_plan = plan(
        structures=[{"library": ["Si"]}],
        split={},
        samples_per_structure=2,
        images={"focus_A": [-50, 0, 50], "aperture_mrad": 20, "focal_spread_A": 10},
        volume={"slabs": 2},
        encoding={"cbed": "sqrt-f2", "images": "sqrt-f2"},
        sampling={
            "energy_keV": 200,
            "semiangle_mrad": 18,
            "thickness_A": {"uniform": [8, 14]},
            "crystal_rotation_deg": {"uniform": [0, 360]},
        },
    )
    assert run_campaign(made_plan, tmp_path / "d", make_cluster("inline")).failed == 0
    assert verify_dataset(tmp_path / "d").ok
    data = open_dataset(tmp_path / "d")
    assert [f.name for f in data.fields] == ["cbed", "potential", "images", "focus_A", "volume"]
    first = data[0]
    (alone,) = SIMULATORS["fast"].simulate([made_plan.tasks[0].samples()[0]])
    assert np.abs(first["images"] / alone.arrays["images"] - 1).max() <= SQRT_F2_RELATIVE_ERROR
    assert np.array_equal(first["volume"], alone.arrays["volume"]) and first["focus_A"].tolist() == [-50, 0, 50]
    assert 0 < first["params"]["crystal_rotation_deg"] < 360
    with pytest.raises(ValueError, match=r"images\.shape"):
        recipe(images={"focus_A": [0], "shape": [4, 8]})
    with pytest.raises(ValueError, match="each focus once"):
        recipe(images={"focus_A": [0, 0]})
    with pytest.raises(ValueError, match="a sample would hold nothing"):
        recipe(fields=[])
    coarse = sample(single_atom(), scan={"shape": [1, 1], "step_A": 2.0}, images={"focus_A": [0]})
    assert "undersample a wave" in str(reject_sample(coarse))
