"""An adaptive campaign by the command line: real simulation and training, errors that steer, kills."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from line import end, events, exitwave, start, uids_of, wait_until, write_pipeline

from exitwave.ingest import open_dataset
from exitwave.ingest.files import hash_file
from exitwave.simulate.steer_rounds import read_rounds

ADAPTIVE = """\
ranks: 1
adaptive:
  rounds: 2
  samples_per_round: 8
  regions: {structure: each, thickness_A: [12]}
  pool: 3
  judge_steps: 8
"""


def pipeline(folder: Path, *replace: tuple[str, str]) -> Path:
    return write_pipeline(folder, ("ranks: 2\n", ADAPTIVE), *replace)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("adaptive")
    path = pipeline(folder)
    done = exitwave("run", path, "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "round 2 of 2:" in done.stderr
    return path, folder / "run"


@pytest.mark.long
def test_files_say_what_was_simulated_and_why(whole: tuple[Path, Path]) -> None:
    _, run = whole
    rounds = read_rounds(run / "dataset")
    assert [made.number for made in rounds] == [0, 1, 2]
    data = open_dataset(run / "dataset")
    assert {split: len(data.split(split)) for split in ("train", "steer")} == {
        "train": 12 + rounds[1].n_samples + rounds[2].n_samples,
        "steer": 6,
    }
    for made in rounds[1:]:
        errors = json.loads((run / f"rounds/round-{made.number - 1:04d}/errors.json").read_text())
        assert len(errors) == sum(row.n for row in made.cells) == 6
        assert sum(row.share for row in made.cells) == pytest.approx(1)
        assert sum(row.taken for row in made.cells) == made.n_samples
        cost = sum(row.taken * row.cost_s for row in made.cells)
        assert cost == pytest.approx(made.budget_s, rel=0.15)
        committed = set(uids_of(run / "dataset"))
        assert all(uid in committed for pick in made.picks for uid in pick.uids)
    final = json.loads((run / "rounds/final.json").read_text())
    assert len(final["errors"]) == sum(row["n"] for row in final["cells"]) == 6
    held = {uid for pick in rounds[0].picks for uid in pick.uids}
    assert held == {row["uid"] for row in errors}


@pytest.mark.long
def test_called_again_nothing_is_done_again_and_another_configuration_is_refused(whole: tuple[Path, Path]) -> None:
    path, run = whole
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.suffix in (".h5", ".pt")}
    done = exitwave("run", path, "--out", run)
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_mtime_ns for p in before} == before
    done = exitwave("run", path, "--out", run, "--set", "adaptive.uniform_share=0.5")
    assert done.returncode == 2
    assert "adaptive.uniform_share" in done.stderr


@pytest.mark.long
def test_simulate_knows_the_rounds_of_a_data_set(whole: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = whole
    lost = next((run / "dataset" / "shards").rglob("*.h5"))
    sums = {p: hash_file(p) for p in (run / "dataset" / "shards").rglob("*.h5")}
    lost.unlink()
    done = exitwave("simulate", path, "--out", run / "dataset", "--cluster", "inline")
    assert done.returncode == 0, done.stderr
    assert {p: hash_file(p) for p in (run / "dataset" / "shards").rglob("*.h5")} == sums


@pytest.mark.long
def test_killed_in_the_middle_of_rounds_the_plan_and_the_weights_are_the_same(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    path, run = whole
    broken, log = tmp_path / "run", tmp_path / "log"
    moments: list[Any] = [
        lambda: any((broken / "rounds/round-0000/checkpoints").glob("step-*")),  # a judge in training
        lambda: (broken / "dataset/steering/round-0001.json").exists(),  # decided, nothing of it simulated
        lambda: any(e["kind"] == "part_started" and e["part"] == "judge" for e in events(broken / "events.jsonl")[-2:]),
        lambda: (broken / "dataset/steering/round-0002.json").exists(),
        lambda: (broken / "train/events.jsonl").exists(),
    ]
    for moment in moments:
        process = start("run", path, "--out", broken, log=log)
        try:
            wait_until(moment, process)
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -9
        finally:
            end(process)
    done = exitwave("run", path, "--out", broken)
    assert done.returncode == 0, done.stderr
    for name in ("round-0000.json", "round-0001.json", "round-0002.json"):
        assert (broken / "dataset/steering" / name).read_bytes() == (run / "dataset/steering" / name).read_bytes()
    sums = {p.relative_to(run): hash_file(p) for p in (run / "dataset/shards").rglob("*.h5")}
    assert {p.relative_to(broken): hash_file(p) for p in (broken / "dataset/shards").rglob("*.h5")} == sums
    assert (broken / "rounds/final.json").read_bytes() == (run / "rounds/final.json").read_bytes()
