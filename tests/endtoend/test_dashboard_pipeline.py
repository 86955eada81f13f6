"""`exitwave run` on the page: the training that follows the campaign is shown there, and the cache that feeds it."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from browser import browser, problems
from line import end, processes_naming, start, wait_until, write_pipeline


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


@pytest.mark.long
def test_the_page_outlives_the_campaign(tmp_path: Path) -> None:
    """Committed shards, the staged bytes, each step with its loss and wait, the cache: on the page, in the JSON, as
    metrics, in status.json; the workers are gone meanwhile, and in the end the scheduler is, too."""
    stream = "\nstage: {mode: stream, capacity: 700kB}\ncampaign:"
    more = ("samples_per_structure: 6", "samples_per_structure: 12")
    longer = ("steps: 12", "steps: 100000")
    path = write_pipeline(tmp_path, more, longer, ("\ncampaign:", stream), ("ranks: 2", "ranks: 1"))
    run, log = tmp_path / "run", tmp_path / "log.txt"
    process = start("run", path, "--out", run, log=log)
    try:
        wait_until(lambda: "dashboard: http" in log.read_text(), process)
        found = re.search(r"dashboard: (http://\S+)/status", log.read_text())
        assert found is not None
        address = found[1]

        def shown() -> dict[str, Any]:
            return dict(json.loads(get(f"{address}/exitwave/status")))

        wait_until(lambda: ((shown().get("trainer") or {}).get("step") or 0) > 20, process)
        wait_until(lambda: (shown()["cache"] or {}).get("used", 0) > 0, process)
        told = shown()
        assert told["activity"] == "finished" and told["shards"]["committed"] == 16 == sum(told["shards"].values())
        trainer = told["trainer"]
        assert trainer["state"] == "running" and trainer["total_steps"] == 100000 and trainer["loss"] > 0
        assert trainer["data_wait_s"] >= 0 and len(trainer["curve"]) > 5
        assert 0 < told["cache"]["used"] <= told["cache"]["capacity"] == 700_000
        assert told["stage"]["bytes"] > 0
        metrics = get(f"{address}/metrics")
        for name in ("exitwave_train_step", "exitwave_train_loss", "exitwave_cache_used_bytes"):
            assert float(re.search(rf"^{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)[1]) > 0  # type: ignore[index]
        beside = json.loads((run / "dataset" / "status.json").read_text())
        assert beside["trainer"]["step"] >= trainer["step"] and beside["shards"] == told["shards"]
        assert not [pid for pid in processes_naming(Path("spawn_main")) if parent(pid) == process.pid]
        with browser(tmp_path / "profile") as driver:
            driver.get(f"{address}/exitwave")
            text = "return document.querySelector(arguments[0]).innerText"
            steps = "[data-key='trainer.step']"
            wait_until(lambda: number(driver.execute_script(text, steps)) > 20, process)
            before = number(driver.execute_script(text, steps))
            wait_until(lambda: number(driver.execute_script(text, steps)) > before, process)
            assert "running" in driver.execute_script(text, "#ew-trainer-state")
            assert driver.execute_script(text, "#ew-cache")
            assert problems(driver) == []
    finally:
        process.terminate()
        process.wait(60)
        end(process)
    assert process.returncode == 75, log.read_text()[-3000:]
    assert processes_naming(run) == []


def number(text: str) -> int:
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() else 0


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
