"""The life of a task: what counts against it, and what is forgotten when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exitwave.ingest.errors import UsageError
from exitwave.simulate.attempts import CLASSES, Failure, History, is_final, is_own, overdue_s, replay_histories
from exitwave.simulate.campaign_loop import window
from exitwave.simulate.commands import read_commands, write_command


def submitted(task: str = "t") -> dict[str, Any]:
    return {"kind": "task_submitted", "task": task}


def failure(state: str, *, final: bool = False, certain: bool = True, task: str = "t") -> dict[str, Any]:
    return {"kind": "task_failed", "task": task, "state": state, "final": final, "certain": certain, "why": "w"}


@pytest.mark.parametrize(("state", "tries"), [("error", 2), ("memory", 2), ("timeout", 2), ("killed", 3)])
def test_each_class_has_its_own_patience(state: Any, tries: int) -> None:
    history = History()
    for k in range(tries):
        assert history.failed is None
        history = history.begun().after(Failure(state=state, why=f"{k}"))
    assert history.failed == Failure(state=state, why=f"{tries - 1}") and history.attempts == tries


def test_a_lost_worker_is_more_likely_an_accident_than_the_task() -> None:
    history = History()
    for _ in range(5):
        history = history.after(Failure(state="killed", why="", certain=False))
        assert history.failed is None
    assert history.after(Failure(state="killed", why="", certain=False)).failed


@pytest.mark.parametrize(
    ("state", "signal", "own"),
    [
        *(("killed", name, False) for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")),
        *(("killed", name, True) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGXCPU", "")),
        ("memory", "SIGKILL", True),  # the kernel's, for want of memory
        ("timeout", "", True),
        ("error", "", True),
    ],
)
def test_what_is_killed_from_outside_is_no_crash_of_its_own(state: Any, signal: str, own: bool) -> None:
    assert is_own(state, signal) is own
    history, tries = History(), 0
    while history.failed is None:
        history, tries = history.after(Failure(state=state, why="", certain=is_own(state, signal))), tries + 1
    assert tries == (6 if not own else 3 if state == "killed" else 2)


def test_failures_of_many_classes_end_too() -> None:
    assert not is_final({"error": 1, "memory": 1, "timeout": 1, "killed": 2})
    assert is_final({"error": 1, "memory": 1, "timeout": 1, "killed": 2, "accident": 3})


def test_counts_outlive_an_interruption_and_end_with_the_round() -> None:
    events = [submitted(), failure("error"), {"kind": "campaign_interrupted"}, {"kind": "campaign_started"}]
    assert replay_histories(events)["t"] == History(attempts=1, counts={"error": 1})
    events += [submitted(), failure("error", final=True)]
    found = replay_histories(events)["t"]
    assert found.attempts == 2 and found.failed is not None and found.failed.state == "error"
    again = replay_histories([*events, {"kind": "campaign_interrupted"}, {"kind": "campaign_started"}])["t"]
    assert again == found
    assert replay_histories([*events, {"kind": "campaign_finished"}])["t"] == History(attempts=2)
    assert replay_histories([*events, {"kind": "task_retried", "task": "t"}])["t"] == History(attempts=2)


def test_what_a_scheduler_lost_is_an_attempt_and_no_failure() -> None:
    events = [submitted(), {"kind": "task_dropped", "task": "t"}, submitted()]
    assert replay_histories(events)["t"] == History(attempts=2)


@pytest.mark.parametrize(("ran", "times"), [(True, 6), (False, 24)])
def test_a_task_that_is_lost_again_and_again_ends(ran: bool, times: int) -> None:
    """In one round, over interruptions; somebody who asks for it gives it a new chance."""
    lost = [submitted(), {"kind": "task_dropped", "task": "t", "ran": ran}, {"kind": "campaign_interrupted"}]
    assert not replay_histories(lost * (times - 1))["t"].lost_too_often
    history = replay_histories(lost * times)["t"]
    assert history.lost_too_often and history.counts == {} and history.attempts == times
    assert history.after(Failure(state="killed", why="", certain=False)).failed
    assert not history.forgiven().lost_too_often
    assert replay_histories([*lost * times, {"kind": "campaign_finished"}])["t"] == History(attempts=times)


def test_the_log_decides_what_was_final() -> None:
    assert replay_histories([submitted(), failure("error", final=True)])["t"].failed
    assert replay_histories([failure("error"), failure("error"), failure("error")])["t"].failed is None
    assert replay_histories([{"kind": "task_failed", "task": "t", "state": "odd"}])["t"].failed is not None


def test_a_stalled_task_is_given_more_time_than_its_limit() -> None:
    assert overdue_s(10.0) == 85.0 and overdue_s(1000.0) == 1430.0


def test_commands_are_read_in_order_and_gone_when_done(tmp_path: Path) -> None:
    assert read_commands(tmp_path) == []
    write_command(tmp_path, "drain", epoch=3)
    write_command(tmp_path, "retry", states=["timeout", "memory"])
    first, second = read_commands(tmp_path)
    assert (first.verb, first.epoch, second.verb, second.states) == ("drain", 3, "retry", ("memory", "timeout"))
    first.done()
    first.done()
    assert [c.verb for c in read_commands(tmp_path)] == ["retry"]
    with pytest.raises(UsageError, match=r"--state odd: one of error, memory, timeout, killed expected"):
        write_command(tmp_path, "retry", states=["odd"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "drain, cancel or retry expected"),
        (json.dumps({"command": "rm"}), "found 'rm'"),
        (json.dumps({"command": "retry", "states": [["x"]]}), "states of error"),
        (json.dumps({"command": "retry", "states": {"x": 1}}), "states of error"),
        (json.dumps({"command": "drain", "epoch": "3"}), "states of error"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_what_is_no_command_says_why(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / "1.json").write_text(content)
    (found,) = read_commands(tmp_path)
    assert found.verb is None and why in found.why


def test_the_classes_are_those_of_the_contract() -> None:
    assert CLASSES == ("error", "memory", "timeout", "killed")


def test_the_window_follows_the_pace() -> None:
    """Four tasks a worker as long as they last; a quarter of a second of them, at most 32, where they are shorter."""
    assert [window(rate) for rate in (0.0, 0.01, 16.0, 100.0, 1e6)] == [4, 4, 4, 25, 32]
