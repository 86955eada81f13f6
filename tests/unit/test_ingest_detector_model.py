"""The detector model: sums, units, identity at zero strength, repeatable draws, transfer, shifts, dose statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exitwave.ingest.detector_model import (
    DetectorModel,
    descan_shifts,
    detect,
    distort,
    mix_positions,
    shift_patterns,
    transfer,
)
from exitwave.ingest.errors import UsageError
from exitwave.ingest.schema import PARAMS_DTYPE

EVERYTHING = DetectorModel(
    dose_e_per_A2=1e5,
    source_fwhm_A=0.8,
    scan_jitter_A=0.1,
    mtf_nyquist=0.5,
    background=0.01,
    ellipticity=0.02,
    descan_pixels=0.5,
    dead_fraction=0.02,
)


def draws(seed: int = 0, epoch: int = 0, uid: int = 1) -> Callable[[str], np.random.Generator]:
    return lambda purpose: np.random.default_rng([*purpose.encode(), seed, epoch, uid])


def params(step: float = 0.4) -> np.void:
    row = np.zeros(1, PARAMS_DTYPE)
    row["R_sampling_y_A"] = row["R_sampling_x_A"] = step
    record: np.void = row[0]
    return record


def discs(shape: tuple[int, int] = (5, 4), pixels: int = 24) -> np.ndarray[Any, Any]:
    """A bright disc for each position, its brightness falling over the scan; each pattern sums to at most 1."""
    y, x = np.meshgrid(*(np.arange(pixels) - pixels // 2,) * 2, indexing="ij")
    disc = (np.hypot(y, x) < 5).astype(np.float64)
    scale = np.linspace(0.9, 0.5, shape[0] * shape[1]).reshape(*shape, 1, 1)
    return (scale * disc / disc.sum()).astype(np.float32)


def centre(pattern: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    places = np.indices(pattern.shape)
    return np.array([(pattern * place).sum() for place in places]) / pattern.sum()


def test_no_strength_changes_no_bit() -> None:
    cbed = discs()
    assert detect(cbed, params(), DetectorModel(), draws()).tobytes() == cbed.tobytes()
    zero = np.zeros((5, 4, 2))
    assert np.array_equal(shift_patterns(cbed, zero), cbed)
    assert np.array_equal(transfer(cbed, 1.0), cbed) and np.allclose(distort(cbed, 0.0, 1.0), cbed, rtol=1e-12)


def test_the_key_decides() -> None:
    cbed = discs()
    one = detect(cbed, params(), EVERYTHING, draws())
    assert one.dtype == np.float32 and one.shape == cbed.shape
    assert detect(cbed, params(), EVERYTHING, draws()).tobytes() == one.tobytes()
    for other in ({"epoch": 1}, {"uid": 2}, {"seed": 3}):
        assert detect(cbed, params(), EVERYTHING, draws(**other)).tobytes() != one.tobytes()


def test_dose_is_poisson_in_electrons_of_the_beam() -> None:
    """Counts of mean and variance dose times fraction; e/Å² are the electrons on a step of the scan squared."""
    cbed = np.full((40, 40, 8, 8), 0.5 / 64, dtype=np.float32)
    per_pattern = detect(cbed, params(), DetectorModel(dose_e_per_pattern=1280), draws())
    per_area = detect(cbed, params(0.4), DetectorModel(dose_e_per_A2=8000), draws())
    assert np.array_equal(per_pattern, per_area) and np.array_equal(per_pattern, np.round(per_pattern))
    assert per_pattern.mean() == pytest.approx(10, rel=0.01) and per_pattern.var() == pytest.approx(10, rel=0.02)


def test_shifts_move_the_centre_and_keep_the_sum() -> None:
    cbed = discs()
    shifts = np.random.default_rng(1).uniform(-4, 4, (5, 4, 2))
    moved = shift_patterns(cbed, shifts)
    for i, j in np.ndindex(5, 4):
        assert moved[i, j].sum() == pytest.approx(cbed[i, j].sum(), rel=1e-6)
        assert centre(moved[i, j]) - centre(cbed[i, j]) == pytest.approx(shifts[i, j], abs=1e-5)
    assert shift_patterns(cbed, np.full((5, 4, 2), 30.0)).sum() == 0
    drawn = np.stack([descan_shifts((5, 4), 0.5, np.random.default_rng(k)) for k in range(400)])
    assert drawn[:, 2].mean(axis=1).std(axis=0) == pytest.approx([0.5, 0.5], rel=0.1)  # the constant
    assert (drawn[:, 4] - drawn[:, 0]).std() == pytest.approx(1.0, rel=0.1)  # from one end to the other
    assert np.allclose(np.diff(drawn, 2, axis=1), 0) and np.allclose(np.diff(drawn, 2, axis=2), 0)


def test_an_ellipse_has_its_axes() -> None:
    cbed = discs((1, 1), 48)
    made = distort(cbed, np.log(1.2), np.pi / 6)[0, 0]
    assert made.sum() == pytest.approx(float(cbed.sum()), rel=1e-6)
    y, x = np.indices(made.shape) - 24.0
    spread = np.array([[(made * a * b).sum() for b in (x, y)] for a in (x, y)]) / made.sum()
    values, vectors = np.linalg.eigh(spread)
    assert np.sqrt(values[1] / values[0]) == pytest.approx(1.2, rel=0.02)
    assert np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])) % 180 == pytest.approx(30, abs=3)


@pytest.mark.parametrize("mtf", [0.0, 0.3, 0.9])
def test_transfer_at_nyquist_and_counts_kept(mtf: float) -> None:
    stripes = np.zeros((1, 1, 16, 16))
    stripes[..., ::2] = 2.0
    assert np.ptp(transfer(stripes, mtf)[0, 0, :, 2:-2]) == pytest.approx(2.0 * mtf, abs=1e-12)
    cbed = np.random.default_rng(0).poisson(3.0, (2, 2, 12, 12)).astype(np.float32)
    spread = transfer(cbed, mtf)
    assert spread.sum() == pytest.approx(float(cbed.sum())) and spread.min() >= 0
    point = np.zeros((1, 1, 33, 33))
    point[0, 0, 16, 16] = 1.0
    found = np.abs(np.fft.fft2(transfer(point, mtf)[0, 0]))
    q = np.fft.fftfreq(33)
    k = (1 - mtf) / 4
    assert found[:, 0] == pytest.approx(1 - 2 * k + 2 * k * np.cos(2 * np.pi * q), abs=1e-12)


def test_a_source_averages_over_the_scan() -> None:
    """A scanned point becomes a Gaussian of the source's width; what is even over the scan stays."""
    scan = np.zeros((31, 31, 1, 1))
    scan[15, 15] = 1.0
    made = mix_positions(scan, (0.4, 0.4), 1.2, 0.0, draws()("jitter"))[..., 0, 0]
    y = (np.arange(31) - 15) * 0.4
    assert np.sqrt((made.sum(1) * y**2).sum() / made.sum()) == pytest.approx(1.2 / 2.3548, rel=1e-3)
    even = np.ones((6, 7, 2, 2))
    assert mix_positions(even, (0.4, 0.4), 1.2, 0.2, draws()("jitter")) == pytest.approx(even)
    moved = mix_positions(
        np.arange(31.0)[:, None, None, None] * np.ones((1, 31, 1, 1)), (0.4, 0.4), 1.2, 0.2, draws()("j")
    )
    inner = moved[5:-5, 5:-5, 0, 0] - np.arange(31.0)[5:-5, None]
    assert inner.std() * 0.4 == pytest.approx(0.2, rel=0.1)


def test_background_and_dead_pixels() -> None:
    cbed = discs()
    plus = detect(cbed, params(), DetectorModel(background=0.1), draws())
    assert (plus.sum((2, 3)) - cbed.sum((2, 3))) == pytest.approx(0.1, rel=1e-4)
    bright = np.ones((2, 3, 64, 64), np.float32)
    dead = detect(bright, params(), DetectorModel(dead_fraction=0.1), draws()) == 0
    assert dead[0, 0].mean() == pytest.approx(0.1, abs=0.02)
    assert (dead == dead[0, 0]).all()


def test_what_makes_no_sense_is_refused() -> None:
    for wrong, told in (
        ({"dose_e_per_pattern": 1.0, "dose_e_per_A2": 1.0}, "at most one"),
        ({"scan_jitter_A": 0.1}, "simulate with jitter"),
        ({"mtf_nyquist": 1.1}, "perfect detector"),
        ({"dead_fraction": 1.0}, "dead_fraction"),
        ({"background": -0.1}, "background: -0.1"),
    ):
        with pytest.raises(UsageError, match=told):
            DetectorModel(**wrong)
    with pytest.raises(UsageError, match=r"step of 0\.4 Å is more than half.*At least 0\.8 Å"):
        detect(discs(), params(0.4), DetectorModel(source_fwhm_A=0.7), draws())
