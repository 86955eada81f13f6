"""Curves for TensorBoard, MLflow and W&B: the real packages where they are installed, a message where they are not."""

from __future__ import annotations

import builtins

import pytest

from exitwave.ingest.errors import UsageError
from exitwave.train.trackers import figures, open_trackers

EVENT = {"t": 1.0, "kind": "train_step", "step": 7, "loss": 0.25, "mfu": 0.5, "note": "text", "flag": True}


def test_figures_are_the_numbers_of_an_event():
    assert figures(EVENT) == {"train/loss": 0.25, "train/mfu": 0.5}
    assert figures({"kind": "train_eval", "step": 1, "split": "val", "loss": 2, "n": 3}) == {
        "eval/loss": 2.0,
        "eval/n": 3.0,
    }


def _written(name, out):
    (listener,), (close,) = open_trackers([name], out, configuration={"batch": 4}, step=0)
    listener(EVENT)
    listener({"kind": "train_checkpoint", "step": 8})
    close()


def test_tensorboard_files(tmp_path):
    _written("tensorboard", tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in path.read_bytes()


def test_mlflow_has_the_figures_and_goes_on_with_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    _written("mlflow", tmp_path)
    run = (tmp_path / "mlflow-run").read_text()
    (_,), (close,) = open_trackers(["mlflow"], tmp_path, configuration={"batch": 4}, step=7)
    close()
    assert (tmp_path / "mlflow-run").read_text() == run
    (metric,) = mlflow.MlflowClient().get_metric_history(run, "train/loss")
    assert (metric.step, metric.value) == (7, 0.25)


def test_wandb_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _written("wandb", tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_tracker_that_is_not_installed_says_what_to_do(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"trackers: wandb is not installed .*pip install 'exitwave\[wandb\]'"):
        open_trackers(["wandb"], tmp_path, configuration={}, step=0)
