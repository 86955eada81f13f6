"""What prediction is made of: estimates from the patterns, grids, windows and seams."""

from __future__ import annotations

import numpy as np
import pytest
import train_data as fake

from exitwave.train.calibrate import find_disc, find_turn
from exitwave.train.classical import centre_of_mass, wavelength_A
from exitwave.train.preprocess import augment, mirrored, unmirrored
from exitwave.train.resample import DetectorMap, scan_positions, scan_rows
from exitwave.train.spec import DataSpec
from exitwave.train.tiling import starts, stitch, window_weight

Q = 1 / fake.EXTENT_A


def test_the_disc_gives_the_semi_angle_and_the_zero_frequency():
    sample = fake.sample(1, 2)
    disc = find_disc(sample["cbed"].mean(axis=(0, 1)))
    angle = disc.radius * Q * wavelength_A(float(sample["params"]["energy_keV"])) * 1e3
    assert angle == pytest.approx(20.0, rel=0.04)
    assert disc.center == pytest.approx((16, 16), abs=0.3)
    assert find_disc(np.zeros((8, 8))) is None


@pytest.mark.parametrize("rotation", [0.0, 25.0, -110.0, 170.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_curl_gives_the_scan_s_turn_and_a_transposed_detector(rotation, transposed):
    sample = fake.sample(2, 0, scan=16, label=16, step_A=0.4, rotation_deg=rotation)
    com = centre_of_mass(sample["cbed"], (Q, Q))
    turn = find_turn(com[::-1] if transposed else com)
    assert turn.transposed == transposed
    assert (turn.rotation_deg - rotation + 180) % 360 - 180 == pytest.approx(0, abs=3)
    assert turn.curl < 0.2


def test_a_detector_on_its_own_grid_is_left_as_it_is_and_coarser_ones_keep_every_count():
    cbed = fake.sample(0, 0)["cbed"]
    same = DetectorMap(source=(32, 32), source_q=(Q, Q), center=(16, 16), target=(32, 32), target_q=(Q, Q))
    assert np.allclose(same.apply(same.matrix(), cbed), cbed, rtol=1e-6, atol=1e-9)
    half = DetectorMap(source=(32, 32), source_q=(Q, Q), center=(16, 16), target=(20, 20), target_q=(2 * Q, 2 * Q))
    coarse = half.apply(half.matrix(), cbed)
    assert coarse.sum() == pytest.approx(cbed.sum(), rel=1e-5)
    assert np.allclose(centre_of_mass(coarse, (2 * Q, 2 * Q)), centre_of_mass(cbed, (Q, Q)), atol=1e-4)


def test_a_turned_detector_is_turned_back():
    """Patterns whose detector stands at -40 degrees to the scan have the centre of mass along the scan's axes after."""
    turned, straight = (fake.sample(3, 1, scan=6, label=6, rotation_deg=angle) for angle in (40.0, 40.0))
    params = straight["params"]
    grid = DetectorMap(
        source=(32, 32), source_q=(Q, Q), center=(16, 16), target=(32, 32), target_q=(Q, Q),
        rotation_deg=float(params["scan_rotation_deg"]),
    )  # fmt: skip
    from exitwave.train.classical import along_scan_axes

    made = centre_of_mass(grid.apply(grid.matrix(), turned["cbed"]), (Q, Q))
    assert np.allclose(made, along_scan_axes(centre_of_mass(turned["cbed"], (Q, Q)), params), atol=2e-3)


@pytest.mark.parametrize("element", range(8))
def test_a_view_is_turned_back_onto_the_image(element):
    sample = fake.sample(1, 1)
    uid = next(u for u in range(500) if _element(u) == element)
    counts, label, weight, params = augment(
        sample["cbed"], sample["potential"], sample["params"], DataSpec(), seed=3, epoch=2, uid=uid
    )
    again, there = mirrored(sample["cbed"], sample["params"], element)
    assert np.array_equal(again, counts) and params == there
    back = unmirrored(np.where(weight > 0, label, np.nan), (8, 8), element)
    known = np.isfinite(back)
    assert known.mean() > 0.7 and np.allclose(back[known], sample["potential"][known])


def _element(uid: int) -> int:
    from exitwave.train.keys import generator

    return int(generator("augment", 3, 2, uid).integers(8))


def test_a_finer_scan_is_brought_to_the_wanted_step():
    positions = scan_positions(21, 0.3, 0.5)
    assert positions[0] == 0 and positions[-1] <= 20 and np.allclose(np.diff(positions), 0.5 / 0.3)
    ramp = np.arange(21.0)[:, None] + 100 * np.arange(21.0)[None]
    assert np.allclose(scan_rows(ramp, (positions, positions)), positions[:, None] + 100 * positions[None], atol=1e-3)


@pytest.mark.parametrize(
    ("length", "window", "margin", "grain"), [(8, 8, 2, 1), (31, 8, 3, 1), (24, 8, 1, 4), (9, 8, 7, 1)]
)
def test_windows_cover_the_scan(length, window, margin, grain):
    found = starts(length, window, margin=margin, grain=grain)
    seen = np.zeros(length, dtype=bool)
    for at in found:
        assert at % grain == 0 and at + window <= length
        seen[at : at + window] = True
    assert seen[: length - (length - window) % grain].all()
    assert max(np.diff(found), default=0) <= max(grain, window // 3)


def test_windows_that_differ_by_constants_become_one_image_without_seams():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(30, 40)).cumsum(axis=0).cumsum(axis=1)
    corners = [(y, x) for y in starts(30, 12, margin=3) for x in starts(40, 12, margin=3)]
    shifts = rng.normal(size=len(corners)) * 50
    tiles = np.stack([truth[y : y + 12, x : x + 12] + s for (y, x), s in zip(corners, shifts, strict=True)])
    tiles[0, 0, 0] = np.nan  # known from no other window
    made = stitch(tiles, np.zeros_like(tiles), corners, (30, 40), margin=3)
    assert np.isnan(made.image[0, 0]) and np.isnan(made.image).sum() == 1
    difference = (made.image - truth).ravel()[1:]
    assert np.ptp(difference) < 1.0 < np.ptp(shifts)
    assert np.nanmax(made.spread) < 1.0
    weight = window_weight((12, 12), 3)
    assert weight[0, 0] < 0.01 and weight[6, 6] > 0.95


def test_one_window_is_its_own_image_with_the_views_deviation():
    image = np.random.default_rng(1).normal(size=(1, 6, 6))
    made = stitch(image, np.full((1, 6, 6), 0.5), [(0, 0)], (6, 6), margin=2)
    assert np.allclose(made.image, image[0]) and np.allclose(made.spread, 0.5)
