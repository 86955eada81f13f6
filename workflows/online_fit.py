"""Whether a pipeline can be trained while its campaign runs; asked before anything is planned or written."""

from __future__ import annotations

from exitwave.ingest.errors import UsageError
from exitwave.train.spec import refuse_online
from exitwave.workflows.pipeline_spec import PipelineSpec

__all__ = ["refuse_unfit_online"]


def refuse_unfit_online(spec: PipelineSpec, *, ranks: int, nodes: int | None) -> None:
    """UsageError naming what does not go with --online, and what to do."""
    if nodes is not None:
        raise UsageError("--online: it trains on this machine; leave --nodes and launch.nodes out.")
    if spec.adaptive is not None:
        raise UsageError("--online: the rounds of an adaptive campaign are trained between, not beside; leave one out")
    refuse_online(spec.train)
    if ranks > spec.train.batch:
        raise UsageError(f"--online: expected at most as many ranks as samples in a batch, {spec.train.batch}: {ranks}")
