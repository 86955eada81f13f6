"""The order of samples: a bijection, the same for ever, and cut among ranks without loss."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exitwave.ingest.order import ORDER_VERSION, batch_bounds, partition, permute

SEEDS = st.integers(min_value=-(2**63), max_value=2**64 - 1)


@settings(max_examples=150, deadline=None)
@given(n=st.one_of(st.integers(1, 300), st.integers(1, 20_000)), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 20_000), seed=SEEDS, data=st.data())
def test_positions_are_independent_of_each_other(n: int, seed: int, data: st.DataObject) -> None:
    whole = permute(np.arange(n), n, seed=seed, epoch=3)
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    assert np.array_equal(permute(some, n, seed=seed, epoch=3), whole[some])


@pytest.mark.parametrize("n", [2047, 2048, 2049, 4095, 4096, 4097, 1 << 16, (1 << 16) + 1])
def test_sizes_around_powers_of_two(n: int) -> None:
    assert np.unique(permute(np.arange(n), n, seed=1, epoch=0)).size == n


def test_the_order_of_version_1_never_changes() -> None:
    """Checkpoints of old runs depend on these numbers; another order needs another ORDER_VERSION."""
    assert ORDER_VERSION == 1
    assert permute(np.arange(8), 8, seed=2026, epoch=0).tolist() == [7, 2, 1, 6, 5, 4, 3, 0]
    assert permute(np.arange(6), 100_000, seed=2026, epoch=1, generation=2).tolist() == [
        54590,
        98314,
        60657,
        94670,
        63844,
        61682,
    ]


def test_seed_epoch_and_generation_each_give_another_order() -> None:
    n = 5000
    orders = [
        permute(np.arange(n), n, seed=s, epoch=e, generation=g)
        for s, e, g in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    for i, a in enumerate(orders):
        assert np.mean(a == np.arange(n)) < 0.01
        assert all(np.mean(a == b) < 0.01 for b in orders[:i])


@pytest.mark.parametrize("n", [50, 3000])
def test_every_sample_comes_at_every_place_equally_often(n: int) -> None:
    """Chi-square of the quarter that the samples of each quarter land in, over 400 epochs (9 degrees of freedom)."""
    counts = np.zeros((4, 4))
    quarter = np.arange(n) * 4 // n
    for epoch in range(400):
        np.add.at(counts, (quarter, quarter[permute(np.arange(n), n, seed=5, epoch=epoch)]), 1)
    expected = np.outer(counts.sum(1), counts.sum(0)) / counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # p = 0.001


def test_neighbours_are_torn_apart() -> None:
    n = 10_000
    order = permute(np.arange(n), n, seed=9, epoch=0)
    assert abs(np.mean(np.abs(np.diff(order))) / n - 1 / 3) < 0.01  # as for a random permutation
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    tracemalloc.start()
    for n in (10**4, 10**15):
        permute(np.arange(32), n, seed=0, epoch=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_positions_outside_are_refused() -> None:
    for bad in ([-1], [10]):
        with pytest.raises(ValueError, match=r"expected 0\.\.9"):
            permute(np.array(bad), 10, seed=0, epoch=0)
    assert permute(np.array([], dtype=int), 10, seed=0, epoch=0).size == 0


@given(n=st.integers(0, 500), world_size=st.integers(1, 64))
def test_pieces_of_ranks_are_balanced_and_join_to_the_batch(n: int, world_size: int) -> None:
    batch = np.arange(n)
    pieces = [partition(batch, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(pieces), batch)
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_no_such_rank() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        partition(np.arange(4), 2, 2)


@given(start=st.integers(0, 100), size=st.integers(1, 40), end=st.integers(0, 200), keep=st.booleans())
def test_global_batches_cover_without_overlap(start: int, size: int, end: int, keep: bool) -> None:
    bounds = batch_bounds(start, size, end, keep_tail=keep)
    covered = [p for low, high in bounds for p in range(low, high)]
    length = max(0, end - start)
    assert covered == list(range(start, start + (length if keep else length // size * size)))
