"""The global sampler: each sample once, the same sequence on any number of ranks, and on from where it stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exitwave.ingest.batches import GlobalSampler
from exitwave.ingest.errors import UsageError


@dataclass
class Numbers:
    """A data set of `n` samples, of which a generation brings ten more each."""

    n: int
    dataset_id: str = "numbers"
    generation: int = 0
    split_name: str | None = None

    def n_samples_until(self, generation: int) -> int:
        return self.n + 10 * generation

    def digest_until(self, generation: int) -> str:
        return f"{self.n}/{generation}"


def ranks(n: int, world_size: int, global_batch: int, **more: Any) -> list[GlobalSampler]:
    settings = {"seed": 7, **more}
    return [
        GlobalSampler(Numbers(n), rank=r, world_size=world_size, global_batch=global_batch, **settings)
        for r in range(world_size)
    ]


def step_through(samplers: list[GlobalSampler], steps: int | None = None) -> list[list[int]]:
    """The global batches that the ranks take together, each committed after it was taken; `steps` or to the end."""
    out = []
    for pieces in list(zip(*samplers, strict=True))[:steps]:
        out.append([i for piece in pieces for i in piece])
        for sampler in samplers:
            sampler.commit(len(out[-1]))
    return out


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 400),
    global_batch=st.integers(1, 40),
    world_size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63),
)
def test_evaluation_sees_each_sample_exactly_once(
    n: int, global_batch: int, world_size: int, shuffle: bool, seed: int
) -> None:
    samplers = ranks(n, world_size, global_batch, tail="keep", shuffle=shuffle, seed=seed)
    assert len({len(s) for s in samplers}) == 1, "every rank has as many batches"
    seen = [i for batch in step_through(samplers) for i in batch]
    assert sorted(seen) == list(range(n))
    assert shuffle or seen == list(range(n))
    assert {(s.epoch, s.committed) for s in samplers} == {(1, 0)}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(8, 300), global_batch=st.integers(8, 30), tail=st.sampled_from(["drop", "keep"]))
def test_resumed_on_other_world_sizes_the_sequence_is_the_same(
    data: st.DataObject, n: int, global_batch: int, tail: str
) -> None:
    n = max(n, global_batch)
    (serial,) = ranks(n, 1, global_batch, tail=tail)
    expected = step_through([serial]) + step_through([serial]) + step_through([serial])
    state: dict[str, Any] | None = None
    got: list[list[int]] = []
    while len(got) < len(expected):
        samplers = ranks(n, data.draw(st.integers(1, 8)), global_batch, tail=tail)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        assert {len(list(s)) for s in samplers} == {len(samplers[0])}, (
            "fetched ahead, and not committed: no trace of it"
        )
        got += step_through(samplers, data.draw(st.integers(1, 10)))
        state = data.draw(st.sampled_from(samplers)).state_dict()
    assert got[: len(expected)] == expected


def test_tail_is_dropped_for_training() -> None:
    samplers = ranks(23, 2, 5)
    assert [s.samples_per_epoch for s in samplers] == [20, 20]
    assert [s.steps_per_epoch for s in samplers] == [4, 4]
    batches = step_through(samplers)
    assert [len(b) for b in batches] == [5, 5, 5, 5]
    assert len({i for b in batches for i in b}) == 20
    assert set(range(23)) == {i for _ in range(8) for b in step_through(samplers) for i in b}, "others each epoch"


def test_commits_while_iterating_do_not_move_the_batches() -> None:
    (sampler,) = ranks(30, 1, 5)
    expected = [b for b in sampler]
    got = []
    for batch in sampler:
        got.append(batch)
        sampler.commit(5)
    assert got == expected
    assert (sampler.epoch, sampler.committed) == (1, 0)
    assert [b for b in sampler] != expected


def test_positions_between_steps() -> None:
    (sampler,) = ranks(30, 1, 5)
    whole = [i for b in sampler for i in b]
    sampler.commit(12)
    assert len(sampler) == 4
    assert [i for b in sampler for i in b] == whole[12:]
    with pytest.raises(UsageError, match=r"commit of 19 samples: epoch 0 has 18 left \(of 30\)"):
        sampler.commit(19)
    with pytest.raises(UsageError, match="commit of -1"):
        sampler.commit(-1)


def test_generations() -> None:
    assert GlobalSampler(Numbers(10, generation=3), rank=0, world_size=1, global_batch=1, seed=0).n_samples == 40
    old = GlobalSampler(Numbers(10, generation=3), rank=0, world_size=1, global_batch=1, seed=0, generation=1)
    assert old.n_samples == 20
    assert old.state_dict()["generation"] == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 8}, "seed 7 then, 8 now"),
        ({"global_batch": 6}, "global_batch 5 then, 6 now"),
        ({"shuffle": False}, "shuffle True then, False now"),
        ({"tail": "keep"}, "tail 'drop' then, 'keep' now"),
        ({"generation": 1}, "generation 0 then, 1 now; n_samples 30 then, 40 now"),
    ],
)
def test_another_order_is_refused(change: dict[str, Any], match: str) -> None:
    (before,) = ranks(30, 1, 5)
    settings = {"global_batch": 5, **change}
    (after,) = ranks(30, 1, **settings)
    with pytest.raises(UsageError, match=match):
        after.load_state_dict(before.state_dict())


def test_another_data_set_or_position_is_refused() -> None:
    (sampler,) = ranks(30, 1, 5)
    for change, match in [
        ({"dataset_id": "x"}, "dataset_id 'x' then, 'numbers' now"),
        ({"split": "train"}, "split 'train' then, None now"),
        ({"shards_digest": "z"}, "shards_digest 'z' then"),
        ({"order_version": 0}, "order_version 0 then, 1 now"),
        ({"committed": 30}, r"30 samples; expected 0\.\.29"),
    ]:
        with pytest.raises(UsageError, match=match):
            sampler.load_state_dict({**sampler.state_dict(), **change})


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"rank": 2, "world_size": 2}, r"rank 2: expected 0\.\.1"),
        ({"world_size": 8, "global_batch": 7}, "7 samples for 8 ranks: expected at least one sample per rank"),
        ({"global_batch": 0, "tail": "keep"}, "batch of 0 samples"),
        ({"tail": "wrap"}, "tail 'wrap': expected 'drop' or 'keep'"),
        ({"global_batch": 31}, "30 samples do not fill one global batch of 31"),
    ],
)
def test_what_cannot_be_is_refused(args: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        GlobalSampler(Numbers(30), **{"rank": 0, "world_size": 1, "global_batch": 5, "seed": 0, **args})
