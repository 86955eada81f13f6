"""The trainer on a mesh of data x spatial ranks: whole trainings equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exitwave.train.run import read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train
from tests.support.series_data import make_series
from tests.support.train_launch import launch

SERIES: dict[str, Any] = {"width": 2, "levels": 2, "dose_e_per_pixel": 200.0}
SPEC: dict[str, Any] = {
    "task": "volume",
    "series": SERIES,
    "batch": 4,
    "steps": 8,
    "seed": 3,
    "precision": "fp64",
    "optimizer": {"lr": 3e-3, "warmup_steps": 2},
    "checkpoint": {"every_steps": 100, "keep": 1},
    "engine": {"timeout_s": 60},
    "eval_every_steps": 4,
}
REGRESS: dict[str, Any] = {
    **SPEC,
    "task": "regress",
    "series": {**SERIES, "filters": [4, 4, 8, 8], "hidden": [16, 8], "dropout": 0.2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_series(tmp_path_factory.mktemp("data"), train=14, val=3)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trainings by one process."""
    runs = {}
    for spec in (SPEC, REGRESS):
        runs[spec["task"]] = tmp_path_factory.mktemp(spec["task"])
        train(TrainSpec.model_validate(spec), data=data, out=runs[spec["task"]], threads=1)
    return runs


def same_training(one: Path, other: Path, *, tolerance: float) -> None:
    curves = [[event["loss"] for event in read_curve(run)] for run in (one, other)]
    assert len(curves[0]) == 8
    assert curves[1] == pytest.approx(curves[0], rel=tolerance)
    weights = [torch.load(run / "model.pt", weights_only=True)["state_dict"] for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.allclose(weights[1][name], value, rtol=tolerance, atol=tolerance), name


def check(spec: dict[str, Any], mesh: tuple[int, int], data: Path, alone: dict[str, Path], out: Path) -> None:
    code, output = launch(mesh[0] * mesh[1], spec=spec, data=data, out=out, mesh=mesh)
    assert code == 0, output
    same_training(alone[spec["task"]], out, tolerance=1e-9)


def test_two_ranks_that_share_samples_train_as_one_process(data: Path, alone: dict[str, Path], tmp_path: Path):
    check(SPEC, (1, 2), data, alone, tmp_path)


@pytest.mark.long
def test_cosmoflow_split_in_two_trains_as_one_process(data: Path, alone: dict[str, Path], tmp_path: Path):
    check(REGRESS, (1, 2), data, alone, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2), (1, 4)], ids=lambda m: f"{m[0]}x{m[1]}")
@pytest.mark.parametrize("spec", [SPEC, REGRESS], ids=lambda s: s["task"])
def test_a_mesh_trains_as_one_process(
    spec: dict[str, Any], mesh: tuple[int, int], data: Path, alone: dict[str, Path], tmp_path: Path
):
    check(spec, mesh, data, alone, tmp_path)
