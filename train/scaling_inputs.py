"""What the model of many ranks is told about the largest published run of its kind; frozen before the model first ran.

The run: data-parallel training of a fully convolutional dense network on 27,600 V100 GPUs of Summit (arXiv 1909.11150),
with a reported scaling efficiency of 0.93. Nothing here was fitted to that number. `SOURCES` says where each value is
from; those marked "assumption" are not published, and `SENSITIVITY` says over which values the answer is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PAPER_EFFICIENCY", "SENSITIVITY", "SOURCES", "SUMMIT", "SummitRun"]

PAPER_EFFICIENCY = 0.93  # arXiv 1909.11150, abstract


@dataclass(frozen=True, kw_only=True)
class SummitRun:
    """One step of the run, as the model wants it."""

    ranks: int = 27_600
    ranks_per_node: int = 6
    gradient_bytes: float = 440e6
    step_s: float = 1.57
    backward_share: float = 2 / 3
    tensors: int = 72
    tensor_groups: int = 9
    inside_bytes_per_s: float = 50e9
    inside_alpha_s: float = 5e-6
    across_bytes_per_s: float = 25e9
    across_alpha_s: float = 5e-6
    request_s: float = 1e-6
    control_alpha_s: float = 5e-6
    jitter: float = 0.0


SUMMIT = SummitRun()

SOURCES = {
    "ranks": "arXiv 1909.11150, abstract",
    "ranks_per_node": "Summit: 6 V100 a node (4,608 nodes, 27,648 GPUs)",
    "gradient_bytes": "arXiv 1909.11150: fp16 gradients of the network, 440 MB",
    "step_s": "arXiv 1909.11150: 1.57 s a step, taken as the computation of one rank",
    "backward_share": "assumption: backward costs twice the forward pass; gradients become ready evenly within it",
    "tensors": "assumption: 72 gradient tensors, with 27,600 ranks two million requests a step",
    "tensor_groups": "assumption: 9 groups of equal bytes, one a block of the network",
    "inside_bytes_per_s": "Summit node: NVLink 2.0, two bricks of 25 GB/s each way between neighbouring GPUs",
    "inside_alpha_s": "assumption: start of one message between GPUs of a node",
    "across_bytes_per_s": "Summit node: dual-rail EDR InfiniBand, 2 x 100 Gbit/s each way; peak, no contention",
    "across_alpha_s": "assumption: start of one message between nodes, software included",
    "request_s": "assumption: rank 0 handles a million requests a second (arXiv 1810.01993 has a central "
    "controller overwhelmed by millions of messages a second)",
    "control_alpha_s": "assumption: one control message between nodes",
    "jitter": "assumption: none; the standard deviation of a rank's computation, as a share of it",
}

SENSITIVITY: dict[str, tuple[float, ...]] = {
    "across_bytes_per_s": (6.25e9, 12.5e9),
    "across_alpha_s": (1e-6, 2e-5),
    "request_s": (2e-7, 5e-6),
    "control_alpha_s": (1e-6, 5e-5),
    "backward_share": (0.5,),
    "tensor_groups": (1, 36),
    "jitter": (0.01, 0.02),
}
