"""Training while the data set grows: who decides what a step knows, and how a finished run is done again.

1. Batches are drawn from a reservoir of what has arrived (`ingest.reservoir`). What a step may draw from follows from
   one number: the line of the manifest up to which it knows.
2. Before a step is drawn, rank 0 looks how far the manifest is and whether one step more is allowed yet
   (`ingest.arrivals.steps_allowed`), writes the line down if it has moved, and tells the others. All wait together, and
   a stop or an error of any of them ends the wait of all.
3. The thread that makes batches ready is told the decisions in order; it is a few steps ahead of the training.
4. On a resume, and when a finished run is done again, the decisions of the log are taken as they stand.
5. What is measured before the first step (means, deviations) is measured on what the first step knew. What a finished
   model says of its training set (the range that it was trained in, the mean image) is measured on all of it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exitwave.ingest import GrowingDataset, ReservoirSampler
from exitwave.ingest.arrivals import (
    ARRIVALS_NAME,
    ArrivalLog,
    ReservoirSettings,
    may_validate,
    read_log,
    refuse_difference,
    steps_allowed,
)
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import read_plain_text
from exitwave.train.mesh import Ranks
from exitwave.train.parallel import DataPlan
from exitwave.train.spec import TrainSpec, refuse_online

__all__ = [
    "ALL_ARRIVED_NAME",
    "Arrivals",
    "Online",
    "gated",
    "open_arrivals",
    "open_growing",
    "read_online",
    "refuse_replay",
    "reservoir_sampler",
    "whole_measure",
]

ALL_ARRIVED_NAME = "all-arrived"  # in the training's folder: the campaign has ended, and no more will come
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Online:
    """How a training meets its data.

    val_planned: samples of the validation split that are waited for before the first validation. replay: the log of
    arrivals of a finished training that is done again.
    """

    settings: ReservoirSettings
    val_planned: int = 0
    replay: Path | None = None

    def identity(self) -> dict[str, Any]:
        """What makes it another training, beside its spec."""
        told = self.settings.to_json()
        if self.replay is None:
            return told
        entries = json.dumps(read_log(self.replay)["entries"])
        return {**told, "replay": hashlib.sha256(entries.encode()).hexdigest()[:16]}


def read_online(settings: Path | None, replay: Path | None) -> Online | None:
    """From a file of settings, or from the log of arrivals of a finished training; None of neither.

    Raises:
        UsageError: the log is of a training that has not finished.
    """
    if replay is not None:
        log = read_log(replay)
        if log["finished"] is None:
            raise UsageError(f"{replay}: that training has not finished; let it, before it is done again")
        return Online(settings=ReservoirSettings.from_json(log["header"]), replay=replay)
    if settings is None:
        return None
    told = json.loads(read_plain_text(settings))
    return Online(settings=ReservoirSettings.from_json(told), val_planned=int(told.get("val_planned", 0)))


def refuse_replay(spec: TrainSpec, replay: Path, out: Path) -> None:
    """UsageError where doing it again would be another training, or would begin with deleting what it is to follow."""
    if spec.max_seconds is not None:
        raise UsageError(
            "--replay: a training that time ends (train.max_seconds) takes other steps, with other rates of learning, "
            "each time; only one that epochs or steps alone end can be done again"
        )
    if replay.parent.resolve() == out.resolve():
        raise UsageError(f"--replay: {replay} is the log of {out} itself; give another --out")


def open_growing(
    spec: TrainSpec, data: Path, fields: tuple[str, ...], online: Online, ranks: Ranks, plan: DataPlan
) -> GrowingDataset:
    """The training samples as they arrive; what one rank cannot open, none trains on."""
    dataset: GrowingDataset | None = None
    error: Exception | None = None
    try:
        refuse_online(spec)
        if type(plan) is not DataPlan:
            raise UsageError("--online: expected ranks that read whole samples, not a spatial mesh")
        if spec.batch < plan.size:
            raise UsageError(f"batch: expected at least one sample a rank, got {spec.batch} for {plan.size}")
        dataset = GrowingDataset(data, fields=fields, split=spec.train_split)
    except Exception as caught:
        error = caught
    ranks.agree(error=error)
    assert dataset is not None
    return dataset


class Arrivals:
    """The decisions: from which step on the training knows how much. `advance` is a collective of the main thread;
    `seq_of` may be asked by another thread, and waits."""

    def __init__(
        self, spec: TrainSpec, data: Path, out: Path, ranks: Ranks, online: Online, *, stop: Callable[[], bool]
    ) -> None:
        self.online, self.stop = online, stop
        self._spec, self._ranks = spec, ranks
        self._mark = out / ALL_ARRIVED_NAME
        self._told = threading.Condition()
        self._closed = False
        self._log: ArrivalLog | None = None
        self._look_at: GrowingDataset | None = None
        if ranks.is_first:
            self._look_at = GrowingDataset(data, fields=(), split=spec.train_split)
        self.entries: list[list[int]] = ranks.from_first(lambda: self._open(out))
        if self._log is not None:
            self._log.entries = self.entries  # one list, here and in the log
        self.decided = self.entries[-1][0] + 1 if self.entries else 0
        self.waiting: Callable[[], int] = lambda: 0
        self.reuse: Callable[[], dict[int, int]] = dict

    def _open(self, out: Path) -> list[list[int]]:
        """The log of this training; that of one to be done again is copied first."""
        dataset, spec, path = self._look_at, self._spec, out / ARRIVALS_NAME
        assert dataset is not None
        dataset.refresh()
        own = {"dataset_id": dataset.dataset_id, "split": spec.train_split, "seed": spec.seed, "batch": spec.batch}
        header = {**own, **self.online.settings.to_json()}
        self._log = ArrivalLog(path, header)
        if self.online.replay is not None:
            then = read_log(self.online.replay)
            refuse_difference(self.online.replay, then["header"], header)
            for told in then["arrived"][len(self._log.entries) :]:
                facts = {key: told[key] for key in ("samples", "shards_digest") if key in told}
                self._log.append(int(told["step"]), int(told["seq"]), **facts)
        self._check_shards(dataset, path)
        return self._log.entries

    def _check_shards(self, dataset: GrowingDataset, path: Path) -> None:
        """The shards that the log speaks of are those of the data set now."""
        source = self.online.replay or path
        told = [e for e in read_log(source)["arrived"] if "shards_digest" in e]
        if told and (now := dataset.digest_until(told[-1]["seq"])) != told[-1]["shards_digest"]:
            raise UsageError(
                f"{source}: the shards up to line {told[-1]['seq']} of the manifest were others then "
                f"({told[-1]['samples']} samples then, {dataset.n_arrived(told[-1]['seq'])} now; {now}): some were "
                + (
                    "taken out or replaced since, so that it cannot be done again"
                    if self.replaying
                    else f"taken out or replaced since. Remove {path.parent} to train again on those that are there"
                )
            )

    @property
    def replaying(self) -> bool:
        return self.online.replay is not None

    def begin(self) -> int:
        """Waits until the first step is allowed; the line of the manifest that it knows."""
        if not self.advance(0, ahead=0, last=1):
            raise InterruptedRunError("stopped before the first step; the same command goes on")
        return self.entries[0][1]

    def advance(self, step: int, *, ahead: int, last: int | None) -> bool:
        """Decides on `step` and up to `ahead` more, of `last` in all. False when a rank wants to stop meanwhile."""
        want = step + 1 + ahead if last is None else min(step + 1 + ahead, last)
        while True:
            if want > self.decided:
                # all ranks come here or none: they hold the same number of decisions
                decided, seq = self._ranks.from_first(lambda: self._look(want))
                with self._told:
                    if decided > self.decided and not self._ranks.is_first and self._new(seq):
                        self.entries.append([self.decided, seq])
                    self.decided = decided
                    self._told.notify_all()
            if self.decided > step:
                return True
            if self._ranks.agree(stop=self.stop()).stop:
                return False
            time.sleep(_POLL_S)

    def _new(self, seq: int) -> bool:
        return not self.entries or self.entries[-1][1] != seq

    def go_on(self, step: int) -> None:
        """From a checkpoint after `step` steps: what those knew is decided, also where no line says so."""
        self.decided = max(self.decided, step)

    def _look(self, want: int) -> tuple[int, int]:
        """On rank 0: (steps decided from now on, the line that the new ones know)."""
        assert self._look_at is not None
        assert self._log is not None
        if self.replaying:
            return want, self.entries[-1][1]
        ended = self._mark.exists()  # before the look at the manifest: what it lacks then will not come
        seq = self._look_at.refresh(at_once=ended)
        arrived = self._look_at.n_arrived(seq)
        if ended and arrived == 0:
            raise UsageError(f"{self._look_at.root}: the campaign has ended without a sample for training")
        if not (self.decided or ended or arrived >= self.online.settings.watermark):
            return 0, seq
        allowed = steps_allowed(self.online.settings, batch=self._spec.batch, arrived=arrived, ended=ended)
        if allowed is not None and self.waiting():  # only steps make room for those that wait
            allowed = max(allowed, self.decided + 1)
        decided = want if allowed is None else min(want, max(allowed, self.decided))
        if decided > self.decided and self._new(seq):
            digest = self._look_at.digest_until(seq)
            self._log.append(self.decided, seq, samples=arrived, shards_digest=digest)
        return decided, seq

    def may_validate(self) -> bool:
        """Whether the validation split is there, as far as it ever will be. A collective of the main thread."""
        return self._ranks.from_first(self._validation_is_there)

    def _validation_is_there(self) -> bool:
        assert self._look_at is not None
        ended = self.replaying or self._mark.exists()  # before the look at the manifest
        self._look_at.refresh(at_once=ended)
        val = sum(s.n for s in self._look_at.data.manifest.shards if s.split == self._spec.val_split)
        return may_validate(val=val, val_planned=self.online.val_planned, ended=ended)

    def seq_of(self, step: int) -> int:
        """The line that `step` knows; waits until that is decided. InterruptedRunError when it never will be."""
        with self._told:
            self._told.wait_for(lambda: self._closed or self.decided > step)
            if self.decided <= step:
                raise InterruptedRunError("the training has ended")
            return next(seq for first, seq in reversed(self.entries) if first <= step)

    def known(self, step: int) -> int | None:
        """Samples that had arrived for `step`, where this rank counts them."""
        return None if self._look_at is None else self._look_at.n_arrived(self.seq_of(step))

    def finish(self, step: int) -> None:
        """On rank 0: no step follows."""
        if self._log is not None:
            self._log.finish(step)

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._told:
            self._closed = True
            self._told.notify_all()


def open_arrivals(
    spec: TrainSpec, data: Path, out: Path, ranks: Ranks, online: Online, stop: Callable[[], bool]
) -> Arrivals:
    """Every rank calls it; what rank 0 cannot open, none trains on."""
    return Arrivals(spec, data, out, ranks, online, stop=stop)


def reservoir_sampler(spec: TrainSpec, dataset: GrowingDataset, plan: DataPlan, arrivals: Arrivals) -> ReservoirSampler:
    """The order of samples, told by `arrivals`."""
    return ReservoirSampler(
        dataset,
        rank=plan.rank,
        world_size=plan.size,
        global_batch=spec.batch,
        seed=spec.seed,
        capacity=arrivals.online.settings.capacity,
        watermark=arrivals.online.settings.watermark,
        decide=arrivals.seq_of,
        log=arrivals.entries,
        backpressure=not arrivals.replaying,
        wait_s=spec.engine.timeout_s,
    )


def whole_measure(early: Any, whole: Any) -> Any:
    """`early` standardises, since the network learnt so; what else is said of the training set is that of `whole`."""
    prepared = replace(early.preprocessing, trained=whole.preprocessing.trained)
    return replace(early, preprocessing=prepared, mean_image_V=whole.mean_image_V)


def gated(batches: Iterator[Any], advance: Callable[[], bool]) -> Iterator[Any]:
    """Each batch after `advance`; None where that says that a rank wants to stop."""
    while True:
        yield next(batches) if advance() else None
