"""The arithmetic of tiles against brute force: each output's inputs are listed one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from exitwave.ingest.errors import UsageError
from exitwave.train.spatial.tiles import TransposedWindow, Window, even_bounds, moves, scaled_bounds


@st.composite
def tilings(draw):
    """Bounds of 1 to 40 places over 1 to 6 ranks, with empty and one-place tiles."""
    n = draw(st.integers(1, 40))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    return (0, *cuts, n)


windows = st.builds(
    Window,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
)


@settings(max_examples=150, deadline=None)
@given(tilings(), windows)
def test_what_a_rank_fetches_is_what_its_outputs_need(bounds, window):
    n = bounds[-1]
    m = window.outputs(n)
    padded = n + window.before + window.after
    assert m == len(range(0, padded - window.extent + 1, window.stride))
    if m == 0:
        return
    owned = window.output_bounds(bounds)
    assert owned[0] == 0 and owned[-1] == m and list(owned) == sorted(owned)
    needs = window.needs(owned)
    for (first, end), (low, high) in zip(pairwise(owned), needs, strict=True):
        used = {
            o * window.stride - window.before + window.dilation * t
            for o in range(first, end)
            for t in range(window.kernel)
        }
        assert (low, high) == ((min(used), max(used) + 1) if used else (0, 0))
    check_messages(bounds, needs)
    for rank, tile in enumerate(pairwise(bounds)):
        first, end = window.inside(tile)
        inner = {
            o
            for o in range(-5, m + 5)
            if tile[0] <= window.need((o, o + 1))[0] and window.need((o, o + 1))[1] <= tile[1]
        }
        assert set(range(first, end)) == {o for o in inner if first <= o < end} and inner <= set(range(first, end)), (
            rank
        )


def check_messages(bounds, needs):
    """All needed places inside of the dim arrive exactly once, from their owners, and sends meet receives."""
    ranks = range(len(needs))
    every = [moves(bounds, needs, rank) for rank in ranks]
    for rank, mine in zip(ranks, every, strict=True):
        got = list(range(*mine.keep))
        for peer, low, high in mine.receives:
            assert bounds[peer] <= low < high <= bounds[peer + 1]
            assert (rank, low, high) in every[peer].sends
            got += range(low, high)
        low, high = needs[rank]
        assert sorted(got) == [place for place in range(low, high) if 0 <= place < bounds[-1]]
        assert sum(mine.padding) + len(got) == mine.size
        assert len(mine.sends) == sum(rank in [peer for peer, _, _ in other.receives] for other in every)


@settings(max_examples=150, deadline=None)
@given(tilings(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 4))
def test_transposed_windows_reach_all_their_outputs(bounds, kernel, stride, dilation, padding, extra):
    n = bounds[-1]
    extra %= max(stride, dilation)
    window = TransposedWindow(kernel=kernel, stride=stride, dilation=dilation, padding=padding, output_padding=extra)
    m = window.outputs(n)
    if m < 1:
        return
    signal = torch.arange(1.0, n + 1, dtype=torch.float64).view(1, 1, n)
    weight = torch.rand(1, 1, kernel, dtype=torch.float64)
    whole = F.conv_transpose1d(signal, weight, None, stride, padding, extra, 1, dilation)
    assert whole.shape[-1] == m
    owned = window.output_bounds(bounds)
    assert owned[0] == 0 and owned[-1] == m and list(owned) == sorted(owned)
    needs = window.needs(owned, n)
    check_messages(bounds, needs)
    for outputs, (low, high) in zip(pairwise(owned), needs, strict=True):
        if outputs[1] > outputs[0]:
            before, more = window.crop(outputs, (low, high))
            local = F.conv_transpose1d(signal[..., low:high], weight, None, stride, 0, more, 1, dilation)
            torch.testing.assert_close(
                local[..., before : before + outputs[1] - outputs[0]], whole[..., slice(*outputs)]
            )


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_ceil_mode_counts_as_torch_does(n, kernel, stride, padding):
    window = Window(kernel=kernel, stride=stride, before=padding, after=padding, ceil_mode=True)
    if padding <= kernel // 2 and window.outputs(n) >= 1:
        pooled = F.max_pool1d(torch.zeros(1, 1, n), kernel, stride, padding, ceil_mode=True)
        assert window.outputs(n) == pooled.shape[-1]


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 8))
def test_even_bounds_are_even(n, parts, multiple_of):
    bounds = even_bounds(n, parts, multiple_of)
    assert len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == n and list(bounds) == sorted(bounds)
    assert all(b % multiple_of == 0 or b == n for b in bounds)
    sizes = [-(-(b - a) // multiple_of) for a, b in pairwise(bounds)]
    assert max(sizes) - min(sizes) <= 1


def test_bad_numbers_are_refused():
    for bad in ((-1, 1, 1), (4, 0, 1), (4, 1, 0)):
        with pytest.raises(UsageError, match="tiles: expected"):
            even_bounds(*bad)
    assert scaled_bounds((0, 3, 3, 7), 14) == (0, 6, 6, 14)
