"""The verbs from data to a model, the whole line, and help: train, evaluate, run, report, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exitwave.ingest.errors import UsageError
from exitwave.workflows import verbs_views  # noqa: F401  (its verbs stand before these in the help)
from exitwave.workflows.commands import HELP, LINE, TRAIN, ClusterOption, Debug, Json, Overrides, Quiet, Workers, verb
from exitwave.workflows.session import open_session

Ranks = Annotated[int | None, typer.Option("--ranks", min=1, metavar="N", help="Training processes.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, metavar="N", help="Train in a job of Slurm on so many nodes.")
]
Cache = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Read shards from this cache (see `exitwave stage`).")
]
Data = Annotated[Path, typer.Option("--data", metavar="DATASET", help="The data set, or the RUN that holds it.")]


@verb(
    "train",
    panel=TRAIN,
    purpose="Train a network on a data set.",
    more="With --ranks N it starts N processes by torchrun itself; under an outer `torchrun` or `srun` it acts "
    "as the rank "
    "that it was started as. Called again on the same RUN it goes on from the last checkpoint, also with "
    "another number "
    "of ranks; another configuration is refused with the difference unless --fresh. With --nodes it submits a job to "
    "Slurm and follows it: each node stages the data set to its own disk and runs its part of the ranks; preempted or "
    "at its walltime the job leaves a checkpoint, is queued again and goes on. docs/slurm.md shows the whole of it.",
    example="exitwave train quickstart.yaml --data data/quick --out runs/a --ranks 2\n"
    "exitwave train quickstart.yaml --data data/quick --out runs/a --nodes 4 --ranks 16 --script\n"
    "torchrun --nproc-per-node 2 -m exitwave.workflows train train.yaml --data data/quick --out runs/a",
    then="`exitwave evaluate RUN --data DATASET`, then `exitwave report RUN`.",
    codes="0 trained; 1 a rank failed; 2 configuration; 3 damaged data; 75 interrupted after a checkpoint, the "
    "same command "
    "goes on; 130 stopped at once.",
)
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="TRAIN.yaml",
            help="A training, or a pipeline whose `train:` section is used; `exitwave init` writes one.",
        ),
    ],
    data: Data,
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run's folder, made if needed.")],
    ranks: Ranks = None,
    cache: Cache = None,
    cache_capacity: Annotated[
        str | None,
        typer.Option(
            "--cache-capacity", metavar="SIZE", help="Stream: keep what comes next in the cache, at most this."
        ),
    ] = None,
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            metavar="auto|DxS",
            help="D ranks with samples of their own x S ranks that share each sample; auto: what is fastest.",
        ),
    ] = "auto",
    nodes: Nodes = None,
    script: Annotated[
        bool,
        typer.Option("--script", help="With --nodes: print the job's script, RUN/.slurm/job.sh, and submit nothing."),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="With --nodes: submit the job and leave.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again: earlier checkpoints of RUN are removed.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="RUN", help="Do a training of `exitwave run --online` again, step for step."),
    ] = None,
    online: Annotated[Path | None, typer.Option("--online", hidden=True)] = None,
    overrides: Overrides = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.config import parse_bytes, rank_environment
    from exitwave.workflows.nodes_verb import NodesAsked, train_by_nodes

    limit = None if cache_capacity is None else parse_bytes(cache_capacity, "--cache-capacity")
    if limit is not None and cache is None:
        raise UsageError("--cache-capacity: it says how large the cache may be; name its folder with --cache.")
    asked = NodesAsked(nodes=nodes, script=script, detach=detach)
    if replay is not None:
        from exitwave.workflows.online import find_replay

        if nodes is not None:
            raise UsageError("--replay: it is done again on this machine; leave --nodes out.")
        replay = find_replay(replay)
    if train_by_nodes(
        asked, config, data, out, ranks=ranks, cache=cache, cache_capacity=limit, mesh=mesh, fresh=fresh,
        overrides=overrides or (), json=json, quiet=quiet,
    ):  # fmt: skip
        return
    place = rank_environment()
    if place is not None:
        from exitwave.workflows.rank import run_rank

        with open_session(json=json, quiet=quiet or place.rank > 0, patient=True) as session:
            run_rank(
                session, place, config, data, out,
                cache=cache, cache_capacity=limit, mesh=mesh, fresh=fresh, overrides=overrides or (),
                online=online, replay=replay,
            )  # fmt: skip
        return
    from exitwave.workflows.launch import train_with_ranks

    with open_session(json=json, quiet=quiet) as session:
        document = train_with_ranks(
            session,
            config,
            data,
            out,
            ranks=ranks,
            cache=cache,
            cache_capacity=limit,
            mesh=mesh,
            fresh=fresh,
            overrides=overrides or (),
            replay=replay,
        )
        session.result(document, lambda: document["message"])


@verb(
    "evaluate",
    panel=TRAIN,
    purpose="Measure a trained network on structures that it never saw, beside classical methods.",
    more="Potential over thickness, offset removed for all; each classical method has one scale, fitted on validation. "
    "Where the scan is coarser than λ/(4α), --dense gives iDPC and centre of mass a denser scan of the same dose: the "
    "same campaign simulated again with another scan.shape and scan.step_A. The aims printed are exitwave's own, those "
    "of its example `reconstruct`; a quick training may miss them.",
    example="exitwave evaluate runs/a --data data/quick --split test",
    then="`exitwave report RUN` for pictures and curves.",
    codes="0 measured; 2 no trained model, or no such split; 3 damaged data.",
)
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `train --out` made.")],
    data: Data,
    split: Annotated[
        str, typer.Option("--split", metavar="NAME", help="Which samples: test, new_prototype, val, …")
    ] = "test",
    dense: Annotated[
        Path | None, typer.Option("--dense", metavar="DATASET", help="A denser scan for the classical methods.")
    ] = None,
    ptychography: Annotated[
        Path | None,
        typer.Option("--ptychography", metavar="FILE.npz", help="Reconstructions of some samples to score beside."),
    ] = None,
    cache: Cache = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.datasets import find_dataset
    from exitwave.workflows.launch import evaluate_run
    from exitwave.workflows.tables import metrics_table

    with open_session(json=json, quiet=quiet) as session:
        document = evaluate_run(
            session, run, find_dataset(data), split=split, cache=cache, dense=dense, ptychography=ptychography
        )
        session.result(document, lambda: metrics_table(document))
        session.hint(f"exitwave report {run}")


@verb(
    "run",
    panel=LINE,
    purpose="Do the whole line: simulate, stage, train, evaluate, report.",
    more="The same configuration on the same RUN always goes on where it was; another is refused with the difference; "
    "--fresh starts again. `exitwave status RUN` watches it from another terminal. With --online the training begins "
    "when a tenth of its samples is there, and goes on while the others come; `exitwave train --replay RUN` does it "
    "again afterwards.",
    example="exitwave init quickstart.yaml\nexitwave run quickstart.yaml --out runs/first\n"
    "exitwave run quickstart.yaml --out runs/second --online",
    then="Open RUN/report.html in a browser. Change the file and run it into another RUN to compare.",
    codes="0 done; 1 internal error; 2 configuration; 3 finished, but some shards failed; 75 interrupted or "
    "disk full, the "
    "same command goes on; 130 stopped at once.",
)
def run(
    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE.yaml", help="The pipeline.")],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run's folder, made if needed.")],
    cluster: ClusterOption = None,
    workers: Workers = None,
    ranks: Ranks = None,
    nodes: Nodes = None,
    online: Annotated[bool, typer.Option("--online", help="Train while the campaign runs.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again: what an earlier run left in RUN is deleted.")
    ] = False,
    overrides: Overrides = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.pipeline import run_pipeline

    with open_session(json=json, quiet=quiet) as session:
        document = run_pipeline(
            session,
            pipeline,
            out,
            cluster=cluster,
            workers=workers,
            ranks=ranks,
            nodes=nodes,
            fresh=fresh,
            overrides=overrides or (),
            online=online,
        )
        session.result(document, lambda: document["message"])
        raise typer.Exit(int(document["exit_code"]))


@verb(
    "report",
    panel=LINE,
    purpose="Write one HTML file with results, pictures, curves and provenance.",
    more="The file holds everything in itself and needs no network. Works on a RUN of `exitwave run`, a RUN of "
    "`exitwave train`, and a DATASET alone.",
    example="exitwave report runs/first\nexitwave report data/quick --out quick.html",
    then="Open the file in a browser, or send it to somebody.",
    codes="0 written; 2 neither a run nor a data set.",
)
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN_OR_DATASET", help="What to report on.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="By default report.html in that folder.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.report import write_report

    with open_session(json=json, quiet=quiet) as session:
        path = write_report(folder, out)
        session.result({"report": str(path)}, lambda: f"Wrote {path}: open it in a browser.")


@verb(
    "doctor",
    panel=HELP,
    purpose="Check this machine: versions, threads, FFT, disk, locks, ports, GPU.",
    example="exitwave doctor\nexitwave doctor --json > doctor.json",
    then="Mend what is marked `fail`; each line says how. Then `exitwave init quickstart.yaml`.",
    codes="0 nothing failed (warnings may stand); 3 something failed.",
)
def doctor(
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Check the disk of this folder; by default here.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.doctor import examine
    from exitwave.workflows.tables import doctor_table

    with open_session(json=json, quiet=quiet) as session:
        document = examine(folder or Path())
        session.result(document, lambda: doctor_table(document))
        raise typer.Exit(0 if document["ok"] else 3)
