"""Scores: values worked out by hand, and SSIM against its definition evaluated naively."""

from __future__ import annotations

import numpy as np
import pytest

from exitwave.train.columns import column_errors_A, find_columns
from exitwave.train.metrics import fit_scale, score, ssim

RNG = np.random.default_rng(3)


def test_scores_of_a_known_error():
    truth = np.array([[[0.0, 40.0], [80.0, 120.0]]])
    # a constant offset is not seen; what remains is an error of ±10 V·Å, ±1 V over 10 Å
    prediction = truth + 7.0 + np.array([[[10.0, -10.0], [10.0, -10.0]]])
    got = score(prediction, truth, np.array([10.0]))
    assert got.rmse_VA == pytest.approx(10.0)
    assert got.rmse_V == pytest.approx(1.0)
    assert got.psnr == pytest.approx(20 * np.log10(12.0 / 1.0))
    assert got.r2 == pytest.approx(1 - 4 / (36 + 4 + 4 + 36))


def test_a_perfect_prediction_and_one_off_by_scale_and_offset():
    truth = RNG.normal(size=(3, 16, 16)) * 50
    thickness = np.array([10.0, 20.0, 30.0])
    perfect = score(truth + 5.0, truth, thickness)
    assert (perfect.rmse_V, perfect.r2, perfect.ssim) == pytest.approx((0.0, 1.0, 1.0), abs=1e-9)
    scaled = score(0.5 * truth - 3.0, truth, thickness)
    assert scaled.rmse_V_fitted == pytest.approx(0.0, abs=1e-9)
    assert scaled.rmse_VA == pytest.approx(0.5 * np.sqrt(np.mean((truth - truth.mean((1, 2), keepdims=True)) ** 2)))


def test_fitted_scale_is_the_least_squares_one_and_never_negative():
    truth = RNG.normal(size=(2, 8, 8))
    assert fit_scale(truth / 4 + 1, truth) == pytest.approx(4.0)
    assert fit_scale(-truth, truth) == 0.0
    turned = score(-truth, truth, np.ones(2))
    assert turned.rmse_V_fitted == pytest.approx(np.sqrt(np.mean((truth - truth.mean((1, 2), keepdims=True)) ** 2)))


def test_ssim_agrees_with_its_definition():
    a, b = RNG.normal(size=(2, 24, 24))
    offset = np.arange(-5, 6)
    line = np.exp(-(offset**2) / (2 * 1.5**2))
    window = np.outer(line, line) / line.sum() ** 2
    pad_a, pad_b = (np.pad(image, 5, mode="symmetric") for image in (a, b))
    span = b.max() - b.min()
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    total = 0.0
    for i in range(24):
        for j in range(24):
            x, y = pad_a[i : i + 11, j : j + 11], pad_b[i : i + 11, j : j + 11]
            mx, my = (window * x).sum(), (window * y).sum()
            vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
            cov = (window * (x - mx) * (y - my)).sum()
            total += (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    assert ssim(a, b) == pytest.approx(total / 24**2, rel=1e-9)
    assert ssim(b, b) == pytest.approx(1.0)


def test_columns_are_found_between_pixels_and_those_that_are_missing_are_counted():
    def picture(places):
        y, x = np.mgrid[:24, :24]
        return sum(np.exp(-((y - a) ** 2 + (x - b) ** 2) / (2 * 1.1**2)) for a, b in places)

    places = np.array([[5.3, 6.2], [5.0, 16.45], [15.7, 11.0]])
    found = find_columns(picture(places))
    assert np.abs(found - places).max() < 0.06
    moved, number = column_errors_A(picture(places[:2] + np.array([0.5, 0.0])), picture(places), 0.3)
    assert number == 3 and moved == pytest.approx([0.15, 0.15], abs=0.03)
    assert column_errors_A(np.zeros((24, 24)), picture(places), 0.3)[0].size == 0
    truth = picture(places)[None] * 100
    got = score(truth, truth, np.array([10.0]), sampling_A=np.array([0.3]))
    assert (got.column_pm, got.columns_found) == (0.0, 1.0)
    assert score(truth * 0, truth, np.array([10.0]), sampling_A=np.array([0.3])).columns_found == 0
    assert score(truth, truth, np.array([10.0])).columns_found is None


def test_samples_of_different_sizes_are_pooled_by_pixels():
    small, large = RNG.normal(size=(2, 2)) * 10, RNG.normal(size=(8, 8)) * 10
    off = [small + np.array([[4.0, -4.0], [4.0, -4.0]]), large]
    assert score(off, [small, large], np.array([2.0, 1.0])).rmse_V == pytest.approx(np.sqrt(4 * 4 / 68))
