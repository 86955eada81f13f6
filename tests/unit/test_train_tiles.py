"""Tiles: which bytes a rank reads, who owns them, who sends them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.train.bench_spatial import counted_reads
from exitwave.train.series import noisy_images, resample_planes
from exitwave.train.tile_store import Packing, TileStore, plan_exchange
from exitwave.train.tiled_data import TileReader, field_slices, tile_bounds
from tests.support.series_data import make_series


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_series(tmp_path_factory.mktemp("series"), train=6, val=0, foci=4, slabs=4, side=128)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_only_its_tile(data: Path, size: int):
    dataset = ShardDataset(data, fields=("images", "volume"), split="train")
    whole = dataset[3]
    for rank in range(size):
        reader = TileReader(dataset, crop=None, spatial_rank=rank, spatial_size=size, halvings=3)
        reader[0]  # opens the shard: its tables of uids and checksums
        with counted_reads() as counts:
            tile = reader[3]
        bounds = tile_bounds(128, size, halvings=3)
        assert np.array_equal(tile["images"], whole["images"][:, bounds[rank] : bounds[rank + 1]])
        assert np.array_equal(tile["volume"], whole["volume"][:, bounds[rank] : bounds[rank + 1]])
        assert tile["uid"] == whole["uid"]
        assert sum(counts) / (tile["images"].nbytes + tile["volume"].nbytes) <= 1.05


def test_a_crop_reads_only_the_middle(data: Path):
    dataset = ShardDataset(data, fields=("images",), split="train")
    reader = TileReader(dataset, crop=64, spatial_rank=1, spatial_size=2, halvings=0)
    reader[0]
    with counted_reads() as counts:
        tile = reader[1]
    assert np.array_equal(tile["images"], dataset[1]["images"][:, 64:96, 32:96])
    assert tile["tile"] == (64, 32)
    assert sum(counts) / tile["images"].nbytes <= 1.05


@pytest.mark.parametrize(
    ("rows", "parts", "halvings", "bounds"),
    [
        (16, 2, 3, (0, 8, 16)),
        (24, 2, 3, (0, 8, 24)),
        (16, 4, 3, (0, 4, 8, 12, 16)),
        (7, 3, 2, (0, 2, 4, 7)),
        (5, 5, 3, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_tiles_are_even_and_aligned_where_they_can_be(rows: int, parts: int, halvings: int, bounds: tuple[int, ...]):
    assert tile_bounds(rows, parts, halvings=halvings) == bounds


def test_too_many_tiles_and_too_large_crops_are_refused():
    with pytest.raises(UsageError, match="3 rows of a sample cannot be split over 4"):
        tile_bounds(3, 4, halvings=2)
    with pytest.raises(UsageError, match="at most the 8 x 9"):
        field_slices((2, 8, 9), crop=9, spatial_rank=0, spatial_size=1, halvings=0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_request_is_met_by_its_owner_once(size: int):
    rng = np.random.default_rng(size)
    requests = [rng.integers(0, 40, size=rng.integers(0, 6)).tolist() for _ in range(size)]
    plans = [plan_exchange(requests, rank) for rank in range(size)]
    for rank, wanted in enumerate(requests):
        got = [i for some in plans[rank].receives.values() for i in some]
        assert sorted(got + [i for i in wanted if i % size == rank]) == sorted(wanted)
        for owner, some in plans[rank].receives.items():
            assert plans[owner].sends[rank] == some


def test_packing_gives_back_what_went_in():
    sample = {
        "images": np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32),
        "uid": np.uint64(2**63 + 5),
        "params": np.array([(1.5, 3)], dtype=[("a", "<f8"), ("b", "u1")])[0],
        "tile": (3, 4),
        "copies": 2,
    }
    packing = Packing(sample)
    back = packing.unpack(packing.pack(sample))
    assert np.array_equal(back["images"], sample["images"])
    assert (int(back["uid"]), float(back["params"]["a"]), tuple(back["tile"]), int(back["copies"])) == (
        2**63 + 5,
        1.5,
        (3, 4),
        2,
    )
    assert torch.from_numpy(back["images"]).shape == (2, 3, 5)


def test_one_rank_reads_each_sample_once(data: Path):
    dataset = ShardDataset(data, fields=("images",), split="train")
    reader = TileReader(dataset, crop=None, spatial_rank=0, spatial_size=2, halvings=0)
    store = TileStore(reader.__getitem__, n_samples=6)
    first = store.batch([4, 1])
    store.first_epoch_ended()
    store.batch([0])
    assert (store.reads, store.held) == (6, (0, 1, 2, 3, 4, 5))
    with counted_reads() as counts:
        again = store.batch([1, 4, 5])
    assert not counts
    assert np.array_equal(again[0]["images"], first[1]["images"])


def test_a_store_that_would_not_fit_says_so():
    store = TileStore(lambda i: {"images": np.zeros(1000)}, n_samples=100, limit_bytes=100_000)
    with pytest.raises(UsageError, match=r"series.store: none"):
        store.batch([0])


def test_noise_of_a_tile_is_that_of_the_whole():
    images = np.random.default_rng(1).uniform(0.5, 1.5, size=(3, 8, 6)).astype(np.float32)
    whole = noisy_images(images, 50.0, seed=1, epoch=2, uid=3, corner=(0, 0))
    lower = noisy_images(images[:, 5:], 50.0, seed=1, epoch=2, uid=3, corner=(5, 0))
    assert np.array_equal(whole[:, 5:], lower)
    other = noisy_images(images, 50.0, seed=1, epoch=3, uid=3, corner=(0, 0))
    assert not np.array_equal(whole, other)
    assert abs(float((whole - images).std()) - (1 / 50) ** 0.5) < 0.03


def test_planes_are_interpolated():
    images = np.arange(3, dtype=np.float32)[:, None, None] * np.ones((3, 2, 2), np.float32)
    assert resample_planes(images, 5)[:, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2]
    assert resample_planes(images, 3) is images
    assert resample_planes(images[:1], 4)[:, 0, 0].tolist() == [0, 0, 0, 0]
