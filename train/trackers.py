"""Where curves are looked at: TensorBoard, MLflow, Weights & Biases. Each is imported only when it is asked for.

A tracker is a listener of the training's events: figures of `train_step` and `train_eval` by their names, at the step.
Nothing is sent anywhere by TensorBoard's files (RUN/tensorboard); MLflow and W&B go where their own settings say.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain_text

__all__ = ["open_trackers"]

Listener = Callable[[Mapping[str, Any]], None]
_KINDS = {"train_step": "train", "train_eval": "eval"}
_INSTALL = {"tensorboard": "tensorboardX", "mlflow": "'exitwave[mlflow]'", "wandb": "'exitwave[wandb]'"}


def open_trackers(
    names: Sequence[str], out: Path, *, configuration: Mapping[str, Any], step: int
) -> tuple[list[Listener], list[Callable[[], None]]]:
    """Listeners, and what closes them in the end. Called by one rank; `step`: the training goes on behind it.

    Raises:
        UsageError: a tracker that is not installed.
    """
    opened: list[Listener] = []
    closers: list[Callable[[], None]] = []
    for name in names:
        try:
            log, close = _OPEN[name](out, configuration, step)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"trackers: {name} is not installed ({error}); pip install {_INSTALL[name]}, or leave it out of "
                "`trackers`"
            ) from error
        opened.append(_listener(log))
        closers.append(close)
    return opened, closers


def figures(event: Mapping[str, Any]) -> dict[str, float]:
    """`train/loss` and so on: what of an event is a number, but for step and time."""
    prefix = _KINDS[str(event["kind"])]
    return {
        f"{prefix}/{key}": float(value)
        for key, value in event.items()
        if key not in ("step", "t") and isinstance(value, numbers.Real) and not isinstance(value, bool)
    }


def _listener(log: Callable[[dict[str, float], int], None]) -> Listener:
    def listen(event: Mapping[str, Any]) -> None:
        if event.get("kind") in _KINDS:
            log(figures(event), int(event["step"]))

    return listen


Opened = tuple[Callable[[dict[str, float], int], None], Callable[[], None]]


def _tensorboard(out: Path, configuration: Mapping[str, Any], step: int) -> Opened:
    from tensorboardX import SummaryWriter

    # what was written after the checkpoint is trained again: purge_step hides it
    writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1 if step else None, flush_secs=10)

    def log(values: dict[str, float], at: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, at)

    return log, writer.close


def _mlflow(out: Path, configuration: Mapping[str, Any], step: int) -> Opened:
    import mlflow

    known = _earlier_run(out / "mlflow-run", step)
    run = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=out.name)
    (out / "mlflow-run").write_text(run.info.run_id)
    mlflow.log_dict(dict(configuration), "train.json")

    def log(values: dict[str, float], at: int) -> None:
        mlflow.log_metrics(values, step=at, run_id=run.info.run_id)

    return log, mlflow.end_run


def _wandb(out: Path, configuration: Mapping[str, Any], step: int) -> Opened:
    import wandb

    known = _earlier_run(out / "wandb-run", step)
    run = wandb.init(dir=str(out), name=out.name, config=dict(configuration), id=known, resume="allow")
    (out / "wandb-run").write_text(run.id)

    def log(values: dict[str, float], at: int) -> None:
        run.log(values, step=at)

    return log, run.finish


def _earlier_run(path: Path, step: int) -> str | None:
    """The tracker's own name of the run that is gone on with."""
    return read_plain_text(path).strip() if step and path.exists() else None


_OPEN: dict[str, Callable[[Path, Mapping[str, Any], int], Opened]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
