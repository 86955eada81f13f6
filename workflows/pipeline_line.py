"""The parts of `exitwave run`, in order, and what each finds done already."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import InterruptedRunError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.files import read_plain
from exitwave.simulate.live import LiveStatus
from exitwave.simulate.plan import Plan
from exitwave.train.spec import TrainSpec
from exitwave.workflows.campaigns import Planned, run_planned, tell_warnings
from exitwave.workflows.config import parse_bytes
from exitwave.workflows.launch import evaluate_run, locked, start_ranks
from exitwave.workflows.pipeline_folder import trained
from exitwave.workflows.pipeline_spec import PipelineSpec
from exitwave.workflows.progress import human_bytes
from exitwave.workflows.session import Session
from exitwave.workflows.staging import StageChoices, stage_dataset

__all__ = ["Line"]


@dataclass(kw_only=True)
class Line:
    """The parts, in order. Each says when it is skipped, and records how long it took."""

    session: Session
    log: EventLog
    feed: Callable[[Mapping[str, Any]], None]
    live: LiveStatus
    out: Path
    spec: PipelineSpec
    planned: Planned
    online: bool = False
    nodes: int | None = None  # where trainings are jobs of Slurm

    @property
    def dataset(self) -> Path:
        return self.out / "dataset"

    @property
    def run(self) -> Path:
        return self.out / "train"

    @property
    def capacity(self) -> int | None:
        return None if self.spec.stage.capacity is None else parse_bytes(self.spec.stage.capacity)

    def tell(self, event: Mapping[str, Any]) -> None:
        """An event that is none of the campaign: to the terminal, and to the page beside the campaign."""
        self.feed(event)
        self.live.feed(event)

    def simulate(self, cluster: str, workers: int | None) -> int:
        """Returns how many shards failed for good."""
        total = len(self.planned.plan.tasks)
        missing = total - _committed(self.dataset, {task.shard_id for task in self.planned.plan.tasks})
        if missing == 0:
            self.live.remember()
            self._skip("simulate", f"all {self.planned.plan.n_samples} samples are committed")
            return 0
        if missing < total:
            self.session.note(f"simulate: {total - missing} of {total} shards are committed, {missing} to go")
        tell_warnings(self.session, self.planned)
        with self._part("simulate"):
            result = run_planned(
                self.session, self.planned, self.dataset,
                cluster=cluster, workers=workers, feed=self.feed, live=self.live,
            )  # fmt: skip
        return int(result.failed)

    def side_by_side(self, cluster: str, workers: int | None, ranks: int) -> int:
        """Simulation and training at once; returns how many shards failed for good."""
        from exitwave.workflows.online import OnlineRun
        from exitwave.workflows.online_spec import OnlineSection

        tasks = {task.shard_id for task in self.planned.plan.tasks}
        simulated = _committed(self.dataset, tasks) == len(tasks)
        if simulated:
            self.live.remember()
            self._skip("simulate", f"all {self.planned.plan.n_samples} samples are committed")
        done = trained(self.run, self.spec.train)
        if done:
            self._skip("train", "the model is trained")
        self._skip("stage", "online, shards are read where they are written")
        both = OnlineRun(
            session=self.session,
            planned=self.planned,
            spec=self.spec.train,
            section=self.spec.online or OnlineSection(),
            dataset=self.dataset,
            folder=self.run,
            feed=self.feed,
            live=self.live,
            part=self._part,
        )
        return both.run(cluster=cluster, workers=workers, ranks=ranks, simulated=simulated, trained=done)

    def rounds(self, cluster: str, workers: int | None, ranks: int) -> int:
        """An adaptive campaign, round by round; returns how many shards failed for good."""
        from exitwave.workflows.adaptive import FOLDER, Hands, run_rounds

        def simulate(plan: Plan) -> int:
            self.planned = dataclasses.replace(self.planned, plan=plan)
            return self.simulate(cluster, workers)

        def train(spec: TrainSpec, run: Path) -> None:
            self.stage()
            if not trained(run, spec):
                with self._part("judge"), self._alone(run):
                    self._ranks(spec, run, ranks)

        assert self.spec.adaptive is not None
        assert isinstance(self.planned.plan, Plan)
        hands = Hands(simulate=simulate, train=train, note=self.session.note)
        plan, failed = run_rounds(
            self.planned.plan, self.dataset, self.out / FOLDER, self.spec.adaptive, self.spec.train, hands
        )
        self.planned = dataclasses.replace(self.planned, plan=plan)
        return failed

    def judge(self) -> None:
        """The trained network on the samples that judged the rounds."""
        if self.spec.adaptive is not None:
            from exitwave.workflows.adaptive import FOLDER, judge_final

            assert isinstance(self.planned.plan, Plan)
            judge_final(
                self.planned.plan, self.dataset, self.out / FOLDER, self.run, self.spec.adaptive, self.spec.train
            )

    @property
    def cache(self) -> Path | None:
        return self.out / "cache" if self.nodes is None else None

    def stage(self) -> None:
        if self.nodes is not None:
            self._skip("stage", "each node of the training's job stages to its own disk")
            return
        choices = StageChoices(mode=self.spec.stage.mode, capacity_bytes=self.capacity)
        with self._part("stage"):
            report = stage_dataset(self.session, self.dataset, self.out / "cache", choices, feed=self.tell)
            if report["bytes_copied"] == 0:
                self.session.note(f"stage: all {human_bytes(report['bytes_reused'])} are in the cache already")
            self.log.emit("staged", **{k: report[k] for k in ("bytes_copied", "bytes_reused", "seconds")})

    def train(self, ranks: int) -> None:
        if trained(self.run, self.spec.train):
            for event in read_events(self.run / "events.jsonl"):
                self.live.feed(event)
            self._skip("train", "the model is trained")
            return
        with self._part("train"), self._alone(self.run):
            self._ranks(self.spec.train, self.run, ranks)

    def _alone(self, run: Path) -> AbstractContextManager[None]:
        """No other command trains into `run`; of a job, its first node sees to that."""
        return locked(run) if self.nodes is None else nullcontext()

    def _ranks(self, spec: TrainSpec, run: Path, ranks: int) -> None:
        capacity = self.capacity if self.spec.stage.mode == "stream" else None
        if self.nodes is not None:
            from exitwave.workflows.nodes_submit import node_job, run_job

            job = node_job(
                f"{self.spec.name}-{run.name}", self.spec.launch, spec=spec, data=self.dataset, out=run,
                nodes=self.nodes, ranks=max(ranks, self.nodes), cache=self.spec.launch.cache, cache_capacity=capacity,
            )  # fmt: skip
            run_job(self.session, job, self.tell)
            return
        start_ranks(
            self.session,
            spec,
            self.dataset,
            run,
            ranks=ranks,
            cache=self.cache,
            cache_capacity=capacity,
            fresh=False,
            feed=self.tell,
        )

    def evaluate(self) -> dict[str, Any]:
        """Measures each split; the first one comes last, so that metrics.json is of it."""
        metrics: dict[str, Any] = {}
        for split in reversed(self.spec.evaluate.splits):
            found = _measured(self.run, split, leads=split == self.spec.evaluate.splits[0])
            if found is not None:
                metrics = found
                self._skip("evaluate", f"the metrics of split {split} are there")
            else:
                with self._part("evaluate"):
                    cache = None if self.online else self.cache
                    metrics = evaluate_run(self.session, self.run, self.dataset, split=split, cache=cache)
        return metrics

    def report(self) -> Path:
        from exitwave.workflows.report import write_report

        with self._part("report"):
            return write_report(self.out)

    def _skip(self, part: str, why: str) -> None:
        self.session.note(f"{part}: {why}")
        self.log.emit("part_skipped", part=part, why=why)

    @contextmanager
    def _part(self, part: str) -> Iterator[None]:
        if self.session.stop.is_set():
            self.log.emit("pipeline_interrupted", part=part)
            raise InterruptedRunError(f"{self.out}: stopped before the part `{part}`.")
        self.log.emit("part_started", part=part)
        began = time.monotonic()
        ended = "part_failed"
        try:
            yield
            ended = "part_finished"
        except (InterruptedRunError, KeyboardInterrupt):
            ended = "part_interrupted"
            raise
        finally:
            self.log.emit(ended, part=part, seconds=round(time.monotonic() - began, 3))


def _measured(run: Path, split: str, *, leads: bool) -> dict[str, Any] | None:
    """The metrics of a split, where they are there and of this model; metrics.json is to be of the one that leads.

    A kill, or `exitwave evaluate` of another split since, leaves them apart.
    """
    path = run / f"metrics-{split}.json"
    try:
        content = read_plain(path)
        old = path.stat().st_mtime_ns < (run / "model.pt").stat().st_mtime_ns
        if old or (leads and read_plain(run / "metrics.json") != content):
            return None
        found = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _committed(dataset: Path, wanted: set[str]) -> int:
    """How many of the wanted shards the manifest lists and the disk still has: the campaign makes the others again."""
    from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest
    from exitwave.simulate.campaign_resume import lost_shards

    if not (dataset / MANIFEST_NAME).exists():
        return 0
    shards = [shard for shard in load_manifest(dataset).shards if shard.shard_id in wanted]
    return len(shards) - sum(1 for _ in lost_shards(dataset, shards))
