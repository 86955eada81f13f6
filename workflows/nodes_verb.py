"""`exitwave train` where nodes are asked for: which of its parts this process is to play.

| where it was started | what it is |
| --- | --- |
| by torchrun, or as one of the ranks' tasks of `srun` | a rank: nothing of this here |
| as a task of `srun`, with `--nodes` | that node's agent |
| in an allocation, outside a step, with `--nodes` | `srun` with itself on each node |
| elsewhere, with `--nodes` or `launch.nodes` | the one who submits the job and follows it |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exitwave.ingest.errors import UsageError
from exitwave.workflows.config import in_allocation, place_of_node, rank_environment
from exitwave.workflows.nodes_spec import ranks_a_node
from exitwave.workflows.session import open_session

__all__ = ["NodesAsked", "train_by_nodes"]


@dataclass(frozen=True, kw_only=True)
class NodesAsked:
    """The options that have to do with nodes."""

    nodes: int | None
    script: bool
    detach: bool


def train_by_nodes(
    asked: NodesAsked, config: Path, data: Path, out: Path, *, ranks: int | None, cache: Path | None,
    cache_capacity: int | None, mesh: str, fresh: bool, overrides: Sequence[str], json: bool, quiet: bool,
) -> bool:  # fmt: skip
    """Whether the training was one of several nodes; then it is done, as far as this process goes."""
    if asked.nodes is None and rank_environment() is not None:
        return False
    from exitwave.workflows.rank import check_mesh
    from exitwave.workflows.train_config import read_training

    training = read_training(config, overrides)
    nodes = asked.nodes or training.launch.nodes
    if nodes is None:
        if asked.script or asked.detach:
            raise UsageError("--script, --detach: they go with --nodes, or with launch.nodes in the file.")
        return False
    if asked.nodes is not None and rank_environment() is not None and place_of_node(nodes) is None:
        raise UsageError("--nodes: this process is a rank of torchrun already; leave --nodes out.")
    shape = check_mesh(mesh, ranks)
    total = ranks or (shape[0] * shape[1] if shape is not None else max(training.ranks or 1, nodes))
    try:
        ranks_a_node(total, nodes)
    except ValueError as error:
        raise UsageError(f"--nodes: {error}.") from None
    on_node = str(cache) if cache is not None else (training.launch.cache if training.ranks is not None else None)
    place = place_of_node(nodes) if asked.nodes is not None else None
    if place is not None:
        from exitwave.workflows.nodes_agent import NodeTraining, run_node

        with open_session(json=json, quiet=quiet, patient=True) as session:
            document = run_node(
                session,
                place,
                NodeTraining(
                    spec=training.spec, data=data, out=out.absolute(), ranks=total, cache=on_node,
                    cache_capacity=cache_capacity, mesh=mesh, fresh=fresh,
                ),
            )  # fmt: skip
            if document is not None:
                session.result(document, lambda: document["message"])
        return True
    if asked.nodes is not None and in_allocation() and not asked.script:
        from exitwave.workflows.nodes_agent import task_of_node

        task_of_node(sys.argv[1:], nodes)
    from exitwave.workflows.nodes_submit import node_job, train_on_nodes

    with open_session(json=json, quiet=quiet) as session:
        job = node_job(
            out.name, training.launch, spec=training.spec, data=data, out=out, nodes=nodes, ranks=total,
            cache=str(cache) if cache is not None else training.launch.cache, cache_capacity=cache_capacity, mesh=mesh,
            fresh=fresh,
        )  # fmt: skip
        result = train_on_nodes(session, job, script_only=asked.script, detach=asked.detach)
        session.result(result, lambda: result["message"])
    return True
