"""Noise, augmentation and the network's input: keyed, physical, and in the stated units."""

from __future__ import annotations

import numpy as np
import pytest
import train_data as fake

from exitwave.ingest.errors import UsageError
from exitwave.train.classical import reconstruct
from exitwave.train.keys import generator
from exitwave.train.preprocess import Preprocessing, augment, bin_detector, input_channels, network_input, noisy_counts
from exitwave.train.spec import DataSpec

KEY = {"seed": 3, "epoch": 2}


def _prepared(layout: str = "detector-as-channels") -> Preprocessing:
    return Preprocessing(
        layout=layout,
        scan_shape=(8, 8),
        detector_shape=(32, 32),
        label_shape=(32, 32),
        target_mean_VA=100.0,
        target_std_VA=20.0,
        com_std=0.1,
        icom_std_VA=10.0,
    )


def _uid_of(element: int) -> int:
    return next(uid for uid in range(1000) if int(generator("augment", 3, 2, uid).integers(8)) == element)


def test_noise_has_the_dose_and_belongs_to_the_key():
    cbed = fake.sample(0, 0)["cbed"]
    spec = DataSpec(dose_e_per_pattern=500)
    counts = noisy_counts(cbed, spec, uid=9, **KEY)
    assert counts.sum() / 64 == pytest.approx(500 * cbed.sum() / 64, rel=0.02)
    assert np.array_equal(counts, np.round(counts))
    assert np.array_equal(counts, noisy_counts(cbed, spec, uid=9, **KEY))
    assert not np.array_equal(counts, noisy_counts(cbed, spec, uid=10, **KEY))
    assert not np.array_equal(counts, noisy_counts(cbed, spec, uid=9, seed=3, epoch=1))
    assert np.array_equal(noisy_counts(cbed, DataSpec(dose_e_per_pattern=None), uid=9, **KEY), cbed)


@pytest.mark.parametrize("element", range(8))
def test_augmented_patterns_are_those_of_the_mirrored_specimen(element):
    """Simulate the mirrored specimen and compare: patterns everywhere, label where it is known."""
    middle, step, n = fake.EXTENT_A / 2, 0.6, 8
    rng = np.random.default_rng(5)
    positions, amplitudes = fake.columns(1, rng, 20.0)
    positions = positions + np.array([0.3, 0.0])  # nothing symmetric about it
    # turn about the middle of the probes (3.5 steps), which augmentation takes for its fixed point
    turned = positions - middle
    if element & 1:
        turned = turned * [-1, 1]
    if element & 2:
        turned = turned * [1, -1]
    if element & 4:
        turned = turned[:, ::-1]
    grid = np.arange(fake.GRID) * fake.SAMPLING_A
    origin = middle - 3.5 * step
    probes = np.stack(np.meshgrid(*[origin + np.arange(n) * step] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    at = origin + np.arange(32) * step / 4

    def simulate(where):
        cbed = fake.diffract(
            fake.potential(where, amplitudes, grid, grid), probes, energy_keV=100, semiangle_mrad=20
        ).reshape(n, n, 32, 32)
        return cbed.astype(np.float32), fake.potential(where, amplitudes, at, at)

    cbed, label = simulate(positions)
    expected_cbed, expected_label = simulate(turned + middle)
    params = fake.sample(0, 0)["params"]
    got, got_label, weight, _ = augment(cbed, label, params, DataSpec(), uid=_uid_of(element), **KEY)
    # the outermost frequency has no partner under q -> -q on an even grid, and the lattice is cut at the cell's border
    brightest = cbed.max()
    assert np.abs(got - expected_cbed)[:, :, 1:, 1:].max() < 0.01 * brightest
    assert element == 0 or np.abs(cbed - expected_cbed).max() > 0.02 * brightest
    assert np.abs((got_label - expected_label) * weight).max() < 1e-6 * label.max()
    assert weight.mean() == pytest.approx((29 / 32) ** ((element & 1) + (element >> 1 & 1)))


@pytest.mark.parametrize("element", range(8))
def test_augmentation_of_a_turned_scan_turns_it_the_other_way(element):
    sample = fake.sample(2, 0, rotation_deg=25.0)
    counts, label, weight, params = augment(
        sample["cbed"], sample["potential"], sample["params"], DataSpec(), uid=_uid_of(element), **KEY
    )
    image = reconstruct(counts, params, (32, 32), method="com")
    assert np.corrcoef(image[weight > 0], label[weight > 0])[0, 1] > 0.8
    assert float(sample["params"]["scan_rotation_deg"]) == 25.0


def test_no_augmentation_when_not_asked_for():
    sample = fake.sample(0, 0)
    got, label, weight, _ = augment(
        sample["cbed"], sample["potential"], sample["params"], DataSpec(augment="none"), uid=5, **KEY
    )
    assert got is sample["cbed"]
    assert label is sample["potential"]
    assert weight.all()


def test_binning_keeps_the_sum():
    counts = np.arange(2 * 2 * 4 * 4, dtype=np.float32).reshape(2, 2, 4, 4)
    binned = bin_detector(counts, (2, 2))
    assert binned[1, 0, 1, 0] == counts[1, 0, 2:, :2].sum()
    assert np.allclose(binned.sum(axis=(2, 3)), counts.sum(axis=(2, 3)))
    with pytest.raises(UsageError, match="detector_bin: 12 does not divide"):
        input_channels(DataSpec(detector_bin=12), "detector-as-channels", (8, 8), (32, 32))


@pytest.mark.parametrize("layout", ["detector-as-channels", "probes-as-channels"])
def test_input_does_not_know_the_beam_current(layout):
    sample, spec, prepared = fake.sample(0, 0), DataSpec(), _prepared(layout)
    a = network_input(sample["cbed"], sample["params"], spec, prepared)
    b = network_input(sample["cbed"] * 777, sample["params"], spec, prepared)
    assert np.allclose(a, b, rtol=1e-4, atol=1e-4)
    assert a.shape[0] == input_channels(spec, layout, (8, 8), (32, 32))
    assert a.shape[1:] == ((8, 8) if layout == "detector-as-channels" else (16, 16))
    patterns = a[:256] if layout == "detector-as-channels" else a[:64]
    assert float((patterns**2).mean()) == pytest.approx(1.0, rel=1e-4)


def test_what_the_experimenter_knows_is_told():
    sample, prepared = fake.sample(0, 0), _prepared()
    params = sample["params"].copy()
    before = network_input(sample["cbed"], params, DataSpec(physics=()), prepared)
    params["energy_keV"] += 50
    after = network_input(sample["cbed"], params, DataSpec(physics=()), prepared)
    changed = [c for c in range(len(before)) if not np.array_equal(before[c], after[c])]
    assert changed == [256]
    assert np.allclose(after[256] - before[256], 0.5)


def test_thickness_is_not_told():
    sample, prepared = fake.sample(0, 0), _prepared()
    params = sample["params"].copy()
    params["thickness_A"] *= 3
    params["defocus_A"] = 50
    assert np.array_equal(
        network_input(sample["cbed"], sample["params"], DataSpec(), prepared),
        network_input(sample["cbed"], params, DataSpec(), prepared),
    )


def test_standardising_comes_back_in_volt_angstrom_and_travels_as_json():
    prepared = _prepared()
    potential = np.array([[100.0, 140.0]])
    assert prepared.standardise(potential).tolist() == [[0.0, 2.0]]
    assert np.allclose(prepared.to_VA(prepared.standardise(potential)), potential)
    assert Preprocessing.from_json(prepared.to_json()) == prepared


def test_the_detector_s_options_reach_the_counts() -> None:
    """Each of them changes what is recorded, keyed as the dose is; a dose on an area needs the scan's step."""
    cbed = np.full((4, 4, 8, 8), 1 / 64, dtype=np.float32)
    cbed[1, 2, 3, 4] = 0.5
    params = np.zeros(1, dtype=[("R_sampling_y_A", "f8"), ("R_sampling_x_A", "f8")])
    params[:] = (0.5, 0.5)
    plain = noisy_counts(cbed, DataSpec(dose_e_per_pattern=500), uid=9, **KEY)
    for change in ({"mtf_nyquist": 0.5}, {"background": 0.2}, {"dead_fraction": 0.3}, {"source_fwhm_A": 1.0}):
        spec = DataSpec.model_validate({"dose_e_per_pattern": 500, "detector": change})
        found = noisy_counts(cbed, spec, uid=9, params=params[0], **KEY)
        assert not np.array_equal(found, plain)
        assert np.array_equal(found, noisy_counts(cbed, spec, uid=9, params=params[0], **KEY))
    area = DataSpec.model_validate({"dose_e_per_pattern": None, "detector": {"dose_e_per_A2": 2000}})
    assert np.array_equal(noisy_counts(cbed, area, uid=9, params=params[0], **KEY), plain)
    with pytest.raises(UsageError, match="need the sample's parameters"):
        noisy_counts(cbed, area, uid=9, **KEY)


def test_thickness_and_defocus_can_be_told_and_a_pattern_s_score_has_mean_zero_and_deviation_one():
    sample = fake.sample(0, 0)
    known = ("energy_keV", "semiangle_mrad", "R_sampling_A", "thickness_A", "defocus_A")
    spec = DataSpec(detector_bin=8, transform="zscore", conditions=known, physics=())
    assert input_channels(spec, "detector-as-channels", (8, 8), (32, 32)) == 64 + 5
    made = network_input(sample["cbed"], sample["params"], spec, _prepared())
    assert made.shape == (69, 8, 8)
    assert np.allclose(made[:64].mean(axis=0), 0, atol=1e-5) and np.allclose(made[:64].std(axis=0), 1, atol=1e-4)
    thicker = sample["params"].copy()
    thicker["thickness_A"] += 50
    assert np.allclose(network_input(sample["cbed"], thicker, spec, _prepared())[67] - made[67], 0.5, atol=1e-6)
    assert np.ptp(made[64:].reshape(5, -1), axis=1).max() == 0
