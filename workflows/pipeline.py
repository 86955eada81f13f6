"""`exitwave run`: simulate -> stage -> train -> evaluate -> report, in one folder, resumable at any point.

    RUN/pipeline.yaml   the resolved configuration: the folder's identity
        dataset/        the data set            cache/      its staged shards
        train/          the training's folder   report.html
        rounds/         who judged the rounds of an adaptive campaign (adaptive.py)
        events.jsonl    which part began and ended when

No state of our own says what is done: each part's completion is read from its own truth. The manifest lists the plan's
shards; staging knows what is ready; model.pt is there only after the last step; metrics.json only after an evaluation.
So whatever killed a run, and wherever, the same command finds what is left to do.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.files import write_atomic
from exitwave.simulate.live import LiveStatus
from exitwave.simulate.plan import Plan
from exitwave.train.spec import TrainSpec
from exitwave.workflows.campaigns import Planned, plan_campaign, run_planned, tell_warnings
from exitwave.workflows.config import (
    Document,
    apply_overrides,
    differences,
    dump_yaml,
    is_pipeline,
    load_document,
    parse_bytes,
    read_resolved,
    resolved_comment,
    validate,
)
from exitwave.workflows.launch import evaluate_run, locked, start_ranks
from exitwave.workflows.pipeline_spec import PipelineSpec
from exitwave.workflows.progress import human_bytes, human_seconds
from exitwave.workflows.provenance import git_commit, versions
from exitwave.workflows.session import Session
from exitwave.workflows.staging import StageChoices, stage_dataset

__all__ = ["read_pipeline", "run_pipeline"]

_OURS = (
    "report.html",
    "events.jsonl",
    "train",
    "rounds",
    "cache",
    "dataset",
    "pipeline.yaml",
)  # the identity goes last
# where, with how many processes, another verb: may change between attempts
_WHERE_NOT_WHAT = ("cluster", "ranks", "stage", "launch", "tune", "online")


def read_pipeline(path: Path, overrides: Sequence[str] = ()) -> tuple[Document, PipelineSpec]:
    """Read and check a pipeline. Raises UsageError naming file, line and key of every fault."""
    document = load_document(path)
    if not is_pipeline(document):
        raise UsageError(
            f"{path}: a pipeline is expected, with `campaign:` and `train:` sections; `exitwave init "
            "quickstart.yaml` writes "
            "one. (A campaign alone is run by `exitwave simulate`.)"
        )
    apply_overrides(document, overrides)
    return document, validate(document, PipelineSpec)


def run_pipeline(
    session: Session,
    path: Path,
    out: Path,
    *,
    cluster: str | None,
    workers: int | None,
    ranks: int | None,
    nodes: int | None = None,
    fresh: bool,
    overrides: Sequence[str],
    online: bool = False,
) -> dict[str, Any]:
    """Do what is left to do; returns what came of it. `online`: train while the campaign runs."""
    document, spec = read_pipeline(path, overrides)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: this is a file; --out names a folder.")
    nodes = nodes or spec.launch.nodes
    if online and nodes is not None:
        raise UsageError("--online: it trains on this machine; leave --nodes and launch.nodes out.")
    began = time.monotonic()
    planned = plan_campaign(document, spec.campaign, ("campaign",), session=session)
    planned = dataclasses.replace(planned, section=spec.cluster)
    if online:
        _refuse_unfit_for_online(spec, planned)
    _refuse_foreign(out)
    with locked(out):
        resumed = _claim(out, spec, fresh=fresh)
        _refuse_the_other_way(out / "train", spec.train, online=online)
        log = EventLog(out / "events.jsonl")
        log.emit("pipeline_started", name=spec.name, resumed=resumed)
        if resumed:
            session.note(f"Going on with {out}: what is done already is not done again.")
        with LiveStatus(out / "dataset") as live, session.progress() as feed:
            line = _Line(
                session=session, log=log, feed=feed, live=live, out=out, spec=spec, planned=planned, online=online,
                nodes=nodes,
            )  # fmt: skip
            where = cluster or spec.cluster.kind, planned.workers_on(cluster or spec.cluster.kind, workers)
            if online:
                failed = line.side_by_side(*where, ranks or spec.ranks)
            else:
                failed = line.simulate(*where) if spec.adaptive is None else line.rounds(*where, ranks or spec.ranks)
                line.stage()
                line.train(ranks or spec.ranks)
            line.judge()
            metrics = line.evaluate()
        report = line.report()
        seconds = time.monotonic() - began
        log.emit("pipeline_finished", seconds=round(seconds, 3), failed=failed)
    return _document(out, report, metrics, failed=failed, seconds=seconds)


@dataclass(kw_only=True)
class _Line:
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
        trained = _trained(self.run, self.spec.train)
        if trained:
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
        return both.run(cluster=cluster, workers=workers, ranks=ranks, simulated=simulated, trained=trained)

    def rounds(self, cluster: str, workers: int | None, ranks: int) -> int:
        """An adaptive campaign, round by round; returns how many shards failed for good."""
        from exitwave.workflows.adaptive import FOLDER, Hands, run_rounds

        def simulate(plan: Plan) -> int:
            self.planned = dataclasses.replace(self.planned, plan=plan)
            return self.simulate(cluster, workers)

        def train(spec: TrainSpec, run: Path) -> None:
            self.stage()
            if not _trained(run, spec):
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
        if _trained(self.run, self.spec.train):
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
            path = self.run / f"metrics-{split}.json"
            if path.exists() and path.stat().st_mtime_ns >= (self.run / "model.pt").stat().st_mtime_ns:
                metrics = json.loads(path.read_text())
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


def _refuse_the_other_way(run: Path, spec: TrainSpec, *, online: bool) -> None:
    """A training that has begun keeps its order of samples; said now, and not when the campaign is over."""
    try:
        before = json.loads((run / "train.json").read_text())
    except (OSError, ValueError):
        return
    began = before.get("online") is not None
    if began != online and not _trained(run, spec):
        raise UsageError(
            f"{run.parent}: its training began {'with' if began else 'without'} --online and goes on so. Give the same "
            f"command {'with' if began else 'without'} it, or --fresh to start again."
        )


def _refuse_unfit_for_online(spec: PipelineSpec, planned: Planned) -> None:
    """UsageError, before anything is made, for a pipeline whose training cannot begin early."""
    from exitwave.train.online import refuse_unfit
    from exitwave.workflows.online_spec import OnlineSection, settings_of

    if spec.adaptive is not None:
        raise UsageError("--online: the rounds of an adaptive campaign are trained between, not beside; leave one out")
    refuse_unfit(spec.train)
    settings_of(spec.online or OnlineSection(), planned.plan, spec.train)


def _committed(dataset: Path, wanted: set[str]) -> int:
    """How many of the wanted shards the manifest lists."""
    from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest

    if not (dataset / MANIFEST_NAME).exists():
        return 0
    return len(wanted & {shard.shard_id for shard in load_manifest(dataset).shards})


def _trained(run: Path, spec: TrainSpec) -> bool:
    try:
        identity = json.loads((run / "train.json").read_text())
    except (OSError, ValueError):
        return False
    return (run / "model.pt").exists() and identity.get("spec") == spec.canonical()


def _refuse_foreign(out: Path) -> None:
    """A folder with other people's files is never written into."""
    if (out / "pipeline.yaml").exists() or not out.exists():
        return
    others = sorted(p.name for p in out.iterdir() if not p.name.startswith("."))
    if others:
        raise UsageError(
            f"{out}: this folder was not made by `exitwave run` (no pipeline.yaml in it, but "
            f"{', '.join(others[:3])}). Give "
            "another --out."
        )


def _claim(out: Path, spec: PipelineSpec, *, fresh: bool) -> bool:
    """Make the folder this pipeline's; returns whether it already was. Called under the folder's lock.

    Raises UsageError with the difference when it belongs to another configuration.
    """
    path = out / "pipeline.yaml"
    now = _resolved(spec)
    if path.exists() and fresh:
        for name in _OURS:
            _remove(out / name)
    if path.exists():
        before = _read_again(path)
        changed = differences(_what(before), _what(now))
        if changed:
            lines = "\n  ".join(changed)
            raise UsageError(
                f"{out}: was made with another configuration:\n  {lines}\nGive another --out, or --fresh to "
                "delete what is "
                "there and start again."
            )
        resumed = True
    else:
        resumed = False
    made = {**versions(), "commit": git_commit() or "unknown"}
    write_atomic(path, dump_yaml(now, comment=resolved_comment("A pipeline", made)).encode())
    return resumed


def _resolved(spec: PipelineSpec) -> dict[str, Any]:
    """Every default filled in; of a structure only what it says (the other kinds of source are no defaults)."""
    data: dict[str, Any] = json.loads(json.dumps(spec.model_dump(mode="json")))
    structures = data["campaign"]["structures"]
    data["campaign"]["structures"] = [{k: v for k, v in s.items() if v not in (None, [], "")} for s in structures]
    return {key: value for key, value in data.items() if value is not None}  # a section that is not there


def _read_again(path: Path) -> dict[str, Any]:
    """What an earlier attempt resolved, with the defaults of keys that came since; as it stands where it is no pipeline
    to this version."""
    try:
        return _resolved(validate(load_document(path), PipelineSpec))
    except UsageError:
        return read_resolved(path)


def _what(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in configuration.items() if key not in _WHERE_NOT_WHAT}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _document(out: Path, report: Path, metrics: Mapping[str, Any], *, failed: int, seconds: float) -> dict[str, Any]:
    figures = metrics.get("metrics", {})
    words = ""
    if metrics.get("task") == "classify":
        words = ", ".join(f"{name} {value['top1']:.3g}" for name, value in figures.items())
        words = f"Top-1 on split {metrics.get('split')}: {words}.\n"
    elif figures.get("model") and figures.get("mean"):
        others = ", ".join(
            f"{name} {figures[key]['rmse_VA']:.3g}"
            for key, name in (("idpc", "iDPC"), ("mean", "mean image"))
            if key in figures
        )
        words = f"RMSE on split {metrics.get('split')}: network {figures['model']['rmse_VA']:.3g} V·Å ({others}).\n"
    lost = f"{failed} shards failed: `exitwave failures {out / 'dataset'}`.\n" if failed else ""
    return {
        "run": str(out),
        "report": str(report),
        "seconds": round(seconds, 3),
        "failed": failed,
        "exit_code": 3 if failed else 0,
        "evaluate": dict(metrics),
        "message": f"{words}{lost}Done in {human_seconds(seconds)}. Open {report}",
    }
