"""The event log."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

from exitwave.ingest.events import EventLog, read_events


def test_events_are_read_back_and_shown(tmp_path: Path) -> None:
    log, seen = EventLog(tmp_path / "deep" / "events.jsonl"), []
    log.listeners.append(seen.append)
    event = log.emit("shard_committed", task=3, structures=["Au é"], path=tmp_path)
    assert seen == [event]
    (read,) = read_events(log.path)
    assert (read["kind"], read["task"], read["structures"]) == ("shard_committed", 3, ["Au é"])
    assert 1.6e9 < read["t"] < 1e10
    assert read_events(tmp_path / "absent") == []


def test_a_torn_line_swallows_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).emit("one")
    with path.open("ab") as file:
        file.write(b'{"t": 1, "kind": "torn", "x": ')
    assert [e["kind"] for e in read_events(path)] == ["one"]
    EventLog(path).emit("two")
    assert [e["kind"] for e in read_events(path)] == ["one", "two"]


def test_several_writers_share_a_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def work(who: int) -> None:
        log = EventLog(path)
        for i in range(25):
            log.emit("tick", who=who, i=i, pad="x" * 500)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((e["who"], e["i"]) for e in events) == [(w, i) for w in range(4) for i in range(25)]


def test_events_of_a_group_are_written_at_once_and_told_after(tmp_path: Path) -> None:
    log, seen = EventLog(tmp_path / "events.jsonl"), []
    log.listeners.append(lambda event: seen.append((event["kind"], len(read_events(log.path)))))
    with contextlib.suppress(ZeroDivisionError), log.together():
        log.emit("one")
        log.emit("two")
        assert read_events(log.path) == [] and seen == []
        raise ZeroDivisionError
    assert seen == [("one", 2), ("two", 2)]
    with log.together():
        pass
    log.emit("three")
    assert [e["kind"] for e in read_events(log.path)] == ["one", "two", "three"]
