"""A pipeline that trains while its campaign runs, from a submission that says so, through a stop, to its report."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from browser import browser, problems
from line import PIPELINE
from service import Service


@pytest.mark.long
def test_from_the_api_through_a_cancel_to_the_report(tmp_path):
    service = Service(tmp_path / "root").start()
    try:
        body = {"name": "live", "configuration": PIPELINE, "online": True, "ranks": 2}
        answer = service.call("POST", "/api/runs", json=body)
        assert answer.status_code == 201, answer.text
        until = time.monotonic() + 120
        while not (tmp_path / "root" / "live" / "train" / "arrivals.jsonl").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        assert service.command("live", "cancel").status_code == 202
        service.wait("live", "stopped", "finished")
        if service.get("/api/runs/live")["state"] == "stopped":
            assert service.command("live", "resume").status_code == 202
        run = service.wait("live", "finished", seconds=300)
        assert run["mode"] == "online" and run["report"]
        assert (tmp_path / "root" / "live" / "train" / "model.pt").exists()
        wrong = service.call("POST", "/api/runs", json={**body, "name": "other", "ranks": 10_000})
        assert wrong.status_code == 422
        refused = service.call("POST", "/api/runs", json={**body, "name": "other", "ranks": 1000})
        assert refused.status_code == 422 and "ranks" in refused.json()["detail"]
        assert not (tmp_path / "root" / "other.yaml").exists()
    finally:
        service.end()


def _until(true: Any) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.long
def test_from_the_page(tmp_path):
    service = Service(tmp_path / "root").start()
    try:
        with browser(tmp_path / "profile") as driver:
            driver.get(service.address + "/login")
            driver.find_element("id", "token").send_keys(service.token + "\n")
            _until(lambda: not driver.current_url.endswith("/login"))
            driver.get(service.address + "/submit")
            driver.find_element("id", "name").send_keys("mine")
            area = driver.find_element("id", "configuration")
            driver.execute_script("arguments[0].value = arguments[1]", area, PIPELINE)
            driver.find_element("css selector", "#online option[value=true]").click()
            driver.find_element("id", "ranks").send_keys("2")
            driver.find_element("css selector", "#submission button").click()
            _until(lambda: driver.current_url.endswith("/runs/mine"))
            assert problems(driver) == []
        job = json.loads((tmp_path / "root" / ".exitwave" / "jobs" / "mine" / "job.json").read_text())
        assert "--online" in job["arguments"] and job["arguments"][-2:] == ["--ranks", "2"]
        service.command("mine", "cancel")
        service.wait("mine", "stopped", "finished")
    finally:
        service.end()
