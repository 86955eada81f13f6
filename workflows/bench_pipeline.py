"""`exitwave bench pipeline`: the line timed by its parts, beside a bare simulation and a plain training loop.

Each round runs `exitwave run` on a small pipeline into a new folder, one worker and one rank, each on one thread; then
a bare loop over the same samples of the same simulator, nothing kept; then the training loop that one writes by hand,
on the data set that the line made. Rounds take turns, so that a busy moment of the machine falls on all.

What is compared are rates once each has begun: the campaign's between its first shard and its last, beside the bare
loop's after the same number of samples; the median step, beside the plain loop's. What beginning costs (processes,
imports, compiled kernels, measuring the training set) stands in the parts' seconds and in the time to the first step:
in a line of a minute it is a good part, in one of days it is nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import ExitwaveError
from exitwave.ingest.events import read_events

__all__ = ["PARTS", "bench_pipeline", "document_of", "round_of"]

PARTS = ("simulate", "stage", "train", "evaluate", "report")
_STEPS = 60
PIPELINE = """\
name: bench
ranks: 1
cluster: {kind: local, workers: 1}
campaign:
  name: bench
  seed: 7
  structures:
    - library: [Al, Cu, Au, Si]
      split: train
    - {library: [Ag], split: val}
    - {library: [Pt], split: test}
  samples_per_structure: SAMPLES
  samples_per_shard: 4
  cell: {min_extent_A: 26.7}
  sampling:
    energy_keV: {choice: [100, 200]}
    semiangle_mrad: 12
    thickness_A: {uniform: [20, 60]}
    scan_origin: random
  scan: {shape: [8, 8], step_A: 0.5}
  grid: {sampling_A: 0.25, max_gpts: 128, slice_thickness_A: 2.0}
  detector: {shape: [32, 32], max_q_per_A: 1.2}
  label: {shape: [32, 32], blur_A: 0.4}
train:
  model: {preset: tiny}
  batch: 8
  steps: STEPS
  deterministic: false
  optimizer: {warmup_steps: 5}
  checkpoint: {every_steps: 20}
  trackers: []
"""
# the campaign's rate over the bare loop's; the step over the plain loop's
_TARGETS = {"campaign": 0.97, "step": 1.02}


def bench_pipeline(*, full: bool = False, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The benchmark's JSON document: {"bench", "machine", "rows", "targets", "rounds"}. `full`: more rounds, larger."""
    rounds, samples, steps = (4, 24, 2 * _STEPS) if full else (2, 8, _STEPS)
    found = []
    with tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        for number in range(rounds):
            note(f"round {number + 1} of {rounds}: the line, a bare simulation, a plain training loop")
            found.append(_one_round(Path(folder) / str(number), samples, steps))
    return document_of(found)


def _one_round(folder: Path, samples: int, steps: int) -> dict[str, Any]:
    from exitwave.simulate.bench import machine

    folder.mkdir()
    pipeline, run = folder / "bench.yaml", folder / "run"
    pipeline.write_text(PIPELINE.replace("SAMPLES", str(samples)).replace("STEPS", str(steps)))
    began = time.time()
    _run("the line", ["exitwave.workflows", "run", str(pipeline), "--out", str(run), "--quiet"])
    ended = time.time()
    bare = _run("the bare simulation", ["exitwave.workflows.bench_bare", str(pipeline)])
    plain = _run("the plain loop", ["exitwave.train.bench_plain", str(run / "dataset"), str(run / "train"), str(steps)])
    events = {
        name: read_events(path / "events.jsonl")
        for name, path in (("line", run), ("campaign", run / "dataset"), ("training", run / "train"))
    }
    return {
        **round_of(events, began=began, ended=ended),
        "bare_samples_per_s": json.loads(bare)["samples_per_s"],
        "bare_s": json.loads(bare)["seconds"],
        "plain_step_s": json.loads(plain)["step_s"],
        "plain_first_step_s": json.loads(plain)["first_step_s"],
        "machine": machine(),
    }


def _run(what: str, command: Sequence[str]) -> str:
    """stdout of a module run on one thread. Raises ExitwaveError with what it said."""
    from exitwave.workflows.config import child_environment

    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=child_environment(**one)
    )
    if done.returncode != 0:
        raise ExitwaveError(f"bench pipeline: {what} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def round_of(events: Mapping[str, Sequence[Mapping[str, Any]]], *, began: float, ended: float) -> dict[str, Any]:
    """What the logs of one line say. `began`, `ended`: of the whole command, as they count time.

    Rates are those after the first shard and after the first two steps.
    """
    seconds = {part: 0.0 for part in PARTS}
    for event in events["line"]:
        if event["kind"] == "part_finished":
            seconds[event["part"]] += event["seconds"]
    shards = [event for event in events["campaign"] if event["kind"] == "shard_committed"]
    took = shards[-1]["t"] - shards[0]["t"]
    steps = [event for event in events["training"] if event["kind"] == "train_step"]
    staged = next(event for event in events["line"] if event["kind"] == "staged")
    return {
        "seconds": seconds,
        "total_s": ended - began,
        "samples": sum(event["n"] for event in shards),
        "samples_per_s": sum(event["n"] for event in shards[1:]) / took,
        "bytes": staged["bytes_copied"],
        "stage_bytes_per_s": staged["bytes_copied"] / max(staged["seconds"], 1e-9),
        "step_s": statistics.median(event["step_s"] for event in steps[2:]),
        "steps": len(steps),
        "first_step_s": steps[0]["t"] - began,
        "first_step_of_training_s": steps[0]["t"]
        - next(e["t"] for e in events["line"] if e["kind"] == "part_started" and e["part"] == "train"),
    }


def document_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and spread over the rounds, and the targets."""

    def row(what: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
        middle = statistics.median(values)
        return {
            "what": what, "unit": unit, "median": round(middle, 4), "least": round(min(values), 4),
            "most": round(max(values), 4),
        }  # fmt: skip

    def of(key: str) -> list[float]:
        return [float(each[key]) for each in rounds]

    rows = [row("the whole line", "s", of("total_s"))]
    rows += [row(part, "s", [each["seconds"][part] for each in rounds]) for part in PARTS]
    rows += [
        row("outside its parts", "s", [each["total_s"] - sum(each["seconds"].values()) for each in rounds]),
        row("campaign, after its first shard", "samples/s", of("samples_per_s")),
        row("bare simulation", "samples/s", of("bare_samples_per_s")),
        row("staging", "MB/s", [each["stage_bytes_per_s"] / 1e6 for each in rounds]),
        row("training step", "s", of("step_s")),
        row("plain loop's step", "s", of("plain_step_s")),
        row("first step of the line, from its start", "s", of("first_step_s")),
        row("first step of the training, from its start", "s", of("first_step_of_training_s")),
        row("first step of the plain loop, from its start", "s", of("plain_first_step_s")),
    ]
    share = [1 - (each["bare_s"] + each["steps"] * each["plain_step_s"]) / each["total_s"] for each in rounds]
    rows.append(row("share of the line that is neither simulation nor steps", "", share))
    campaign = statistics.median(each["samples_per_s"] / each["bare_samples_per_s"] for each in rounds)
    step = statistics.median(each["step_s"] / each["plain_step_s"] for each in rounds)
    targets = [
        {
            "name": "campaign's rate / bare simulation's", "value": round(campaign, 3),
            "target": f">= {_TARGETS['campaign']}", "holds": campaign >= _TARGETS["campaign"],
        },
        {
            "name": "training step / plain loop's", "value": round(step, 3),
            "target": f"<= {_TARGETS['step']}", "holds": step <= _TARGETS["step"],
        },
    ]  # fmt: skip
    machine = rounds[-1]["machine"]
    kept = [{key: value for key, value in each.items() if key != "machine"} for each in rounds]
    return {"bench": "pipeline", "machine": machine, "rows": rows, "targets": targets, "rounds": kept}
