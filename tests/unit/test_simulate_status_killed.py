"""The status of a campaign whose controller was killed: the last snapshot and what came after it, or everything; both
say the same, wherever the kill fell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_tasks import with_deeds
from sim_samples import plan

from exitwave.ingest.manifest import MANIFEST_NAME
from exitwave.simulate import state
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster_inline import InlineCluster
from exitwave.simulate.live import STATUS_NAME, LiveStatus, read_on
from exitwave.simulate.state import campaign_status

_SAME = ("samples", "shards", "attempts", "bytes", "failed_attempts", "activity", "why", "name", "dataset", "running")


class Recorder(LiveStatus):
    """What the snapshot was after each sync, and how long manifest and log were then."""

    def __init__(self, dataset: Path) -> None:
        super().__init__(dataset)
        self.moments: list[tuple[dict[str, Any], int, int]] = []

    def follow(self, events: Sequence[Mapping[str, Any]], size: int) -> None:
        super().follow(events, size)
        shown = json.loads(json.dumps(self.snapshot()))
        self.moments.append((shown, size, shown["upto"]["manifest"]))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """A campaign of six shards, two of which fail."""
    dataset = tmp_path_factory.mktemp("campaign") / "data"
    made = with_deeds(plan(simulator="weak-phase"), {1: "raise"}, 0.0)
    live = Recorder(dataset)
    result = run_campaign(made, dataset, InlineCluster(), live=live)
    assert (result.committed, result.failed) == (4, 2)
    (dataset / STATUS_NAME).unlink(missing_ok=True)
    return dataset, live


def test_wherever_it_was_killed(ran: tuple[Path, Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, live = ran
    manifest, log = (dataset / MANIFEST_NAME).read_bytes(), (dataset / "events.jsonl").read_bytes()
    compared = ahead = 0
    for shown, size, _ in live.moments:
        if shown["activity"] != "running":
            continue
        for _, later, committed in live.moments:
            if later < size:
                continue
            # The manifest may be one line ahead of the log, and either may end in a torn line.
            for end in (committed, *_next_line(manifest, committed)):
                (dataset / MANIFEST_NAME).write_bytes(manifest[: end + 7])
                (dataset / "events.jsonl").write_bytes(log[: later + 5])
                (dataset / STATUS_NAME).write_text(json.dumps(shown))
                assert read_on(dataset) is not None
                quick = campaign_status(dataset)
                with monkeypatch.context() as patch:
                    patch.setattr(state, "read_on", lambda dataset: None)
                    whole = campaign_status(dataset)
                assert {key: quick[key] for key in _SAME} | {"bytes": 0} == {key: whole[key] for key in _SAME} | {
                    "bytes": 0
                }
                compared, ahead = compared + 1, ahead + (end > committed)
    assert compared > 30 and ahead > 10


def _next_line(data: bytes, at: int) -> tuple[int, ...]:
    end = data.find(b"\n", at) + 1
    return (end,) if end else ()


def test_what_is_not_sure_is_read_whole(ran: tuple[Path, Recorder]) -> None:
    dataset, live = ran
    manifest, log = (dataset / MANIFEST_NAME).read_bytes(), (dataset / "events.jsonl").read_bytes()
    shown = next(shown for shown, _, _ in live.moments if shown["shards"]["committed"] == 1)
    stone = b'{"kind":"tombstone","seq":9,"shard_id":"x","why":"lost","epoch":1}\n'
    started = b'{"t":9.0,"kind":"campaign_started","shards":6}\n'
    for more, told, changed in (
        (stone, b"", {}),  # something was taken out of the manifest
        (b'{"kind":"shard"}\n', b"", {}),  # damaged
        (b"", started, {}),  # another controller
        (b"", b"", {"upto": {"events": len(log) + 1, "manifest": 0}}),  # of a log that was longer
        (b"", b"", {"upto": None}),
        (b"", b"", {"history": 5}),
        (b"", b"", {"activity": "finished"}),
    ):
        (dataset / MANIFEST_NAME).write_bytes(manifest + more)
        (dataset / "events.jsonl").write_bytes(log + told)
        (dataset / STATUS_NAME).write_text(json.dumps({**shown, **changed}))
        assert read_on(dataset) is None, (more, told, changed)
    (dataset / MANIFEST_NAME).write_bytes(manifest[: shown["upto"]["manifest"]])
    (dataset / "events.jsonl").write_bytes(log)
    (dataset / STATUS_NAME).write_text(json.dumps(shown))
    assert read_on(dataset) is None  # the log tells of commits that the manifest does not hold
