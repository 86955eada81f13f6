"""A Lightning strategy: `Trainer(strategy=GroupedAllreduceStrategy(…))` trains with our engine in DDP's place.

Everything but the wrapping of the module is DDPStrategy's: how ranks start, meet, and share samples. Install it with
`pip install 'exitwave[lightning]'`; nothing else of exitwave imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.engine import GroupedAllreduce

__all__ = ["GroupedAllreduceStrategy"]


class GroupedAllreduceStrategy(DDPStrategy):
    """DDPStrategy with `GroupedAllreduce` for the gradients.

    Args:
        engine: options of `GroupedAllreduce` (grouping, compression, overlap, …). With overlap "step" the trainer's
            `gradient_clip_val` is refused, since gradients are never whole.
        options: those of DDPStrategy that do not concern DDP itself.
    """

    strategy_name = "grouped_allreduce"
    optimizers: list[Any]  # a property of the base class

    def __init__(self, *, engine: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._engine_options = dict(engine or {})

    @property
    def engine(self) -> GroupedAllreduce | None:
        """The engine while a model is being fitted."""
        return self.model if isinstance(self.model, GroupedAllreduce) else None

    def _setup_model(self, model: torch.nn.Module) -> Any:
        return GroupedAllreduce(model, **self._engine_options)

    def _register_ddp_hooks(self) -> None:
        """DDP's own communication hooks have no place here."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if self.engine is None or self._engine_options.get("overlap") != "step":
            return
        if trainer.gradient_clip_val:
            raise UsageError("overlap='step': gradient_clip_val finds no gradients to clip; leave it out")
        if len(self.optimizers) != 1:
            raise UsageError(f"overlap='step' serves one optimizer, the module configures {len(self.optimizers)}")
        plain = self.optimizers[0]
        wrapped = self.engine.wrap(plain)
        self.optimizers = [wrapped]
        for config in self.lr_scheduler_configs:  # the parameter groups are shared; the count of steps is not
            if getattr(config.scheduler, "optimizer", None) is plain:
                config.scheduler.optimizer = wrapped

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it for batches that only accumulate."""
        if self.engine is None:
            yield
            return
        with self.engine.no_sync():
            yield

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.model = self.lightning_module
        super().teardown()
