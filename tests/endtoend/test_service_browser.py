"""The service in a real browser: log in, submit, watch, stop, go on, read why a task failed, see the report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import line
import pytest
from browser import browser, problems, resize

pytest.importorskip("fastapi")
from service import Service

QUICKSTART = Path(__file__).resolve().parents[2] / "workflows" / "templates" / "quickstart.yaml"
MODEST = line.PIPELINE.replace("samples_per_structure: 6", "samples_per_structure: 24")

# The quickstart itself, with a third of its samples and a quarter of its training.
SMALLER = (("samples_per_structure: 18", "samples_per_structure: 6"), ("epochs: 20", "epochs: 5"))

# One sample in three cannot be computed: an own simulator, run from the command line below the same root.
SIMULATOR = """
import numpy as np
from exitwave.simulate import FieldSpec, own_simulator

@own_simulator(version="1", fields=[FieldSpec(name="heat", dtype="<f4", shape=(4,), axes=("x",), unit="K")])
def simulate(parameters):
    if parameters["power_W"] > 2:
        raise ValueError("the rod melts above 2 W")
    return {"heat": np.full(4, parameters["power_W"], "<f4")}
"""


def text_of(driver: Any, selector: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def wait(true, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "the page did not come to it"
        time.sleep(0.05)


def click(driver: Any, selector: str) -> None:
    wait(
        lambda: driver.execute_script(
            "const b = document.querySelector(arguments[0]); return b && !b.disabled && b.offsetParent", selector
        )
    )
    driver.find_element("css selector", selector).click()


def fits(driver: Any) -> bool:
    """Nothing sticks out to the right; a phone would widen its window, so that it is no measure."""
    return bool(driver.execute_script("const e = document.documentElement; return e.scrollWidth <= e.clientWidth"))


def shot(driver: Any, folder: Path | None, name: str) -> None:
    """The page as it is now, as wide as a screen and as a phone, where pictures are wanted; it must fit both."""
    for width, height in ((390, 844), (1600, 1200)):  # ends as wide as it began
        resize(driver, width, height)
        wait(lambda: fits(driver))
        if folder is not None:
            time.sleep(0.6)  # the bar glides
            driver.save_screenshot(str(folder / f"service-{name}-{width}.png"))


def story(service: Service, driver: Any, configuration: str, name: str, shots: Path | None = None) -> None:
    """As a person would go through it."""
    driver.get(service.address + "/")
    assert driver.current_url.endswith("/login?next=/")
    shot(driver, shots, "login")
    field = driver.find_element("id", "token")
    field.send_keys("not the token, which has more letters than this\n")
    wait(lambda: "not this service's token" in text_of(driver, "main"))
    driver.find_element("id", "token").send_keys(service.token + "\n")
    wait(lambda: text_of(driver, "h1") == "Runs")
    problems(driver)  # the refused login is one

    click(driver, "a[href='/submit']")
    driver.find_element("id", "name").send_keys(name)
    area = driver.find_element("id", "configuration")
    put = "arguments[0].value = arguments[1]"
    driver.execute_script(put, area, configuration.replace("energy_keV:", "energy_kev:", 1))
    click(driver, "#submission button")
    wait(lambda: "energy_kev" in text_of(driver, "#said"))
    assert f"{name}.yaml:" in text_of(driver, "#said")
    shot(driver, shots, "refused")
    problems(driver)
    driver.execute_script(put, area, configuration)
    click(driver, "#submission button")
    wait(lambda: driver.current_url.endswith(f"/runs/{name}"))
    driver.execute_script("window.neverReloaded = true")

    seen: list[str] = []

    def committed() -> int:
        shown = text_of(driver, "[data-fact=committed]")
        if shown not in ("–", "") and (not seen or shown != seen[-1]):
            seen.append(shown)
        return int(shown.replace(",", "")) if shown not in ("–", "") else 0

    wait(lambda: committed() > 0, 120)
    shot(driver, shots, "running")
    wait(lambda: committed() > 0 and len(seen) > 1, 120)
    click(driver, "[data-command=cancel]")
    wait(lambda: text_of(driver, "[data-fact=state]") == "stopped")
    click(driver, "[data-command=resume]")
    wait(lambda: text_of(driver, "[data-fact=state]") == "running")
    wait(lambda: text_of(driver, "[data-fact=state]") == "finished", 900)
    assert "report" in text_of(driver, "#stages") and "network" in text_of(driver, "#metrics")
    wait(lambda: driver.execute_script("return document.querySelectorAll('#newest img').length") == 2)
    assert driver.execute_script("return document.querySelector('#curve path').getAttribute('d').length") > 20
    assert driver.execute_script("return window.neverReloaded") is True
    click(driver, "#log summary")
    wait(lambda: "Done in" in text_of(driver, "#log pre"))
    click(driver, "#log summary")
    shot(driver, shots, "finished")
    assert problems(driver) == []

    click(driver, "[data-report]")
    wait(lambda: "How accurate is it?" in text_of(driver, "body"))
    wait(lambda: driver.execute_script("return [...document.images].every((i) => i.complete && i.naturalWidth)"))
    shot(driver, shots, "report")


@pytest.mark.long
def test_from_the_login_to_the_report(tmp_path):
    service = Service(tmp_path / "root").start()
    try:
        with browser(tmp_path / "profile") as driver:
            story(service, driver, MODEST, "mine")
            reads_why_a_task_failed(service, driver)
    finally:
        service.end()


def reads_why_a_task_failed(service: Service, driver: Any, shots: Path | None = None) -> None:
    (service.root / "rod.py").write_text(SIMULATOR)
    (service.root / "rod.yaml").write_text(
        "name: rod\nseed: 1\nsimulator: {use: 'rod:simulate'}\nsamples: 6\nsamples_per_shard: 2\n"
        "parameters: {power_W: {linspace: [0.5, 3, 6]}}\n"
    )
    made = line.exitwave("simulate", service.root / "rod.yaml", "--out", service.root / "rod", "--cluster", "inline")
    assert made.returncode == 3, made.stderr
    driver.get(service.address + "/")
    wait(lambda: "rod" in text_of(driver, "#runs"))
    shot(driver, shots, "runs")
    driver.get(service.address + "/runs/rod")
    click(driver, "#failures summary")
    assert "the rod melts above 2 W" in driver.find_element("css selector", "#failures details p").text
    shot(driver, shots, "failed")
    assert problems(driver) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("whole", [False, True], ids=["in-small", "as-it-is"])
def test_the_quickstart_from_the_login_to_the_report(tmp_path, whole):
    """Leaves the pictures of the documentation in `shots` below `--basetemp`."""
    text = QUICKSTART.read_text()
    for before, after in () if whole else SMALLER:
        assert before in text
        text = text.replace(before, after)
    service = Service(tmp_path / "root").start()
    shots = tmp_path / "shots"
    shots.mkdir()
    try:
        with browser(tmp_path / "profile") as driver:
            story(service, driver, text, "quickstart", shots)
            reads_why_a_task_failed(service, driver, shots)
    finally:
        service.end()
    assert len(list(shots.iterdir())) == 14
