"""The engine, the sessions and the watch with every rank a thread of this process."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import torch
from allreduce_ranks import on_ranks
from torch import nn

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce import GroupedAllreduce, MismatchError, StallError, StallWarning
from exitwave.train.allreduce.agreement import first_difference
from exitwave.train.allreduce.functional import Op as FunctionalOp
from exitwave.train.allreduce.functional import _exchange, _How, _requests
from exitwave.train.allreduce.negotiation import Request
from exitwave.train.allreduce.session import Session
from exitwave.train.allreduce.stall import Progress, Watch, explain
from exitwave.train.loopback import LoopbackHub


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


# --------------------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("protocol", ["static", "bitvector", "coordinator"])
def test_eight_ranks_end_with_the_mean_and_the_same_bytes(protocol):
    size = 8
    torch.manual_seed(0)
    x = torch.randn(size, 6, 4)
    reference = small()
    state = {k: v.clone() for k, v in reference.state_dict().items()}
    sum(reference(x[r]).square().mean() / size for r in range(size)).backward()

    def work(rank, data, control):
        model = small()
        if rank == 0:
            model.load_state_dict(state)
        engine = GroupedAllreduce(
            model, protocol=protocol, grouping="count:3", transports=(data, control), timeout_s=20
        )
        for _ in range(2):
            model.zero_grad()
            engine(x[rank]).square().mean().backward()
        finite = engine.finite()
        counters = engine.counters
        engine.close()
        return {n: p.grad.clone() for n, p in model.named_parameters()}, finite, counters, engine.state_dict()

    results = on_ranks(size, work)
    for result in results:
        assert not isinstance(result, Exception), result.__notes__
        gradients, finite, counters, final = result
        assert finite
        assert counters.steps == 2 and counters.groups == 6
        assert counters.cycles == (0 if protocol == "static" else 6)
        assert list(final) == list(state)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
            assert torch.equal(gradients[name], results[0][0][name])
            assert torch.equal(final[name], state[name]), "not rank 0's parameters"


def test_one_rank_needs_no_process_group_and_changes_nothing():
    torch.manual_seed(0)
    plain, wrapped = small(), small()
    wrapped.load_state_dict(plain.state_dict())
    engine = GroupedAllreduce(wrapped)
    x = torch.randn(3, 4)
    plain(x).sum().backward()
    with engine.no_sync():
        engine(x).sum().backward()
    engine.set_local_batch(3, 3)
    for (name, p), q in zip(engine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert name in wrapped.state_dict()
    assert engine.finite()
    next(wrapped.parameters()).grad[0, 0] = float("nan")
    assert not engine.finite()
    assert list(engine.state_dict()) == list(plain.state_dict())
    engine.load_state_dict(plain.state_dict())
    assert [g.names for g in engine.plan.groups] == [("2.bias", "2.weight", "0.bias", "0.weight")]
    with pytest.raises(UsageError, match="whole batch"):
        engine.set_local_batch(1, 3)
    with pytest.raises(UsageError, match="assign"):
        engine.load_state_dict(plain.state_dict(), assign=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"protocol": "gossip"}, "choose static, bitvector, coordinator"),
        ({"grouping": "best"}, "choose optimal, bytes"),
        ({"overlap": "forward"}, "choose backward, step"),
        ({"overlap": "step", "protocol": "bitvector"}, "the plan's order"),
        ({"compression": "int8"}, "choose fp16, bf16"),
        ({"timeout_s": 0}, "positive"),
        ({"average_over": 2}, "world size 1"),
    ],
)
def test_options_that_do_not_exist_say_what_does(options, words):
    with pytest.raises(UsageError, match=words):
        GroupedAllreduce(small(), **options)


def test_modules_that_cannot_be_reduced_are_refused():
    with pytest.raises(UsageError, match="nothing to reduce"):
        GroupedAllreduce(small().requires_grad_(False))
    with pytest.raises(UsageError, match="no shape yet"):
        GroupedAllreduce(nn.LazyLinear(3))
    with pytest.raises(UsageError, match="complex64"):
        GroupedAllreduce(nn.Linear(2, 2, dtype=torch.complex64))
    plan = GroupedAllreduce(small()).plan
    with pytest.raises(UsageError, match=r"saved plan does not fit: \w"):
        GroupedAllreduce(nn.Linear(2, 2), grouping=plan)
    assert GroupedAllreduce(small(), grouping=plan).plan == plan


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda: (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), {}), ["0.weight", "(5, 4)", "(6, 4)"]),
        (lambda: (small().double(), {}), ["0.weight", "float32", "float64"]),
        (lambda: (nn.Sequential(nn.Linear(4, 5)), {}), ["2.weight", "absent", "(2, 5)"]),
        (lambda: (small(), {"protocol": "bitvector"}), ["option protocol", "static", "bitvector"]),
        (lambda: (small(), {"grouping": "bytes:1"}), ["option grouping", "optimal:50", "bytes:1"]),
        (lambda: (_frozen_bias(), {}), ["0.bias", "frozen"]),
    ],
)
def test_a_mismatch_is_the_same_exception_on_every_rank(odd, words):
    def work(rank, data, control):
        model, options = odd() if rank == 2 else (small(), {})
        return GroupedAllreduce(model, transports=(data, control), timeout_s=20, **options)

    results = on_ranks(4, work)
    assert all(isinstance(result, MismatchError) for result in results)
    assert len({str(result) for result in results}) == 1
    for word in [*words, "rank 0, 1, 3", "rank 2"]:
        assert word in str(results[0])


def _frozen_bias() -> nn.Module:
    model = small()
    model[0].bias.requires_grad_(False)
    return model


def test_the_first_difference_names_key_ranks_and_values():
    assert first_difference([{"a": "1"}, {"a": "1"}]) is None
    assert (
        first_difference([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]) == "ranks hold the same tensors in another order"
    )
    assert first_difference([{"a": "1"}, {"a": "2"}]) == "ranks disagree on tensor 'a': rank 0: 1; rank 1: 2"


def test_weights_that_do_not_add_up_fail_every_rank():
    def work(rank, data, control):
        engine = GroupedAllreduce(small(), transports=(data, control), timeout_s=20)
        engine.set_local_batch(1, 4)  # twice: half of the batch is nowhere
        engine(torch.ones(1, 4)).sum().backward()

    for result in on_ranks(2, work):
        assert isinstance(result, UsageError)
        assert "add up to 0.5" in str(result)


def test_use_after_close_is_refused():
    def work(rank, data, control):
        engine = GroupedAllreduce(small(), transports=(data, control), timeout_s=20)
        engine.close()
        engine(torch.ones(1, 4))

    assert all("closed" in str(result) for result in on_ranks(2, work))


def test_an_error_in_one_ranks_gradient_stops_all():
    def work(rank, data, control):
        model = small()
        engine = GroupedAllreduce(model, transports=(data, control), timeout_s=20)
        if rank == 1:
            model.double()
        x = torch.ones(2, 4, dtype=torch.float64 if rank == 1 else torch.float32)
        begun = time.monotonic()
        try:
            engine(x).sum().backward()
        finally:
            assert time.monotonic() - begun < 10

    results = on_ranks(3, work)
    assert isinstance(results[1], UsageError)
    for result in (results[0], results[2]):
        assert isinstance(result, StallError)
        assert "expected dense float32" in str(result)


def test_a_rank_that_stays_away_is_named_first_as_a_warning_then_as_an_error():
    released = threading.Event()

    def work(rank, data, control):
        engine = GroupedAllreduce(small(), transports=(data, control), timeout_s=2)
        engine(torch.ones(1, 4)).sum().backward()
        if rank == 2:
            released.wait(10)
            engine(torch.ones(1, 4))
        try:
            engine(torch.ones(1, 4)).sum().backward()
        finally:
            released.set()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = on_ranks(3, work)
    for result in results:
        assert isinstance(result, StallError), result
        assert "rank 2 is alive but has not submitted" in str(result)
        assert "0.weight" in str(result)
    early = [w for w in caught if issubclass(w.category, StallWarning)]
    assert early and "rank 2 is alive but has not submitted" in str(early[0].message)


# -------------------------------------------------------------------------------------------------------- sessions


def reduce_in(
    session: Session, values: dict[str, torch.Tensor], op: FunctionalOp = FunctionalOp.SUM
) -> list[torch.Tensor]:
    how = _How(op=op, prescale=1.0, postscale=1.0)
    return _exchange(session, how, list(values), list(values.values()))


def test_calls_by_name_reduce_and_learn_their_names():
    def work(rank, data, control):
        session = Session(data, control, timeout_s=20)
        cycles = []
        for _ in range(3):
            (a,) = reduce_in(session, {"a": torch.full((3,), float(rank))})
            b, c = reduce_in(session, {"b": torch.ones(()), "c": torch.ones(2, dtype=torch.float64) * rank})
            assert a.tolist() == [6.0] * 3
            assert b.item() == 4.0
            assert c.tolist() == [6.0, 6.0]
            cycles.append(session.cycles)
        (grown,) = reduce_in(session, {"a": torch.ones(7)})  # the same change everywhere: erased and learnt again
        assert grown.tolist() == [4.0] * 7
        session.close()
        return cycles

    for result in on_ranks(4, work):
        assert not isinstance(result, Exception), result.__notes__
        assert result == [4, 6, 8]  # two cycles for a new name, one for a known one


@pytest.mark.parametrize("known", [False, True])
def test_a_call_that_differs_fails_all_ranks_and_the_next_one_works(known):
    def work(rank, data, control):
        session = Session(data, control, timeout_s=20)
        if known:
            reduce_in(session, {"a": torch.ones(3)})
        with pytest.raises(MismatchError) as caught:
            reduce_in(session, {"a": torch.ones(4 if rank == 1 else 3)})
        (again,) = reduce_in(session, {"a": torch.ones(2)})
        assert again.tolist() == [3.0, 3.0]
        session.close()
        return str(caught.value)

    results = on_ranks(3, work)
    for result in results:
        assert not isinstance(result, Exception), result.__notes__
        assert result == results[0]
    for word in ("'a'", "rank 1", "rank 0, 2", "(4,)", "(3,)"):
        assert word in results[0]


def test_ranks_that_wait_for_different_names_are_told_which():
    def work(rank, data, control):
        session = Session(data, control, timeout_s=2)
        reduce_in(session, {f"mine.{rank}": torch.ones(1)})

    results = on_ranks(2, work)
    assert all(isinstance(result, StallError) for result in results)
    assert any("has not submitted mine.0" in str(r) and "waits for mine.1" in str(r) for r in results) or any(
        "has not submitted mine.1" in str(r) and "waits for mine.0" in str(r) for r in results
    )


def test_a_name_twice_in_one_call_fails_all_ranks_and_queues_nothing():
    def work(rank, data, control):
        session = Session(data, control, timeout_s=20)
        twice = Request(name="x", signature="s", group="g", group_size=2)
        if rank == 0:
            session.agree([twice, twice])
        else:
            session.agree(_requests("y", {"y": "s"}))

    first, second = on_ranks(2, work)
    assert isinstance(first, UsageError) and "x was submitted twice" in str(first)
    assert isinstance(second, StallError) and "x was submitted twice" in str(second)


# ----------------------------------------------------------------------------------------------------------- stall


def test_the_explanation_tells_dead_from_late_from_gone():
    own = Progress(step=5, phase="backward")
    notes = [
        own,
        Progress(step=4, phase="idle", missing=("w", "b")),
        Progress(step=5, phase="backward", missing=("b",)),
        Progress(step=5, phase="backward"),
        Progress(step=3, phase="left"),
        None,
    ]
    said = explain(
        what="group 1", own=own, waited_s=7.0, rank=0, notes=notes, silent_s=[None, 9.0, None, None, 9.0, None]
    )
    assert "waits since 7.0 s for group 1 (step 5)" in said
    assert "rank 1 died: no sign of life for 9.0 s (at step 4, missing w, b)" in said
    assert "rank 2 is alive but has not submitted b (at step 5, backward)" in said
    assert "rank 3" not in said
    assert "rank 4 has left (at step 3)" in said
    assert "rank 5 never showed a sign of life" in said
    fine = explain(what="x", own=own, waited_s=1.0, rank=0, notes=[own, own], silent_s=[None, None])
    assert "every other rank is alive" in fine


def test_a_closed_or_forgotten_watch_leaves_no_thread():
    hub = LoopbackHub(1)
    before = threading.active_count()
    options = {"rank": 0, "size": 1, "timeout_s": 2.0, "snapshot": lambda: Progress(step=0, phase="idle")}
    Watch(hub.transport(0).board, **options).close()
    assert Progress.from_json(hub.notes["progress/0"]).phase == "left"
    Watch(hub.transport(0).board, **options)
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= before
