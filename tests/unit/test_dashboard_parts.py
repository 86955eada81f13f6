"""What the scheduler holds of campaigns, and the pictures that are sent to it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.simulate.counters import Counters
from exitwave.simulate.dashboard.board import METADATA_KEY, campaigns, chosen, without_pictures
from exitwave.simulate.live import STATUS_NAME, LiveStatus, read_live
from exitwave.simulate.pictures import Picture, grey


def snapshot(dataset: str, updated: float, activity: str = "running") -> dict[str, Any]:
    return {**Counters().snapshot(updated), "dataset": dataset, "activity": activity, "pictures": [1]}


def test_the_newest_campaign_that_runs_is_shown() -> None:
    held = {str(i): snapshot(str(i), float(i), "running" if i == 3 else "finished") for i in range(12)}
    metadata: dict[str, Any] = {METADATA_KEY: {**held, "odd": 5}}
    assert chosen({}) is None and chosen({METADATA_KEY: "nonsense"}) is None
    rows = campaigns(metadata)
    assert [row["dataset"] for row in rows] == [str(i) for i in range(11, 3, -1)]  # eight, the newest first
    assert set(metadata[METADATA_KEY]) - {"odd"} == {row["dataset"] for row in rows}  # the others are thrown away
    assert (found := chosen(metadata)) is not None and found["dataset"] == "11"
    metadata[METADATA_KEY]["7"]["activity"] = "running"
    assert (found := chosen(metadata)) is not None and found["dataset"] == "7"
    assert chosen(metadata, "gone") is None
    assert (found := chosen(metadata, "9")) is not None and "pictures" not in without_pictures(found)


def test_pictures_are_small_and_keep_their_sides() -> None:
    plane = np.zeros((300, 500))
    plane[:150] = 2.0
    plane[0, 0] = np.nan
    pixels, low, high = grey(plane)
    assert pixels.shape == (75, 125) and (low, high) == (0.0, 2.0)
    assert pixels[10, 10] == 255 and pixels[-1, -1] == 0  # row 0 stays at the top
    assert grey(np.full((4, 4), np.inf))[0].max() == 0
    assert grey(np.full((3, 200), 7.0))[0].shape[1] <= 200
    told = Picture(field="a", title="A", caption="", pixels=pixels, low=low, high=high, unit="V").to_json()
    again = np.frombuffer(base64.b64decode(told["data"]), np.uint8).reshape(told["shape"])
    assert np.array_equal(again, pixels) and len(json.dumps(told)) < 16_000


def test_a_snapshot_on_disk_counts_only_while_it_is_true(tmp_path: Path) -> None:
    published: list[Any] = []
    started = {"t": 1.0, "kind": "campaign_started", "samples": 8, "shards": 2, "workers": 1}
    (tmp_path / "manifest.jsonl").write_text("header\n")
    with LiveStatus(tmp_path, epoch=4, publish=published.append, every_s=0.02) as live:
        live.feed(started)
        live.show()
        holder = {"epoch": 4, "pid": 1}
        shown = read_live(tmp_path, holder)
        assert shown is not None and shown["shards"]["pending"] == 2 and shown["epoch"] == 4
        assert read_live(tmp_path, {"epoch": 5}) is None  # another controller's
        assert read_live(tmp_path, None) is None  # it says "running", and nobody runs
        live.feed({"t": 2.0, "kind": "campaign_finished"})
    assert published and {**published[-1], "pictures": 0}["dataset"] == str(tmp_path)
    shown = read_live(tmp_path, None)
    assert shown is not None and shown["activity"] == "finished"
    (tmp_path / "manifest.jsonl").write_text("header\nshard\n")
    assert read_live(tmp_path, None) is None  # something was committed since
    for damaged in ("", "[]", "{}", '{"version": 1}', "\0"):
        (tmp_path / STATUS_NAME).write_text(damaged)
        assert read_live(tmp_path, holder) is None
    assert not list(tmp_path.glob(".*.part"))


def test_a_controller_that_was_taken_over_shows_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text("header\n")
    published: list[Any] = []

    def lease(epoch: int) -> None:
        (tmp_path / "lease").write_text(json.dumps({"epoch": epoch}))

    lease(1)
    sleeper = LiveStatus(tmp_path, epoch=1, publish=published.append)
    sleeper.feed({"t": 1.0, "kind": "campaign_started", "samples": 8, "shards": 2, "workers": 1})
    sleeper.show()
    half_written = (tmp_path / STATUS_NAME).read_text()
    lease(2)
    with LiveStatus(tmp_path, epoch=2, every_s=0.02) as live:
        live.feed({"t": 2.0, "kind": "campaign_started", "samples": 8, "shards": 3, "workers": 1})
        live.feed({"t": 3.0, "kind": "campaign_finished"})
    sleeper.feed({"t": 4.0, "kind": "campaign_interrupted", "why": "another controller took over"})
    sleeper.show()
    shown = read_live(tmp_path, None)
    assert shown is not None and (shown["epoch"], shown["activity"]) == (2, "finished") and len(published) == 1
    # It was asleep between its look at the lease and its writing:
    stale = {**json.loads(half_written), "activity": "interrupted"}
    (tmp_path / STATUS_NAME).write_text(json.dumps(stale))
    assert read_live(tmp_path, None) is None and read_live(tmp_path, {"epoch": 2}) is None
    lease(3)
    with LiveStatus(tmp_path, epoch=3):
        assert read_live(tmp_path, None) is None


def test_a_controller_with_nothing_to_do_leaves_the_last_snapshot_true(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text("header\n")
    for epoch in (1, 2, 3):
        (tmp_path / "lease").write_text(json.dumps({"epoch": epoch}))
        with LiveStatus(tmp_path, epoch=epoch, every_s=0.02) as live:
            if epoch == 1:
                live.feed({"t": 1.0, "kind": "campaign_started", "samples": 8, "shards": 2, "workers": 1})
                live.feed({"t": 2.0, "kind": "campaign_finished"})
        shown = read_live(tmp_path, None)
        assert shown is not None and (shown["epoch"], shown["activity"]) == (epoch, "finished")


def test_a_cluster_that_is_gone_does_not_matter(tmp_path: Path) -> None:
    def broken(shown: Any) -> None:
        raise OSError("gone")

    with LiveStatus(tmp_path, publish=broken) as live:
        live.show()
        assert not (tmp_path / STATUS_NAME).exists()  # nothing has begun
        live.feed({"t": 1.0, "kind": "campaign_started", "samples": 8, "shards": 2})
        live.show()
    assert (tmp_path / STATUS_NAME).exists()
