"""The page on the dashboard in a real browser: found by its tab, right to the number, alive, also behind a proxy."""

from __future__ import annotations

import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import browser, problems, resize
from dask_processes import DaskProcesses
from line import PIPELINE, end, exitwave, start, wait_until
from prefix_proxy import PrefixProxy

from exitwave.simulate.dashboard import add_page, publish
from exitwave.simulate.state import campaign_status

PREFIX = "user/ann/proxy/8787"
NUMBERS = (
    *(f"shards.{state}" for state in ("pending", "running", "committed", "failed", "rejected")),
    *("samples.committed", "samples.planned", "rate_samples_per_s", "eta_s", "bytes.committed", "bytes.planned"),
    *("attempts", "failed_attempts", "workers"),
)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def campaign(folder: Path) -> Path:
    """160 shards of three samples, a few tens of milliseconds each: longer than it takes to look at them."""
    text = PIPELINE.partition("campaign:\n")[2].partition("train:\n")[0]
    lines = [line.removeprefix("  ") for line in text.splitlines()]
    path = folder / "campaign.yaml"
    path.write_text("\n".join(lines).replace("samples_per_structure: 6", "samples_per_structure: 120"))
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A scheduler of its own with one worker: its address and that of its dashboard."""
    processes = DaskProcesses(tmp_path_factory.mktemp("dask"))
    try:
        processes.start_scheduler("--preload", "exitwave.simulate.dashboard.preload")
        processes.start_worker()
        processes.wait_for_workers(1)
        from distributed import Client

        with Client(processes.address, set_as_default=False) as client:
            dashboard = client.dashboard_link.removesuffix("/status")
        yield processes.address, dashboard
    finally:
        processes.close()


def looked_up(snapshot: dict[str, Any], key: str) -> Any:
    value: Any = snapshot
    for part in key.split("."):
        value = value[part]
    return value


def numbers(driver: Any) -> tuple[float, dict[str, Any]]:
    """What the page shows: the time of its snapshot, and each number by its name."""
    script = """
        const root = document.getElementById("exitwave");
        const rows = [...root.querySelectorAll("[data-key]")].map((n) => [n.dataset.key, n.dataset.value]);
        return [root.dataset.updated || "0", rows];
    """
    updated, rows = driver.execute_script(script)
    return float(updated), {key: json.loads(value) for key, value in rows if value is not None}


def text_of(driver: Any, selector: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0]).innerText", selector))


def until(true: Callable[[], Any], seconds: float = 40.0) -> Any:
    """The first true value; the test fails without one."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        if found := true():
            return found
        time.sleep(0.05)
    raise AssertionError("the awaited state did not come")


def colours(driver: Any, selector: str) -> int:
    """How many different colours an element really shows on the screen."""
    from matplotlib.image import imread

    element = driver.find_element("css selector", selector)
    image = imread(io.BytesIO(element.screenshot_as_png))[..., :3]
    return len(np.unique((255 * image).astype(np.uint32) @ np.array([65536, 256, 1])))


def test_a_running_campaign_behind_a_proxy(site: tuple[str, str], tmp_path: Path) -> None:
    """Tab found, numbers of `status --json`, pictures, updates without reload, two widths, and the end of it."""
    address, dashboard = site
    assert json.loads(get(f"{dashboard}/exitwave/status"))["campaigns"] == []  # by the preload, before any campaign
    dataset, log = tmp_path / "data", tmp_path / "log.txt"
    with PrefixProxy(dashboard, PREFIX) as proxy, browser(tmp_path / "profile") as driver:
        driver.get(f"{proxy.url}/status")
        driver.find_element("link text", "Exitwave").click()
        assert driver.current_url == f"{proxy.url}/exitwave"
        until(lambda: text_of(driver, "#ew-name") == "No campaign yet")
        driver.execute_script("window.marker = 'the same page'")
        process = start("simulate", campaign(tmp_path), "--out", dataset, "--cluster", address, log=log)
        try:
            until(lambda: text_of(driver, "#ew-name") == "small")
            first = until(lambda: numbers(driver)[1].get("shards.committed"))
            until(lambda: numbers(driver)[1]["shards.committed"] > first)

            def same_moment() -> bool:
                """One snapshot, seen on the page and by `status`: every number is the same."""
                there = campaign_status(dataset)
                updated, shown = numbers(driver)
                if updated != there["updated"]:
                    return False
                assert {key: shown[key] for key in NUMBERS} == {key: looked_up(there, key) for key in NUMBERS}
                return bool(there["running"])

            until(same_moment)
            until(lambda: colours(driver, ".ew-pictures") > 100)
            wait_until(lambda: process.poll() is not None, timeout=120)
            assert process.returncode == 0, log.read_text()
        finally:
            end(process)
        until(lambda: text_of(driver, "#ew-activity") == "finished")
        there = json.loads(exitwave("status", dataset, "--json").stdout)
        shown = numbers(driver)[1]
        assert {key: shown[key] for key in NUMBERS} == {key: looked_up(there, key) for key in NUMBERS}
        assert shown["samples.committed"] == shown["samples.planned"] == 480
        assert text_of(driver, "[data-key='samples.committed']") == "480"
        assert driver.execute_script("return window.marker") == "the same page"
        for width in (390, 1600):
            resize(driver, width, 900)
            wide = until(lambda: driver.execute_script("return document.documentElement.scrollWidth"))
            assert wide <= width
        assert problems(driver) == []
        assert proxy.missed == []
        driver.get(f"{proxy.url}/individual-exitwave-shards")
        until(lambda: colours(driver, "body") > 20)
        assert problems(driver) == [] and proxy.missed == []
    assert there["shards"] == json.loads(get(f"{dashboard}/exitwave/status"))["shards"]
    metrics = [line.rpartition(" ") for line in get(f"{dashboard}/metrics").splitlines()]
    committed = next(
        value for name, _, value in metrics if name.startswith("exitwave_shards{") and '"committed"' in name
    )
    assert float(committed) == there["shards"]["committed"] == 160
    plots = [path for path in json.loads(get(f"{dashboard}/individual-plots.json")).values() if "exitwave" in path]
    assert len(plots) == 6
    assert all("<html" in get(dashboard + path) for path in plots)


def test_text_of_others_is_text(site: tuple[str, str], tmp_path: Path) -> None:
    """A reason with markup in it is shown as it is; a data set is chosen by the address; silence is told."""
    from distributed import Client

    from exitwave.simulate.counters import fold

    address, dashboard = site
    bad = "<img src=x onerror='document.title=1'> & \u202e"
    failed = {"kind": "task_failed", "t": 3.0, "task": "t1", "why": bad, "state": "memory", "structures": [bad]}
    told = [
        {"kind": "campaign_started", "t": 1.0, "name": bad, "samples": 10**7, "shards": 39_000, "workers": 9},
        failed,
    ]
    snapshot = {**fold(told).snapshot(time.time() - 60), "dataset": "/data/ü & <b>", "pictures": []}
    with Client(address, set_as_default=False) as client:
        publish(client, snapshot)
    with browser(tmp_path / "profile") as driver:
        driver.get(f"{dashboard}/exitwave?dataset=%2Fdata%2F%C3%BC%20%26%20%3Cb%3E")
        until(lambda: text_of(driver, "#ew-activity") == "no word from the controller")
        assert text_of(driver, "#ew-name") == bad
        assert bad in text_of(driver, "#ew-failures")
        assert text_of(driver, "[data-key='samples.planned']") == "10,000,000"
        assert driver.find_elements("css selector", "#exitwave img") == []
        resize(driver, 390, 900)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        assert problems(driver) == []


def test_a_scheduler_under_a_prefix_of_its_own() -> None:
    """`dask scheduler --dashboard-prefix`: all addresses stand below it, added by a client, twice without harm."""
    from distributed import Client, LocalCluster

    options = {"http_prefix": "/deep/er"}
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", scheduler_kwargs=options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        add_page(client)
        add_page(client)
        root = f"http://127.0.0.1:{cluster.scheduler.http_server.port}/deep/er"
        page = get(f"{root}/exitwave")
        assert page.count('<a href="exitwave">Exitwave</a>') == 1
        assert get(f"{root}/workers").count('<a href="exitwave">Exitwave</a>') == 1
        assert json.loads(get(f"{root}/exitwave/status"))["activity"] == "none"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{root}/exitwave/status?dataset=nowhere")
