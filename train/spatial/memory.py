"""What a function costs in memory: the peak of bytes that torch holds on the CPU while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_bytes"]


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes of CPU tensors that were allocated at once by `function`, beyond those that stood before.

    Counted from the allocator's own events (torch.profiler), so temporaries within operations count too; freed memory
    that stood before counts as negative.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    held = peak = 0
    events = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        if event.device_type() == torch._C._autograd.DeviceType.CPU:
            held += event.nbytes()
            peak = max(peak, held)
    return peak
