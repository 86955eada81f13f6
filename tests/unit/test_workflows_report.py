"""The report: whole in itself, honest in its headline, safe against what stands in names."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from exitwave.workflows import figures
from exitwave.workflows.figures import nice_length, shared_limits
from exitwave.workflows.report import render, write_report
from exitwave.workflows.report_data import Example, ReportData, number
from exitwave.workflows.report_scores import columns, headline, key_figures, verdict


def scores(value: float) -> dict[str, float]:
    return {"rmse_VA": value, "rmse_V": value / 40, "rmse_V_fitted": value / 50, "r2": 0.5, "psnr": 20.0, "ssim": 0.7}


METRICS = {"model": scores(10), "idpc": scores(20), "com": scores(19), "mean": scores(30)}


def example() -> Example:
    truth = np.hypot(*np.meshgrid(np.arange(16.0), np.arange(16.0)))
    return Example(
        formula="SrTiO3",
        uid=0xABCDEF,
        split="test",
        cbed_centre=np.ones((8, 8)),
        cbed_mean=np.ones((8, 8)),
        q_sampling_per_A=0.1,
        pixel_A=0.15,
        images={"truth": truth, "model": truth + 1, "idpc": truth * 0.5, "mean": truth * 0},
        facts=[("energy", "200 keV")],
        rmse_VA={"model": 1.0},
    )


def page(**changes: object) -> str:
    given: dict[str, object] = {
        "title": "a run",
        "kind": "run",
        "sentence": headline(METRICS, n=8, structures=2, split="test"),
        "good": True,
        "badge": "It worked",
        "metrics": METRICS,
        "metrics_split": "test",
        "metrics_n": 8,
        "by_thickness": [{"thickness_A": [1, 2], "n": 3, "metrics": METRICS}] * 2,
        "examples": [example()],
        "loss": [(1, 1.0), (2, 0.5), (3, 0.25)],
        "validation": [(2, 0.6)],
        "stages": [("simulate", 12.0), ("train", 3.0)],
        "rates": [("Training", "10 samples/s", "2 ranks")],
        "provenance": [("Host", "here")],
        "rejected": [{"source": "x.cif", "why": "partial occupancy"}],
        "structures": [
            {
                "formula": "SrTiO3",
                "split": "test",
                "space_group": 221,
                "zone_axis": "[0 0 1]",
                "samples": 8,
                "source": "s",
                "licence": "",
            }
        ],
    }
    return render(ReportData(**(given | changes)))  # type: ignore[arg-type]


class Tags(HTMLParser):
    """Checks that tags close in order, and collects what the page would load."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.images_without_words = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.sources += [v or "" for k, v in attrs if k in ("src", "srcset", "data", "action")]
        if tag == "link" or tag == "script":
            self.sources.append(tag)
        if tag == "img" and not given.get("alt"):
            self.images_without_words += 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    html = page()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert len(tags.sources) == 7  # two patterns, truth, network, iDPC, difference, loss curve
    assert all(source.startswith("data:image/png;base64,") for source in tags.sources)
    assert tags.images_without_words == 0
    assert not re.search(r"https?://|@import|url\(", html)
    assert "<small>V·Å</small>" in html and "partial occupancy" in html


def test_names_are_text_and_never_markup() -> None:
    evil = "<script>alert(1)</script>"
    html = page(title=evil, rejected=[{"source": evil, "why": evil}], configuration=evil)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 4


def test_a_bare_page_can_be_drawn() -> None:
    html = render(ReportData(title="empty", kind="dataset", sentence="Nothing is finished yet."))
    assert "Nothing is finished yet." in html and "How accurate" not in html


@pytest.mark.parametrize(
    ("model", "good", "badge"), [(10, True, "It worked"), (19.5, True, "It learned"), (29, False, "Hardly learned"),
                                 (31, False, "Not learned")]
)  # fmt: skip
def test_the_verdict_is_honest(model: float, good: bool, badge: str) -> None:
    found = verdict(METRICS | {"model": scores(model)})
    assert found[:2] == (good, badge)


def test_no_metrics_no_verdict() -> None:
    assert verdict({}) == (None, "", "")
    assert headline({}, n=0, structures=0, split="test") == ""


def test_the_headline_has_the_figures() -> None:
    text = headline(METRICS, n=8, structures=2, split="test")
    assert "8 samples of 2 materials that it never saw" in text
    assert "10 V·Å" in text and "67 % below" in text and "iDPC reaches 20 V·Å" in text
    assert "never saw" not in headline(METRICS, n=8, structures=2, split="train")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (1.23456, "1.23"), (-2.0, "−2"), (123456.0, "123 456"), ("a", "a")],
)
def test_numbers_for_tables(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("extent", "length"), [(4.8, 1), (20, 5), (0.7, 0.2), (1000, 200)])
def test_scale_bars_are_round(extent: float, length: float) -> None:
    assert nice_length(extent) == pytest.approx(length)


def test_one_colour_range_for_what_is_compared() -> None:
    low, high = shared_limits([np.zeros((4, 4)), np.full((4, 4), 3.0)])
    assert (low, high) == (0, 3)
    assert shared_limits([np.full((2, 2), np.nan)]) == (0.0, 1.0)
    assert shared_limits([np.ones((2, 2))]) == (0.5, 1.5)


def test_the_same_rejection_stands_once() -> None:
    html = page(rejected=[{"source": f"{name}.cif", "why": "partial occupancy"} for name in ("x", "y")])
    assert html.count("partial occupancy") == 1 and "x.cif, y.cif" in html


def test_lettering_is_readable_on_a_phone() -> None:
    """Two pictures stand beside each other on a phone, some 155 CSS pixels wide: 10 of them for a letter at least."""
    assert figures._FONT / 72 / figures._WIDTH * 155 > 10


CLASSES = {
    "model": {"top1": 0.74, "f1": 0.73},
    "template": {"top1": 0.51, "f1": 0.51},
    "majority": {"top1": 0.21, "f1": 0.07},
}
NUMBERS = {
    "model": {"mse": 0.49, "r2": 0.51, "rmse_thickness_A": 12.0, "r2_thickness_A": 0.4},
    "mean": {"mse": 1.0, "r2": 0.0, "rmse_thickness_A": 20.0, "r2_thickness_A": 0.0},
}


def test_a_classifier_in_words() -> None:
    said = headline(CLASSES, n=448, structures=9, split="test")
    assert said == (
        "On 448 samples of 9 materials that it never saw, the network names the right class of 74 %; "
        "template matching 51 %, most frequent class 21 %."
    )
    assert verdict(CLASSES)[:2] == (True, "It worked")
    assert verdict({**CLASSES, "model": {"top1": 0.4}})[:2] == (True, "It learned")
    assert verdict({**CLASSES, "model": {"top1": 0.2}})[:2] == (False, "Not learned")
    assert [name for name, _, _ in columns(CLASSES)] == ["top1", "f1"]
    assert key_figures(CLASSES)[0] == ("74.0%", "of samples in the right class")


def test_numbers_in_words() -> None:
    said = headline(NUMBERS, n=64, structures=0, split="test")
    assert said == (
        "On 64 samples that it never saw, the network explains 0.51 of the variance, its error is 30 % below the "
        "error of the training set's mean."
    )
    assert verdict({**NUMBERS, "model": {"mse": 1.1}})[1:] == ("Not learned", "no better than the training set's mean")
    assert columns(NUMBERS)[-1] == ("rmse_thickness_A", "RMSE of thickness_A", "Å")


@pytest.mark.parametrize("metrics", [CLASSES, NUMBERS], ids=["classes", "numbers"])
def test_pages_of_other_tasks(tmp_path: Path, metrics: dict[str, dict[str, float]]) -> None:
    train = tmp_path / "train"
    train.mkdir()
    (tmp_path / "pipeline.yaml").write_text("name: other\n")
    (tmp_path / "events.jsonl").write_text("")
    (train / "events.jsonl").write_text("")
    (train / "metrics.json").write_text(json.dumps({"split": "test", "n": 448, "metrics": metrics}))
    page = write_report(tmp_path).read_text()
    assert "that it never saw, the network" in page and "mean: it is removed" not in page
