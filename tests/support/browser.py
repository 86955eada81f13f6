"""A real Chromium without a screen, by Selenium. Tests that need one skip, saying so, where it is not installed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["browser", "problems", "resize"]


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """A driver with an empty profile, 1600 pixels wide."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here (apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(argument)
    options.add_argument("--disable-dev-shm-usage")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        made.set_page_load_timeout(60)
        resize(made, 1600, 1200)
        yield made
    finally:
        made.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """As a window of this size, below 500 pixels as a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def problems(driver: Any) -> list[str]:
    """What the browser complained of since it was asked last: errors of scripts, what could not be loaded.

    A browser asks every host for an icon by itself, which pages do not name.
    """
    severe = [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    return [message for message in severe if "/favicon.ico" not in message]
