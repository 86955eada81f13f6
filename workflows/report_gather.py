"""Reads what a report says from a run of `exitwave run`, a run of `exitwave train`, or a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.dataset import Dataset, open_dataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.files import read_object, read_plain_text
from exitwave.ingest.manifest import MANIFEST_NAME
from exitwave.workflows.adaptive_facts import adaptive_facts
from exitwave.workflows.inspecting import structure_rows
from exitwave.workflows.progress import human_bytes, human_seconds
from exitwave.workflows.report_data import Example, ReportData, number
from exitwave.workflows.report_facts import (
    last,
    provenance,
    simulation_rates,
    sound,
    speed,
    stages,
    staging_rates,
    training_rates,
)
from exitwave.workflows.report_scores import headline, key_figures, verdict

__all__ = ["gather"]

Events = Sequence[Mapping[str, Any]]
_MOST_EXAMPLES = 6


def gather(folder: Path) -> ReportData:
    """What there is to say about `folder`. UsageError when it is neither a run nor a data set."""
    if (folder / "pipeline.yaml").exists():
        return _pipeline(folder)
    if (folder / "tune.yaml").exists():
        from exitwave.workflows.report_tune import gather_study

        return gather_study(folder)
    if (folder / "train.json").exists():
        return _training(folder)
    if (folder / MANIFEST_NAME).exists():
        return _dataset(folder)
    if not folder.exists():
        raise UsageError(f"{folder}: no such folder.")
    raise UsageError(
        f"{folder}: nothing to report on: neither a run (pipeline.yaml or train.json) nor a data set ({MANIFEST_NAME})."
    )


def _pipeline(run: Path) -> ReportData:
    events = sound(read_events(run / "events.jsonl"))
    dataset = run / "dataset"
    data = open_dataset(dataset, cache=run / "cache") if (dataset / MANIFEST_NAME).exists() else None
    configuration = read_plain_text(run / "pipeline.yaml", errors="replace")
    return _whole(
        title=_name(configuration) or run.name,
        train=run / "train",
        dataset=dataset if data is not None else None,
        data=data,
        events=events,
        configuration=configuration,
        folder=run,
    )


def _training(run: Path) -> ReportData:
    path = run / "train.yaml"
    configuration = (
        read_plain_text(path, errors="replace")
        if path.exists()
        else read_plain_text(run / "train.json", errors="replace")
    )
    return _whole(
        title=run.name, train=run, dataset=None, data=None, events=(), configuration=configuration, folder=run
    )


def _whole(
    *,
    title: str,
    train: Path,
    dataset: Path | None,
    data: Dataset | None,
    events: Events,
    configuration: str,
    folder: Path,
) -> ReportData:
    evaluation = read_object(train / "metrics.json")
    metrics = {name: scores for name, scores in evaluation.get("metrics", {}).items() if isinstance(scores, dict)}
    train_events = sound(read_events(train / "events.jsonl"))
    simulated = sound(read_events(dataset / "events.jsonl")) if dataset is not None else []
    loss = _curve(train_events)
    structures = structure_rows(data.manifest) if data is not None else []
    split = str(evaluation.get("split", "test"))
    materials = len({s["formula"] for s in structures if s["split"] == split})
    good, badge, _ = verdict(metrics)
    sentence = headline(metrics, n=int(evaluation.get("n", 0)), structures=materials, split=split) or _unfinished(
        train, data
    )
    seconds = stages(events)
    ranks = last(train_events, ("train_started", "train_resumed")).get("world_size")
    return ReportData(
        title=title,
        kind="run",
        sentence=sentence,
        good=good,
        badge=badge,
        figures=_figures(metrics, data, seconds, ranks),
        metrics=metrics,
        metrics_split=split,
        metrics_n=int(evaluation.get("n", 0)),
        metrics_note=_metrics_note(evaluation),
        by_thickness=evaluation.get("by_thickness", ()),
        by_dose=evaluation.get("by_dose", ()),
        examples=_held_out(train / "evaluation.npz", data, split) or _some_samples(data),
        loss=loss,
        validation=[(float(e["step"]), float(e["loss"])) for e in train_events if e["kind"] == "train_eval"],
        structures=structures,
        splits=_splits(data, structures),
        rejected=_rejected(dataset),
        failures=_failures(dataset),
        rates=[
            *simulation_rates(simulated),
            *staging_rates(events),
            *training_rates(train_events),
            *speed(evaluation),
        ],
        stages=seconds,
        provenance=provenance(folder, data, simulated, train_events, configuration),
        configuration=configuration,
        adaptive=adaptive_facts(dataset, folder / "rounds") if dataset is not None else None,
    )


def _dataset(folder: Path) -> ReportData:
    data = open_dataset(folder)
    events = sound(read_events(folder / "events.jsonl"))
    structures = structure_rows(data.manifest)
    path = folder / "campaign.yaml"
    configuration = read_plain_text(path, errors="replace") if path.exists() else ""
    rejected, failures = _rejected(folder), _failures(folder)
    words = f"{len(data)} samples of {len(structures)} structures are committed"
    words += f"; {len(rejected)} rejected" if rejected else ""
    words += f"; {len(failures)} shards failed" if failures else ""
    return ReportData(
        title=data.manifest.header.name or folder.name,
        kind="dataset",
        sentence=words + ".",
        figures=[
            (str(len(data)), "samples"),
            (str(len(structures)), "structures"),
            (human_bytes(data.manifest.nbytes), f"in {len(data.manifest.shards)} shards"),
        ],
        examples=_some_samples(data),
        structures=structures,
        splits=_splits(data, structures),
        rejected=rejected,
        failures=failures,
        rates=simulation_rates(events),
        provenance=provenance(folder, data, events, (), configuration),
        configuration=configuration,
        adaptive=adaptive_facts(folder, None),
    )


# --- pieces ---------------------------------------------------------------------------------------------------------


def _name(configuration: str) -> str:
    for line in configuration.splitlines():
        if line.startswith("name:"):
            return line.partition(":")[2].strip().strip("'\"")
    return ""


def _curve(events: Events) -> list[tuple[float, float]]:
    """Step and loss, each step once: what was trained again after a kill counts as trained the last time."""
    steps: dict[int, float] = {}
    for event in events:
        if event["kind"] == "train_step":
            steps[int(event["step"])] = float(event["loss"])
        elif event["kind"] in ("train_started", "train_resumed"):
            steps = {step: loss for step, loss in steps.items() if step <= int(event["step"])}
    return [(float(step), steps[step]) for step in sorted(steps)]


def _unfinished(train: Path, data: Dataset | None) -> str:
    if (train / "model.pt").exists():
        return "The network is trained; it was not evaluated yet (`exitwave evaluate`)."
    if data is not None and len(data):
        return f"{len(data)} samples are committed; the training has not finished yet."
    return "Nothing is finished yet."


def _figures(
    metrics: Mapping[str, Any], data: Dataset | None, stages: Sequence[tuple[str, float]], ranks: Any
) -> list[tuple[str, str]]:
    figures = key_figures(metrics)
    if data is not None:
        materials = len({s.formula for shard in data.manifest.shards for s in shard.structures})
        figures.append((str(len(data)), f"samples of {materials} materials"))
    if ranks:
        figures.append((str(ranks), "training rank" + "s" * (int(ranks) != 1)))
    if stages:
        figures.append((human_seconds(round(sum(s for _, s in stages))), "of work, all parts together"))
    return figures


def _metrics_note(evaluation: Mapping[str, Any]) -> str:
    notes = []
    dose = evaluation.get("dose_e_per_pattern")
    if dose:
        notes.append(
            f"All methods get the same noisy patterns of {float(dose):,.0f} electrons each".replace(",", " ") + "."
        )
    for key in ("step_note", "edge_note"):
        note = str(evaluation.get(key) or "")
        if note:
            notes.append(note[:1].upper() + note[1:] + ".")
    groups, interval = evaluation.get("groups") or {}, (evaluation.get("rmse_VA_interval_95") or {}).get("model")
    if groups and interval:
        notes.append(
            f"The network's RMSE is {float(interval[0]):.3g} to {float(interval[1]):.3g} V·Å with 95 % confidence over "
            f"{groups['n']} held-out {groups['by']}s."
        )
    if groups.get("anecdotal"):
        notes.append(
            f"Anecdotal: {groups['n']} held-out prototype(s), fewer than five, tell of these alone, not of others."
        )
    if "idpc" in evaluation.get("metrics", {}):
        notes.append("No method sees a sample's mean: it is removed from prediction and truth alike.")
    return " ".join(notes)


def _held_out(path: Path, data: Dataset | None, split: str) -> list[Example]:
    """The examples that the evaluation kept, with the patterns of the data set where it is at hand."""
    if not path.is_file():
        return []
    with np.load(path, allow_pickle=False) as file:
        kept = {name: file[name] for name in file.files}
    rows = {int(uid): i for i, uid in enumerate(data.uids)} if data is not None else {}
    examples = []
    for k, uid in enumerate(kept["uid"]):
        pattern = kept["pattern"][k]
        centre, formula, facts, q = pattern, "sample", _facts_of(kept, k), 1.0
        index = rows.get(int(uid))
        if data is not None and index is not None:
            sample = data[index]
            cbed = sample["cbed"]
            centre, pattern = cbed[cbed.shape[0] // 2, cbed.shape[1] // 2], cbed.mean(axis=(0, 1))
            formula, facts = _formula(data, index), _facts(sample["params"])
            q = float(sample["params"]["Q_sampling_x_per_A"])
        truth = _centred(kept["truth"][k])
        images = {"truth": truth}
        images |= {m: _centred(kept[m][k]) for m in ("model", "idpc", "com", "mean") if m in kept}
        examples.append(
            Example(
                formula=formula,
                uid=int(uid),
                split=split,
                cbed_centre=centre,
                cbed_mean=pattern,
                q_sampling_per_A=q,
                pixel_A=float(kept["potential_sampling_A"][k]),
                images=images,
                facts=facts,
                rmse_VA={m: float(np.sqrt(((i - truth) ** 2).mean())) for m, i in images.items() if m != "truth"},
            )
        )
    return examples[:_MOST_EXAMPLES]


def _centred(image: Any) -> Any:
    image = np.asarray(image, dtype=np.float64)
    return image - image.mean()


def _some_samples(data: Dataset | None) -> list[Example]:
    """The first sample of a few structures, spread over the data set."""
    if data is None or len(data) == 0 or "cbed" not in {f.name for f in data.fields}:
        return []
    first: dict[str, int] = {}
    number = 0
    for shard in data.shards:
        first.setdefault(shard.structures[0].formula if shard.structures else shard.shard_id, number)
        number += shard.n
    indices = list(first.values())
    chosen = [
        indices[i * len(indices) // min(_MOST_EXAMPLES, len(indices))] for i in range(min(_MOST_EXAMPLES, len(indices)))
    ]
    examples = []
    for index in chosen:
        sample = data[index]
        cbed, params = sample["cbed"], sample["params"]
        images = {"truth": np.asarray(sample["potential"], dtype=np.float64)} if "potential" in sample else {}
        examples.append(
            Example(
                formula=_formula(data, index),
                uid=int(sample["uid"]),
                split=data.record_of(index)[0].split,
                cbed_centre=cbed[cbed.shape[0] // 2, cbed.shape[1] // 2],
                cbed_mean=cbed.mean(axis=(0, 1)),
                q_sampling_per_A=float(params["Q_sampling_x_per_A"]),
                pixel_A=float(params["potential_sampling_A"]),
                images=images,
                facts=_facts(params),
            )
        )
    return examples


def _formula(data: Dataset, index: int) -> str:
    record, _ = data.record_of(index)
    number = int(data[index]["params"]["structure"]) if len(record.structures) > 1 else None
    return next((s.formula for s in record.structures if number in (None, s.index)), "sample")


def _facts(params: Any) -> list[tuple[str, str]]:
    axis = " ".join(number(int(v)) for v in params["zone_axis"])
    return [
        ("energy", f"{float(params['energy_keV']):g} keV"),
        ("semi-angle", f"{float(params['semiangle_mrad']):g} mrad"),
        ("defocus", f"{number(round(float(params['defocus_A'])))} Å"),
        ("thickness", f"{float(params['thickness_A']):.0f} Å"),
        ("zone axis", f"[{axis}]"),
    ]


def _facts_of(kept: Mapping[str, Any], k: int) -> list[tuple[str, str]]:
    units = {
        "energy_keV": ("energy", "keV"),
        "semiangle_mrad": ("semi-angle", "mrad"),
        "thickness_A": ("thickness", "Å"),
    }
    return [(name, f"{float(kept[key][k]):.4g} {unit}") for key, (name, unit) in units.items() if key in kept]


def _splits(data: Dataset | None, structures: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    if data is None:
        return []
    samples = Counter[str]()
    for shard in data.manifest.shards:
        samples[shard.split] += shard.n
    names = [n for n in ("train", "val", "test") if n in samples] + sorted(set(samples) - {"train", "val", "test"})
    return [(name, sum(s["split"] == name for s in structures), samples[name]) for name in names]


def _rejected(dataset: Path | None) -> list[dict[str, str]]:
    if dataset is None:
        return []
    rows = read_object(dataset / "plan.json").get("rejected", [])
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [{"source": str(row.get("source")), "why": str(row.get("why"))} for row in rows]


def _failures(dataset: Path | None) -> list[dict[str, Any]]:
    from exitwave.simulate.state import campaign_failures

    if dataset is None or not (dataset / "plan.json").exists():
        return []
    return campaign_failures(dataset)
