"""A few real steps on a slow link, recorded: the Chrome trace of two ranks. One rank, and whoever starts both."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from exitwave.train.allreduce.bench_links import open_link
from exitwave.train.allreduce.bench_rank import make, meet
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.allreduce.tuning import MEASURED_PASSES, WARM_PASSES

__all__ = ["record_timeline"]

_STEPS = WARM_PASSES + MEASURED_PASSES + 4


def record_timeline(
    grouping: str, *, overlap: str = "backward", link: str = "400mbit", model: str = "fc-densenet", batch: int = 6
) -> Any:
    """The trace of two ranks that take a few steps. Raises `UsageError` where the link cannot be made."""
    with open_link(link) as ranks, tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        out = Path(folder) / "trace.json"
        arguments = ["--model", model, "--grouping", grouping, "--overlap", overlap]
        arguments += ["--batch", str(batch), "--out", str(out)]
        ranks.run("exitwave.train.allreduce.bench_timeline", arguments, limit_s=120)
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "grouping", "overlap", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = meet(parser)
    model, x = make(options.model, options.batch)
    engine = GroupedAllreduce(model, grouping=options.grouping, overlap=options.overlap, timeline=True)
    optimizer = engine.wrap(torch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in range(_STEPS):
        optimizer.zero_grad(set_to_none=True)
        engine(x).square().mean().backward()
        optimizer.step()
    engine.state_dict()  # what overlap="step" leaves behind the last step is over
    engine.write_timeline(Path(options.out))
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
