"""`exitwave run --online`: the campaign and the training side by side.

1. The campaign runs in a thread of its own, its processes a little behind the ranks in the kernel's eyes (nice): ranks
   take a core when they have work, workers take what is left, and all of it while ranks wait. When the campaign has
   ended, the ranks have the machine for themselves.
2. The ranks start with the campaign, as in any other training, told to expect samples; they wait until the watermark is
   committed.
3. When the campaign has ended, a mark in the training's folder says that no more will come.
4. A campaign that stops short of its end (Ctrl-C, full disk) stops the training with a checkpoint. A training that
   fails does not stop the campaign: what is simulated is needed anyway. Its error is told at once, and raised at the
   end.
5. Whatever ended, the same command goes on: the manifest and the last checkpoint say where.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exitwave.ingest.events import read_events
from exitwave.ingest.files import write_atomic
from exitwave.ingest.growing import BACKPRESSURE_NAME
from exitwave.ingest.manifest import MANIFEST_NAME
from exitwave.simulate.live import LiveStatus
from exitwave.train.spec import TrainSpec
from exitwave.workflows.campaigns import Planned, run_planned, tell_warnings
from exitwave.workflows.launch import locked, make_folder, start_ranks
from exitwave.workflows.online_spec import SETTINGS_NAME, OnlineSection, arrival_order, planned_samples, settings_of
from exitwave.workflows.session import Session

__all__ = ["OnlineRun", "find_replay", "left_out"]

_POLL_S = 0.2

Feed = Callable[[Mapping[str, Any]], None]


def find_replay(folder: Path) -> Path:
    """The log of arrivals that `folder` is, or holds as the RUN of `exitwave run --online` or of a training."""
    from exitwave.ingest.arrivals import ARRIVALS_NAME

    for path in (folder / "train" / ARRIVALS_NAME, folder / ARRIVALS_NAME):
        if path.exists():
            return path
    return folder


@dataclass(kw_only=True)
class OnlineRun:
    """Both stages; `run` does what is left of them. `part`: tells when a part of the line begins and ends."""

    session: Session
    planned: Planned
    spec: TrainSpec
    section: OnlineSection
    dataset: Path
    folder: Path
    feed: Feed
    live: LiveStatus
    part: Callable[[str], AbstractContextManager[None]]
    failed: int = 0
    _error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self, *, cluster: str, workers: int | None, ranks: int, simulated: bool, trained: bool) -> int:
        """Returns how many shards failed for good. `simulated`, `trained`: what is done already."""
        from exitwave.train.online import ALL_ARRIVED_NAME

        settings = settings_of(self.section, self.planned.plan, self.spec)
        make_folder(self.folder)
        validates = self.spec.eval_every_steps is not None
        val = planned_samples(self.planned.plan, self.spec.val_split) if validates else 0
        told = {**settings.to_json(), "val_planned": val}
        write_atomic(self.folder / SETTINGS_NAME, (json.dumps(told) + "\n").encode())
        mark = self.folder / ALL_ARRIVED_NAME
        lock, feed = threading.Lock(), self.feed

        def one_at_a_time(event: Mapping[str, Any]) -> None:
            with lock:
                feed(event)

        self.feed = one_at_a_time
        with self.session.finishing("the shards and the step in hand"):
            if simulated:
                write_atomic(mark, b"\n")
                self._ended.set()
            else:
                mark.unlink(missing_ok=True)
                tell_warnings(self.session, self.planned)
                given = (cluster, workers, mark, settings.watermark)
                campaign = threading.Thread(target=self._campaign, args=given, name="exitwave-campaign", daemon=True)
                campaign.start()
            trouble = None if trained else self._training(ranks)
            while not self._ended.wait(_POLL_S):
                continue
        if self._error is not None:
            raise self._error
        if trouble is not None:
            raise trouble
        return self.failed

    def _campaign(self, cluster: str, workers: int | None, mark: Path, watermark: int) -> None:
        """In a thread of its own: all that it starts inherits its niceness."""
        try:
            _stand_back(self.section.worker_niceness)
            order = arrival_order(self.spec, self.planned.plan, watermark)
            with self.part("simulate"):
                result = run_planned(
                    self.session, self.planned, self.dataset,
                    cluster=cluster, workers=workers, feed=self.feed, live=self.live, order=order,
                )  # fmt: skip
            self.failed = int(result.failed)
            write_atomic(mark, b"\n")
        except BaseException as error:
            self._error = error
            self.session.stop.set()  # the ranks would wait for what does not come
        finally:
            self._ended.set()

    def _training(self, ranks: int) -> Exception | None:
        """What it failed with, if it did."""
        if not self._await_manifest():
            return None
        try:
            with self.part("train"), locked(self.folder):
                start_ranks(
                    self.session, self.spec, self.dataset, self.folder,
                    ranks=ranks, cache=None, fresh=False, feed=self._tell, online=self.folder / SETTINGS_NAME,
                )  # fmt: skip
        except Exception as error:  # whatever it is: the campaign's samples are needed anyway
            if not self._ended.is_set() and not self.session.stop.is_set():
                self.session.note(f"train: {error}\nThe campaign goes on to its end.")
            return error
        else:
            self._tell_reuse()
        finally:
            with contextlib.suppress(OSError):
                (self.dataset / BACKPRESSURE_NAME).unlink(missing_ok=True)
        return None

    def _tell(self, event: Mapping[str, Any]) -> None:
        self.feed(event)
        self.live.feed(event)

    def _tell_reuse(self) -> None:
        """How often samples were used: a few much more often than others would be a bias. And what is missing from the
        curve of validation."""
        events = read_events(self.folder / "events.jsonl")
        told = [e for e in events if e["kind"] == "train_reservoir"]
        if told:
            uses = [count for count, samples in told[-1]["reuse"] for _ in range(samples)]
            never = f", {uses.count(0)} never" if 0 in uses else ""
            span = f"{uses[0]} to {uses[-1]} times, half of them {uses[len(uses) // 2]} or less{never}"
            self.session.note(f"train: samples were used {span}")
        without, due = left_out(events)
        if without:
            self.session.note(
                f"train: {without} of {due} validations were left out: the validation split was not whole by then"
            )

    def _await_manifest(self) -> bool:
        """False when there will be none: the campaign was stopped or refused before it began."""
        while not (self.dataset / MANIFEST_NAME).exists():
            if self._ended.wait(_POLL_S):
                break
        return self._error is None and (self.dataset / MANIFEST_NAME).exists()


def left_out(events: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """(validations that were left out, all that were due) of a training that may have gone on several times."""
    steps: dict[str, set[Any]] = {"train_eval": set(), "train_eval_postponed": set()}
    for event in events:
        if event["kind"] in steps:
            steps[event["kind"]].add(event.get("step"))
    done, postponed = steps.values()
    return len(postponed - done), len(postponed | done)


def _stand_back(niceness: int) -> None:
    """This thread, and every thread and process that it starts, by so much behind what this process is now (Linux:
    setpriority(2) of a thread)."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))
