"""`exitwave tune`: one data set, many trials, the best of them.

    STUDY/tune.yaml       the resolved configuration: the folder's identity
        dataset/          the data set, simulated once (with --data: somebody else's, and not here)
        trials/<n>/       each trial's RUN, as `exitwave train` makes it
        events.jsonl      what happened: the truth about the trials (`tune_record`)
        best.yaml         the pipeline with the best trial's values
        report.html

The same command goes on where it was, whatever ended it. More trials may be asked for; another search is refused.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.files import write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.lease import lease_holder
from exitwave.train.spec import TrainSpec
from exitwave.workflows.campaigns import Planned, default_workers, plan_campaign, run_planned, tell_warnings
from exitwave.workflows.config import Document, apply_overrides, load_document, validate
from exitwave.workflows.datasets import completeness, find_dataset, require_split
from exitwave.workflows.launch import locked
from exitwave.workflows.pipeline_spec import PipelineSections
from exitwave.workflows.progress import human_seconds
from exitwave.workflows.provenance import git_commit, versions
from exitwave.workflows.resolved import differences, dump_yaml, resolved_comment
from exitwave.workflows.session import Session
from exitwave.workflows.tune_loop import StudyLoop
from exitwave.workflows.tune_record import Study, Trial, best_trial, counts, fold
from exitwave.workflows.tune_sampler import importance, require_optuna
from exitwave.workflows.tune_space import trial_spec
from exitwave.workflows.tune_spec import TuneSpec
from exitwave.workflows.tune_status import read_search

__all__ = ["read_study", "tune_pipeline"]

_WHERE_NOT_WHAT = ("cluster", "ranks", "stage", "launch", "evaluate", "adaptive", "online", "data")
_FILES = ("cif", "ase_db", "index")  # keys of a structure that name files, from the folder of the pipeline
_OWN_FAILURES = ("diverged", "configuration")  # answers to the question that was asked, and no damage


def tune_pipeline(
    session: Session,
    path: Path,
    out: Path,
    *,
    data: Path | None,
    cluster: str | None,
    workers: int | None,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Do what is left to do; returns what came of it."""
    document, sections = read_study(path, overrides, needs_campaign=data is None)
    require_optuna()
    kind = cluster or sections.cluster.kind
    n = workers or (sections.cluster.workers if kind == sections.cluster.kind else None)
    planned = None
    if data is None:
        assert sections.campaign is not None
        planned = plan_campaign(document, sections.campaign, ("campaign",), session=session)
        planned = dataclasses.replace(planned, section=sections.cluster)
    else:
        data = find_dataset(data)
    _refuse_foreign(out)
    with locked(out):
        _claim(out, sections, data)
        with session.progress() as feed:
            if planned is not None:
                data = out / "dataset"
                if fold(read_events(out / "events.jsonl")).trials and (data / MANIFEST_NAME).exists():
                    session.note("simulate: the trials so far share what is committed, and so will the others")
                else:
                    _simulate(session, planned, data, cluster=kind, workers=n, feed=feed)
            assert data is not None
            study = _search(session, sections, out, data, cluster=kind, workers=n, feed=feed)
        return _finish(out, sections, study, folder=document.folder)


def read_study(
    path: Path, overrides: Sequence[str] = (), *, needs_campaign: bool = True
) -> tuple[Document, PipelineSections]:
    """Read and check a pipeline with a `tune:` section. UsageError naming file, line and key of every fault."""
    document = load_document(path)
    apply_overrides(document, overrides)
    sections = validate(document, PipelineSections)
    if sections.tune is None:
        raise UsageError(
            f"{document.source}: no `tune:` section: it says what to search (tune.space), how many trials "
            "(tune.trials) and how long each of them trains (tune.budget). `exitwave tune --help` shows one."
        )
    if needs_campaign and sections.campaign is None:
        raise UsageError(
            f"{document.source}: no `campaign:` section to simulate a data set from; --data DATASET names one that is "
            "there."
        )
    return document, sections


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: this is a file; --out names a folder.")
    if not out.exists() or (out / "tune.yaml").exists():
        return
    others = sorted(p.name for p in out.iterdir() if not p.name.startswith("."))
    if others:
        raise UsageError(
            f"{out}: this folder was not made by `exitwave tune` (no tune.yaml in it, but {', '.join(others[:3])}). "
            "Give another --out."
        )


def _claim(out: Path, sections: PipelineSections, data: Path | None) -> None:
    """Make the folder this search's, or find that it is, with as many trials or fewer. Called under its lock."""
    path, now = out / "tune.yaml", _resolved(sections, data)
    if path.exists():
        before = _read_again(out)
        changed = differences(_what(before), _what(now))
        fewer = before["tune"]["trials"] > now["tune"]["trials"]
        if fewer:
            changed.append(f"tune.trials: was {before['tune']['trials']}, now {now['tune']['trials']}")
        if changed:
            lines = "\n  ".join(changed)
            raise UsageError(
                f"{out}: is another search:\n  {lines}\nOnly tune.trials may grow, and tune.max_seconds change. Give "
                f"another --out for another search; --data {out if data is None else data} lets it share the data set."
            )
    made = {**versions(), "commit": git_commit() or "unknown"}
    where = [] if data is None else [f"On the data set {json.dumps(str(data.absolute()))}."]
    write_atomic(path, dump_yaml(now, comment=[*resolved_comment("A search", made), *where]).encode())


def _read_again(out: Path) -> dict[str, Any]:
    """What an earlier attempt resolved, with the defaults of keys that came since. UsageError where it is damaged."""
    found, _ = read_search(out)
    found.pop("data", None)
    try:
        return _resolved(PipelineSections.model_validate(found), None)
    except ValidationError:
        return found


def _resolved(sections: PipelineSections, data: Path | None) -> dict[str, Any]:
    """Every default filled in; of structures and ranges only what they say."""
    found: dict[str, Any] = json.loads(sections.model_dump_json())
    if data is not None:
        found["campaign"] = None
    elif found["campaign"] is not None:
        structures = found["campaign"]["structures"]
        found["campaign"]["structures"] = [{k: v for k, v in s.items() if v not in (None, [], "")} for s in structures]
    space = found["tune"]["space"]
    found["tune"]["space"] = {key: {k: v for k, v in r.items() if v is not None} for key, r in space.items()}
    return {key: value for key, value in found.items() if value is not None}


def _what(configuration: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: copy.deepcopy(value) for key, value in configuration.items() if key not in _WHERE_NOT_WHAT}
    for name in ("trials", "max_seconds"):
        found.get("tune", {}).pop(name, None)
    return found


def _simulate(
    session: Session,
    planned: Planned,
    dataset: Path,
    *,
    cluster: str,
    workers: int | None,
    feed: Callable[[Mapping[str, Any]], None],
) -> None:
    found = completeness(dataset) if (dataset / "plan.json").exists() else None
    if found is not None and found.committed >= found.planned:
        session.note(f"simulate: all {found.planned} samples are committed")
        return
    tell_warnings(session, planned)
    result = run_planned(session, planned, dataset, cluster=cluster, workers=workers, feed=feed)
    if result.failed:
        session.note(f"{result.failed} shards failed (`exitwave failures {dataset}`); the search uses the others.")
    if session.stop.is_set():
        raise InterruptedRunError(f"{dataset.parent}: stopped before the first trial.")


def _search(
    session: Session,
    sections: PipelineSections,
    out: Path,
    data: Path,
    *,
    cluster: str,
    workers: int | None,
    feed: Callable[[Mapping[str, Any]], None],
) -> Study:
    tune, train = sections.tune, sections.train
    assert tune is not None and train is not None
    require_split(data, train.train_split)
    require_split(data, train.val_split)
    _refuse_growing(data)
    manifest = load_manifest(data)
    dataset_id, samples = manifest.header.dataset_id, manifest.n_samples
    here = workers or default_workers() if cluster == "local" else workers
    made = make_cluster(
        cluster,
        workers=here if cluster in ("local", "inline", "slurm", "cuda") else None,
        slurm=sections.cluster.slurm,
        tls=sections.cluster.tls,
        log_folder=out / ".slurm",
    )
    log = EventLog(out / "events.jsonl")
    loop = StudyLoop(
        out, tune, train, data, made, log, stop=session.stop, one_machine=cluster == "local", feed=feed,
        same_data=lambda: _refuse_other_data(out, data, dataset_id, samples),
    )  # fmt: skip
    if loop.study.trials:
        _refuse_other_data(out, data, loop.study.dataset_id or dataset_id, loop.study.samples or samples)
    if not loop.due():
        session.note("tune: every trial has ended")
        return loop.study
    ended = sum(t.ended for t in loop.study.trials)
    if loop.study.trials:
        session.note(f"Going on with {out}: {ended} of {tune.trials} trials have ended and are not run again.")
    log.emit(
        "study_started", name=sections.name, trials=tune.trials, dataset_id=dataset_id, samples=samples,
        data=str(data.absolute()), cluster=cluster,
    )  # fmt: skip
    try:
        with session.finishing("the trials in hand, each to a checkpoint"):
            return loop.execute()
    except InterruptedRunError as error:
        log.emit("study_interrupted", why=str(error))
        raise


def _refuse_growing(data: Path) -> None:
    """UsageError while a campaign writes into `data`."""
    holder = None
    with contextlib.suppress(OSError):  # of a file system without locks: what grows is noticed before the next trial
        holder = lease_holder(data)
    if holder is not None:
        raise UsageError(
            f"{data}: its campaign is running (host {holder.get('host', '?')}, pid {holder.get('pid', '?')}), and all "
            "trials need the same samples. Give the same command again when it has ended."
        )


def _refuse_other_data(out: Path, data: Path, dataset_id: str, samples: int) -> None:
    """UsageError where `data` is not, or no longer, what trials share; DamagedDataError where some of it is gone.

    What grew is other data: trials before and after could not be compared.
    """
    manifest = load_manifest(data)
    if manifest.header.dataset_id != dataset_id:
        raise UsageError(
            f"{data}: the trials in {out} were trained on another data set ({dataset_id}, not "
            f"{manifest.header.dataset_id})."
        )
    if manifest.n_samples != samples:
        raise UsageError(
            f"{data}: the trials in {out} share its {samples} samples; now it has {manifest.n_samples}, and trials "
            "could not be compared. Give another --out for a search on all of them, when its campaign is finished."
        )
    missing = [shard.path for shard in manifest.shards if not (data / shard.path).exists()]
    if missing:
        raise DamagedDataError(
            f"{data}: {len(missing)} of {len(manifest.shards)} shards are gone ({missing[0]} first). Bring them back, "
            "then the same command goes on."
        )


def _finish(out: Path, sections: PipelineSections, study: Study, *, folder: Path) -> dict[str, Any]:
    """best.yaml, the report, the last line of the log. `folder`: of the pipeline's file."""
    from exitwave.workflows.report import write_report

    tune, train = sections.tune, sections.train
    assert tune is not None and train is not None
    best = best_trial(study.trials, maximize=tune.objective.maximize)
    shares = importance(tune, study.trials)
    log = EventLog(out / "events.jsonl")
    log.emit("study_finished", **counts(study), best=None if best is None else best.number, importance=shares)
    if best is not None:
        made = _best_pipeline(sections, trial_spec(tune, train, best.values), folder)
        head = f"The pipeline with the values of trial {best.number}, the best of {len(study.trials)}"
        long = (
            "It trains as long as a trial did (tune.budget): for more, raise train.steps or set train.epochs instead."
        )
        comment = [*resolved_comment(head, versions()), long]
        write_atomic(out / "best.yaml", dump_yaml(made, comment=comment).encode())
    return _document(out, tune, study, best, write_report(out))


def _best_pipeline(sections: PipelineSections, train: TrainSpec, folder: Path) -> dict[str, Any]:
    """What the pipeline says, with another training; files that it names from `folder` have their whole path."""
    given: dict[str, Any] = json.loads(sections.model_dump_json(exclude_unset=True, exclude={"tune", "train"}))
    for structure in (given.get("campaign") or {}).get("structures", []):
        for key in _FILES:
            if isinstance(structure.get(key), str):
                structure[key] = _whole_path(folder, structure[key])
            elif isinstance(structure.get(key), list):
                structure[key] = [_whole_path(folder, each) for each in structure[key]]
    return {**given, "train": train.canonical()}


def _whole_path(folder: Path, written: str) -> str:
    return str((folder / Path(written).expanduser()).absolute())


def _document(out: Path, tune: TuneSpec, study: Study, best: Trial | None, report: Path) -> dict[str, Any]:
    found = counts(study)
    damaged = [t for t in study.trials if t.state == "failed" and t.failure not in _OWN_FAILURES]
    document: dict[str, Any] = {
        "study": str(out),
        "trials": {"planned": tune.trials, **found},
        "seconds": round(study.seconds, 3),
        "metric": tune.objective.metric,
        "best": None,
        "failures": [
            {"trial": t.number, "state": t.failure, "why": t.why} for t in study.trials if t.state == "failed"
        ],
        "report": str(report),
        "exit_code": 3 if damaged or best is None else 0,
    }
    n = len(study.trials)
    words = [f"{n} trial{'s' * (n != 1)}: " + ", ".join(f"{n} {state}" for state, n in found.items() if n) + "."]
    if best is not None:
        run = out / "trials" / str(best.number)
        document["best"] = {
            "trial": best.number,
            "value": best.value,
            "values": dict(best.values),
            "run": str(run),
            "model": str(run / "model.pt"),
            "configuration": str(out / "best.yaml"),
        }
        values = "\n".join(f"  {key}: {json.dumps(value)}" for key, value in best.values.items())
        words.append(f"Best: trial {best.number}, {tune.objective.metric} {best.value:.4g}, with\n{values}")
        words.append(f"Its model is {run / 'model.pt'}; {out / 'best.yaml'} is its pipeline.")
    else:
        words.append("No trial was finished: there is no best one.")
    if (left := tune.trials - len(study.trials) + found["running"]) > 0:
        words.append(
            f"The time (tune.max_seconds: {tune.max_seconds:g}) is over: {left} of {tune.trials} have not ended."
        )
    if found["failed"]:
        worst = next(t for t in study.trials if t.state == "failed")
        words.append(f"{found['failed']} failed, trial {worst.number} first ({worst.failure}): {worst.why}")
    words.append(f"Done in {human_seconds(study.seconds)}. Open {report}")
    document["message"] = "\n".join(words)
    return document
