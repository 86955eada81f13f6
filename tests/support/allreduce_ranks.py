"""Ranks as threads of one process, and tensors for planners."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from exitwave.train.allreduce.groups import TensorInfo
from exitwave.train.loopback import LoopbackHub


def on_ranks(size: int, work: Callable[..., Any], *, seconds: float = 60) -> list[Any]:
    """Run `work(rank, data, control)` in a thread for each rank; each rank's result or exception."""
    hubs = LoopbackHub(size), LoopbackHub(size)
    results: list[Any] = [None] * size

    def play(rank: int) -> None:
        try:
            results[rank] = work(rank, hubs[0].transport(rank), hubs[1].transport(rank))
        except Exception as error:
            error.add_note(traceback.format_exc())
            results[rank] = error

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a rank hangs"
    return results


def info(name: str, numel: int = 4, dtype: str = "float32", device: str = "cpu", block: str = "") -> TensorInfo:
    width = {"float32": 4, "float64": 8, "float16": 2}[dtype]
    return TensorInfo(
        name=name,
        shape=(numel,),
        stride=(1,),
        dtype=dtype,
        device=device,
        numel=numel,
        nbytes=numel * width,
        block=block,
    )
