"""`exitwave tune` from the terminal: a short search on real shards, its report, the same command again."""

from __future__ import annotations

import json
import re
from pathlib import Path

from line import events, exitwave, write_pipeline
from train_data import make_dataset

TUNE = """\
tune:
  trials: 5
  space:
    train.optimizer.lr: {choice: [1.0e-4, 0.01, 1.0e+30]}
    train.model.growth: {int_uniform: [2, 6]}
  sampler: {name: random, seed: 6}
  pruner: {startup: 1, warmup: 0}
  budget: {steps: 4, validations: 2}
"""


def test_a_search_from_the_terminal(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", train=2, val=1, test=1, per_material=3)
    pipeline = write_pipeline(tmp_path, ("train:\n", f"{TUNE}train:\n"), ("tiny}", "tiny, layers: [1, 1, 1]}"))
    study = tmp_path / "study"
    command = ("tune", pipeline, "--data", data, "--out", study, "--cluster", "inline", "--json")
    run = exitwave(*command)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    log = events(study / "events.jsonl")

    asked = [e for e in log if e["kind"] == "trial_asked"]
    assert [e["n"] for e in asked] == list(range(5))
    ended = {e["n"]: e for e in log if e["kind"] in ("trial_finished", "trial_pruned", "trial_failed")}
    assert len(ended) == 5 == sum(told["trials"][state] for state in ("finished", "pruned", "failed"))
    # a rate of 1e30 is no number for long: told with its reason, and the search goes on
    wild = {e["n"] for e in asked if e["values"]["train.optimizer.lr"] == 1e30}
    assert wild and all(ended[n]["kind"] == "trial_failed" and ended[n]["state"] == "diverged" for n in wild)
    assert all("finite" in failure["why"] for failure in told["failures"])

    best = told["best"]
    assert best["value"] == min(e["value"] for e in ended.values() if e["kind"] == "trial_finished")
    assert Path(best["model"]).exists()
    assert Path(best["configuration"]).read_text().count(f"growth: {best['values']['train.model.growth']}") == 1
    measured = exitwave("evaluate", best["run"], "--data", data, "--json")
    assert measured.returncode == 0 and json.loads(measured.stdout)["metrics"]["model"]["rmse_VA"] > 0

    page = (study / "report.html").read_text()
    table = page.partition('id="trials"')[2].partition("</section>")[0]
    assert "Which values are best?" in table and table.count("<tr") == 5 + 1
    assert "optimizer.lr" in page and "diverged" in page
    assert page.count("data:image/png;base64,") >= 2 and not re.search(r"(src|href)=\"https?:", page)

    again = exitwave(*command)
    assert again.returncode == 0 and json.loads(again.stdout)["best"] == best
    assert [e for e in events(study / "events.jsonl") if e["kind"].startswith("trial_")] == [
        e for e in log if e["kind"].startswith("trial_")
    ]
