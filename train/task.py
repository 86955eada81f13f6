"""What is learnt, and from which fields: all that the trainer does not know by itself.

The trainer takes steps, agrees, saves and resumes; a `Task` measures the training set, makes the model, turns stored
samples into batches, scores an output and writes the trained model. `task_of` finds the task of a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from exitwave.train.loader import Batch
from exitwave.train.spec import TrainSpec

__all__ = ["Collate", "Task", "task_of"]

Collate = Callable[[Sequence[dict[str, Any]]], Batch]


class Task(Protocol):
    """One kind of training. `measured` is whatever `measure` returned: made by rank 0, the same on all ranks."""

    @property
    def fields(self) -> tuple[str, ...]:
        """What is read of each sample."""

    def measure(self, dataset: Any) -> Any:
        """Statistics of the training set (a ShardDataset, or what has arrived of a growing one), before the first step;
        they travel to the other ranks pickled."""

    def make_model(self, measured: Any) -> nn.Module:
        """The network, initialised from the spec's seed alone (the caller's random state is left as it was)."""

    def prepare(self, measured: Any, *, epoch: int) -> Collate:
        """Stored samples -> batch, by keys of (seed, epoch, uid) alone; it is pickled to loader processes."""

    def per_sample_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """(B,), so that ranks can weigh it and a bad sample can be named."""

    def squared_errors(self, output: Tensor, batch: Batch, measured: Any) -> dict[str, Tensor]:
        """(B,) of each figure that validation tells beside its loss, as root mean square over samples, in the unit of
        its name; none for a task whose errors have no unit."""

    def save(self, path: Path, module: nn.Module, measured: Any, *, dataset_id: str, step: int) -> None:
        """Writes the trained model, whole or not at all. Called by one rank."""


def task_of(spec: TrainSpec) -> Task:
    """The task that a configuration asks for."""
    if spec.task == "classify":
        from exitwave.train.classification import Classification

        return Classification(spec)
    if spec.task == "volume":
        from exitwave.train.volume import Volume

        return Volume(spec)
    if spec.task == "regress":
        from exitwave.train.regression import Regression

        return Regression(spec)
    if spec.data.input is not None:
        from exitwave.train.fields import Fields

        return Fields(spec)
    from exitwave.train.reconstruction import Reconstruction

    return Reconstruction(spec)
