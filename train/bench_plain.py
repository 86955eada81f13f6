"""The training loop that one writes by hand, as a process of its own: `python -m exitwave.train.bench_plain DATA RUN`.

RUN is a training that has ended. The same network is trained on the same data set with the same loss, optimizer,
clipping and batch, on one process: samples are drawn, read, made noisy and stacked, then one step is taken. There is no
engine, no checkpoint, no log, no agreement between ranks, and nothing is read ahead. Prints JSON: the median of the
steps' seconds, and the seconds from the start of the process to its first step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from exitwave.train.loader import open_split
from exitwave.train.optim import make_optimizer
from exitwave.train.spec import TrainSpec
from exitwave.train.task import task_of

__all__ = ["plain_training"]


def plain_training(data: Path, run: Path, steps: int) -> dict[str, Any]:
    """So many steps of a plain loop; the first two are not timed."""
    spec = TrainSpec.model_validate(json.loads((run / "train.json").read_text())["spec"])
    task = task_of(spec)
    dataset = open_split(data, spec.train_split, cache=None, fields=task.fields)
    measured = task.measure(dataset)
    module = task.make_model(measured).train()
    optimizer = make_optimizer(spec.optimizer, module.named_parameters())
    prepare = task.prepare(measured, epoch=0)
    order = np.random.default_rng(spec.seed)
    first_s, seconds = 0.0, []
    for step in range(steps):
        began = time.perf_counter()
        batch = prepare([dataset[int(i)] for i in order.choice(len(dataset), spec.batch, replace=False)])
        loss = task.per_sample_loss(module(batch.inputs), batch).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if spec.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), spec.optimizer.clip)
        optimizer.step()
        loss.item()
        if step == 0:
            first_s = time.time() - psutil.Process().create_time()
        if step > 1:
            seconds.append(time.perf_counter() - began)
    return {"step_s": statistics.median(seconds), "first_step_s": first_s, "steps": steps}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(plain_training(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
