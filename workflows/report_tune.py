"""What a report says of a search: the sentence, the table of trials, the drawings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.events import read_events
from exitwave.ingest.files import read_plain_text
from exitwave.ingest.manifest import MANIFEST_NAME
from exitwave.workflows.progress import human_seconds
from exitwave.workflows.report_data import Picture, ReportData, StudyView, number
from exitwave.workflows.report_facts import provenance, simulation_rates
from exitwave.workflows.tune_figures import curves_png, history_png, parallel_png, slices_png
from exitwave.workflows.tune_record import Study, Trial, best_trial, counts, fold
from exitwave.workflows.tune_spec import TuneSpec
from exitwave.workflows.tune_status import read_search

__all__ = ["gather_study"]


def gather_study(folder: Path) -> ReportData:
    """What there is to say of a search, also while it runs. Raises UsageError where tune.yaml is damaged."""
    path = folder / "tune.yaml"
    configuration = read_plain_text(path, errors="replace")
    resolved, tune = read_search(folder)
    study = fold(read_events(folder / "events.jsonl"))
    best = best_trial(study.trials, maximize=tune.objective.maximize)
    dataset = folder / "dataset"
    there = (dataset / MANIFEST_NAME).exists()
    simulated = read_events(dataset / "events.jsonl") if there else []
    data = open_dataset(dataset) if there else None
    return ReportData(
        title=str(resolved.get("name") or folder.name),
        kind="study",
        sentence=_sentence(tune, study, best),
        good=None if best is None else True,
        badge="Found" if best is not None else "",
        figures=_figures(tune, study, best),
        study=_view(tune, study, best),
        rates=[*simulation_rates(simulated), *_rates(study)],
        provenance=provenance(folder, data, simulated, [], configuration),
        configuration=configuration,
    )


def _sentence(tune: TuneSpec, study: Study, best: Trial | None) -> str:
    found = counts(study)
    told = ", ".join(f"{n} {state}" for state, n in found.items() if n) or "none has begun"
    if best is None:
        return f"Of {tune.trials} trials none is finished yet ({told})."
    values = ", ".join(f"{key.removeprefix('train.')} = {_shown(value)}" for key, value in best.values.items())
    return (
        f"Of {len(study.trials)} trials ({told}), trial {best.number} is the best, with {tune.objective.metric} "
        f"{number(best.value)} on the validation split: {values}."
    )


def _figures(tune: TuneSpec, study: Study, best: Trial | None) -> list[tuple[str, str]]:
    figures = []
    done = sorted(float(t.value) for t in study.trials if t.state == "finished" and t.value is not None)
    if best is not None:
        figures.append((number(best.value), f"{tune.objective.metric} of the best trial, number {best.number}"))
        figures.append((number(done[len(done) // 2]), f"the median of {len(done)} finished trials"))
    found = counts(study)
    figures.append((f"{len(study.trials) - found['running']} of {tune.trials}", "trials have ended"))
    whole = sum(len(t.reports) for t in study.trials)
    full = tune.budget.validations * (len(study.trials) - found["running"] - found["failed"])
    if found["pruned"] and full:
        figures.append((f"{100 * (1 - whole / full):.0f} %", f"of the training spared by giving up {found['pruned']}"))
    figures.append((human_seconds(study.seconds), "of search"))
    return figures


def _rates(study: Study) -> list[tuple[str, str, str]]:
    done = [t for t in study.trials if t.state == "finished"]
    if not done:
        return []
    mean = sum(t.seconds for t in done) / len(done)
    again = sum(t.attempts - 1 for t in study.trials if t.attempts > 1)
    rows = [("One trial", human_seconds(mean), "to its end, on average")]
    return [*rows, ("Begun again", str(again), "trials that went on from a checkpoint")] if again else rows


def _view(tune: TuneSpec, study: Study, best: Trial | None) -> StudyView:
    trials = study.trials
    pictures = []
    if any(t.state == "finished" for t in trials):
        pictures.append(
            Picture(
                heading="From trial to trial",
                src=history_png(tune, trials),
                alt=f"{tune.objective.metric} of each trial and the best so far; {_best_words(best)}",
            )
        )
    if any(t.reports for t in trials):
        pictures.append(
            Picture(
                heading="Learning curves",
                src=curves_png(tune, trials, best),
                alt=f"Validation loss of {len(trials)} trials, {counts(study)['pruned']} of which were given up",
                note="A cross: the trial was given up there.",
            )
        )
    if sum(t.state == "finished" for t in trials) > 1:
        pictures.append(
            Picture(
                heading="Each key for itself",
                src=slices_png(tune, trials),
                alt="Value of each finished trial against each searched key",
                note="Dark trials are early ones, light ones came late.",
            )
        )
        if len(tune.space) > 1:
            pictures.append(
                Picture(
                    heading="All keys together",
                    src=parallel_png(tune, trials),
                    alt="Parallel coordinates of the finished trials",
                    note="A line is a finished trial, the lighter the better; the thick one is the best.",
                )
            )
    most = max(study.importance.values(), default=0.0) or 1.0
    return StudyView(
        keys=["Trial", tune.objective.metric, *(k.removeprefix("train.") for k in tune.space), "step", "time", "state"],
        rows=[(t.state, _row(tune, t)) for t in _ordered(tune, trials)],
        pictures=pictures,
        metric="validation loss" if tune.objective.metric == "loss" else f"{tune.objective.metric} on validation",
        importance=[
            (key.removeprefix("train."), f"{100 * share:.0f} %", f"{max(100 * share / most, 0.4):.1f}")
            for key, share in study.importance.items()
        ],
    )


def _best_words(best: Trial | None) -> str:
    return "none is finished" if best is None else f"the best is trial {best.number} with {number(best.value)}"


def _ordered(tune: TuneSpec, trials: Sequence[Trial]) -> list[Trial]:
    """Finished ones from the best to the worst, then the others by what they reached."""
    sign = -1.0 if tune.objective.maximize else 1.0
    order = {"finished": 0, "running": 1, "pruned": 2, "failed": 3}

    def place(trial: Trial) -> tuple[int, float, int]:
        last = trial.reports[max(trial.reports)] if trial.reports else math.inf
        value = sign * trial.value if trial.state == "finished" and trial.value is not None else last
        return order[trial.state], value if math.isfinite(value) else math.inf, trial.number

    return sorted(trials, key=place)


def _row(tune: TuneSpec, trial: Trial) -> list[str]:
    value = number(trial.value, 4) if trial.state == "finished" else ""
    if trial.state in ("pruned", "running") and trial.reports:
        value = f"({number(trial.reports[max(trial.reports)], 4)})"
    why = f"{trial.failure}: {trial.why}" if trial.state == "failed" else ""
    if trial.ranks > 1:
        why = f"{trial.ranks} ranks. {why}".strip()
    shown = [_shown(trial.values[key]) for key in tune.space]
    return [str(trial.number), value, *shown, str(trial.step or ""), human_seconds(round(trial.seconds, 1)), why]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value)
