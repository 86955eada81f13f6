"""Parts of a sample, and the memory that batches are read into."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_samples import flip_bit, make_dataset, sample

from exitwave.ingest import ShardDataset, collate, load_manifest
from exitwave.ingest.buffers import BufferPool
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.tiles import plan_tile

BIG = (FieldSpec(name="cbed", dtype="float32", shape=(4, 4, 64, 64), axes=("Ry", "Rx", "Qy", "Qx"), unit="1"),)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
def test_the_pieces_of_a_tile_are_the_bytes_of_the_slice(data: st.DataObject, shape: tuple[int, ...]) -> None:
    bound = st.one_of(st.none(), st.integers(-6, 6))
    slices = [slice(data.draw(bound), data.draw(bound)) for _ in range(data.draw(st.integers(0, len(shape))))]
    array = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    tile = plan_tile(shape, 4, slices)
    raw = array.tobytes()
    got = b"".join(raw[offset : offset + length] for offset, length in tile.pieces)
    expected = array[tuple(slices)]
    assert tile.shape == expected.shape
    assert got == expected.tobytes()
    assert np.array_equal(array[tile.slices], expected)


def test_a_tile_reads_only_its_bytes(tmp_path: Path) -> None:
    data = ShardDataset(make_dataset(tmp_path / "d", "t", fields=BIG), fields=("cbed",))
    whole = sample(0, 2, BIG)[2]["cbed"]

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

    data.read_tile(0, "cbed", [])  # opens the shard
    before = bytes_read()
    bytes_read()
    own = bytes_read() - before  # what looking costs
    before = bytes_read()
    part = data.read_tile(2, "cbed", [slice(1, 3), slice(0, 2), slice(16, 48)])
    used = bytes_read() - before - own // 2
    assert np.array_equal(part, whole[1:3, 0:2, 16:48])
    assert part.nbytes <= used < part.nbytes + 4096 < whole.nbytes
    assert np.array_equal(data.read_tile(-2, "cbed", []), whole)


def test_what_is_no_tile_is_refused(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    data = ShardDataset(root)
    with pytest.raises(UsageError, match="no field 'volume'"):
        data.read_tile(0, "volume", [])
    with pytest.raises(UsageError, match="expected a slice of step 1 for each axis"):
        data.read_tile(0, "potential", [slice(None, None, 2)])
    with pytest.raises(UsageError, match="expected a slice of step 1"):
        data.read_tile(0, "potential", [slice(None)] * 3)
    with pytest.raises(IndexError):
        data.read_tile(4, "potential", [])
    shard = load_manifest(root).shards[0]
    os.truncate(root / shard.path, shard.extent("cbed").offset + 10)
    with pytest.raises(DamagedDataError, match=r"sample 3 .*the file is short"):
        data.read_tile(3, "cbed", [])


def test_memory_is_used_again_only_when_nothing_refers_to_it(tmp_path: Path) -> None:
    data = ShardDataset(make_dataset(tmp_path / "d", "tt", fields=BIG), fields=("cbed",), threads=2)
    held: list[tuple[int, Any]] = []
    places = set()
    for k in range(24):
        batch = collate(data.__getitems__([k % 8, (k + 3) % 8]))
        assert batch["cbed"].data_ptr() % 4096 == 0
        places.add(batch["cbed"].data_ptr())
        if k % 5 == 0:
            held.append(((k + 3) % 8, batch["cbed"][1, 2]))  # a view of a part is enough to keep a block
        del batch
    for i, view in held:
        task, row = divmod(i, 4)
        assert torch.equal(view, torch.from_numpy(sample(task, row, BIG)[2]["cbed"][2]))
    assert len(places) < 12, "24 batches, of which five are held"
    gc.collect()


def test_a_pool_hands_out_no_block_twice() -> None:
    pool = BufferPool()
    arrays = [pool.empty((1 << 18,), np.float32) for _ in range(10)]
    for k, array in enumerate(arrays):
        array[:] = k
    assert all((array == k).all() for k, array in enumerate(arrays))
    again = arrays[9].ctypes.data
    del arrays[9], array
    assert pool.empty((1 << 17, 2), np.float32).ctypes.data == again
    assert pool.empty((3,), np.uint8).shape == (3,)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_any_number_of_threads_reads_the_same_and_names_the_same_damage(tmp_path: Path, threads: int) -> None:
    root = make_dataset(tmp_path / "d", "tt", n=8, fields=BIG)
    data = ShardDataset(root, fields=("cbed",), threads=threads)
    order = np.random.default_rng(0).permutation(16).tolist()
    batch = data.data.read(order, ["cbed"])
    for k, i in enumerate(order):
        task, row = divmod(i, 8)
        uid, params, arrays = sample(task, row, BIG)
        assert batch["uid"][k] == uid
        assert batch["params"]["energy_keV"][k] == params["energy_keV"]
        assert np.array_equal(batch["cbed"][k], arrays["cbed"])
    shard = load_manifest(root).shards[1]
    flip_bit(root / shard.path, shard.extent("cbed").place(5)[0])
    for _ in range(5):
        with pytest.raises(DamagedDataError, match=r"sample 5 \(uid .*cbed: crc32c"):
            data.data.read(order, ["cbed"])
    good = [i for i in order if i != 13]
    assert len(data.data.read(good, ["cbed"])["uid"]) == 15
