"""What the verbs tell of plans, samples and unfinished data sets: the figures that count, each reason once."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ingest_samples import make_dataset
from rich.console import Console

from exitwave.ingest import load_manifest
from exitwave.ingest.errors import UsageError
from exitwave.workflows import cli
from exitwave.workflows.campaigns import _workers_line
from exitwave.workflows.datasets import completeness, find_dataset, require_split
from exitwave.workflows.pictures import reciprocal_extent
from exitwave.workflows.rejections import grouped, rejected_structures
from exitwave.workflows.session import open_session
from exitwave.workflows.tables import plan_table, sample_table, verify_table

RADIUS = "{} of 4 samples: the probe's radius of {} Å exceeds a quarter of the cell (4.0 Å); C30_A of 0 would do"
ROWS = [
    {"source": "Au.cif", "why": RADIUS.format(1, "5.1")},
    {"source": "x.cif", "why": "partial occupancy"},
    {"source": "Si.cif", "why": RADIUS.format(2, "7.5")},
    {"source": "y.cif", "why": "partial occupancy"},
]


def printed(shown: object) -> str:
    out = StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()


def test_rejections_are_told_once_for_each_reason() -> None:
    draws, whole = grouped(ROWS)
    assert (draws.samples, draws.asked, draws.sources) == (3, 8, ("Au.cif", "Si.cif"))
    assert "radius of 5.1…7.5 Å exceeds a quarter of the cell (4.0 Å); C30_A of 0" in draws.why
    assert (whole.why, whole.sources, whole.samples) == ("partial occupancy", ("x.cif", "y.cif"), 0)
    assert rejected_structures(ROWS) == 2


def test_a_plan_does_not_mix_structures_with_samples() -> None:
    document = {"samples": 72, "shards": 18, "structures": 18, "splits": {"test": 16, "train": 48, "val": 8},
                "bytes": 1e6, "rejected": ROWS}  # fmt: skip
    text = printed(plan_table(document))
    assert "72 in 18 shards (48 train, 8 val, 16 test)" in text and "18, 2 rejected" in text
    assert "3 of 8 samples rejected: the probe's radius" in text and "of 2 structures: Au.cif, Si.cif" in text
    assert text.count("partial occupancy") == 1 and "2 structures rejected: partial occupancy" in text


def test_a_sample_is_told_without_noise() -> None:
    params: dict[str, Any] = {"thickness_A": 52.644539999999985, "defocus_A": -12.5, "C12_A": 0.0, "phi12_deg": 0.0,
                              "C30_A": 0.0, "tilt_x_mrad": 0.0, "zone_axis": [0, 0, 1]}  # fmt: skip
    text = printed(sample_table({"uid": "a", "formula": "Au", "params": params, "picture": "p.png"}))
    assert "52.6445\n" in text.replace(" ", "").replace("thickness_A", "") and "-12.5" in text
    assert "all other aberrations" in text and "C30_A" not in text and "phi12" not in text
    assert "tilt_x_mrad" in text and "[0 0 1]" in text


def test_the_zero_frequency_is_at_zero() -> None:
    left, right, bottom, top = reciprocal_extent((32, 31), (0.1, 0.2))
    assert top + 16.5 * 0.1 == pytest.approx(0) and bottom == pytest.approx(1.55)
    assert left == pytest.approx(-right) == pytest.approx(-3.1)


def unfinished(root: Path) -> Path:
    """A data set of `make_dataset` beside a plan that has one shard more."""
    make_dataset(root, "tv")
    tasks = [{"task": s.shard_id, "shard_id": s.shard_id, "samples": s.n, "structures": []}
             for s in load_manifest(root).shards]  # fmt: skip
    tasks.append({"task": "last", "shard_id": "f" * 16, "samples": 5, "structures": []})
    (root / "plan.json").write_text(json.dumps({"tasks": tasks}))
    return root


def test_an_unfinished_data_set_says_so(tmp_path: Path) -> None:
    root = unfinished(tmp_path / "d")
    found = completeness(root)
    assert found is not None and found.planned == found.committed + 5 == load_manifest(root).n_samples + 5
    assert f"{found.committed} of {found.planned} samples are committed" in found.sentence
    assert f"`exitwave simulate … --out {root}` goes on" in found.sentence
    with pytest.raises(UsageError, match=r"no split 'test'; there are .*campaign is unfinished"):
        require_split(root, "test")
    require_split(root, "train")
    document = {"ok": True, "shards": 2, "samples": 4, "bytes": 1, "bad": [], "unfinished": found.sentence}
    assert "all whole" in printed(verify_table(document)) and "unfinished" in printed(verify_table(document))
    (root / "plan.json").unlink()
    assert completeness(root) is None


def test_verify_tells_planned_and_committed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = unfinished(tmp_path / "run" / "dataset")
    (tmp_path / "run" / "pipeline.yaml").write_text("")
    assert cli.run(["verify", str(tmp_path / "run"), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["planned"] == document["committed"] + 5
    assert f"exitwave run … --out {tmp_path / 'run'}" in document["unfinished"]
    assert find_dataset(tmp_path / "run") == root


def test_other_folders_are_named_for_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.json").write_text("{}")
    assert cli.run(["status", str(tmp_path)]) == 2
    assert f"exitwave report {tmp_path}" in capsys.readouterr().err
    with pytest.raises(UsageError, match="folder of a training"):
        find_dataset(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        find_dataset(tmp_path / "absent")


def test_the_dashboard_is_named_at_the_start() -> None:
    event = {"workers": 2, "cluster": "local", "dashboard": "http://127.0.0.1:8787/status"}
    assert _workers_line(event) == "2 workers (local); dashboard: http://127.0.0.1:8787/status"
    assert _workers_line({"workers": 1, "cluster": "inline", "dashboard": None}) == "1 worker (inline)"


@pytest.mark.parametrize(("json_", "quiet", "said"), [(False, False, True), (True, False, False), (False, True, False)])
def test_what_is_next_is_for_people(json_: bool, quiet: bool, said: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with open_session(json=json_, quiet=quiet) as session:
        session.hint("exitwave report RUN")
    out, err = capfd.readouterr()
    assert out == "" and ("Next: exitwave report RUN" in err) == said
