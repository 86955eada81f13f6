"""The verb `bench`: benchmarks, with every peer measured in the same run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

# their verbs stand before this one in the help: first data, then its views, then training
from exitwave.workflows import verbs_data, verbs_model, verbs_train, verbs_views  # noqa: F401
from exitwave.workflows.commands import HELP, Debug, Json, Quiet, verb


@verb(
    "bench",
    panel=HELP,
    purpose="Measure exitwave beside its peers, in one run.",
    more="allreduce: step times of the gradient engine beside DistributedDataParallel's with five bucket sizes and "
    "FSDP2's, two ranks, over the loopback interface and over links of 1 Gbit/s, 400 and 250 Mbit/s, for three models; "
    "the messages of the control plane at 2 to 512 ranks; the scaling model against 2, 4 and 8 ranks. The slower links "
    "are made of network namespaces and need root; without it they are skipped, and said so. About 7 minutes. "
    "simulate: the multislice loop on one core beside its floor (two transforms for each slice and probe) and abTEM. "
    "ingest: shuffled batches beside raw reads, litdata, webdataset and mosaicml-streaming, each after showing that an "
    "epoch of it holds every sample once; staging beside cp. A loader that is not installed is skipped, and said so. "
    "spatial: samples split over ranks beside one process: values, gradients, memory, bytes read, the published "
    "table, and the performance model beside measured steps. pipeline: the whole line, timed by its "
    "parts, beside a bare simulation and a plain training loop; about 4 minutes.",
    example="exitwave bench simulate\n"
    "exitwave bench pipeline --json\n"
    "exitwave bench ingest --mds-python mds/bin/python\n"
    "exitwave bench allreduce\n"
    "exitwave bench allreduce --link loopback --model fc-densenet-tiny --seconds 60 --json",
    then="Compare the ratios, not the times: machines differ.",
    codes="0 measured, whether or not the targets hold; 1 a rank failed; 2 no such benchmark; 75 stopped.",
)
def bench(
    what: Annotated[str, typer.Argument(metavar="allreduce|ingest|pipeline|simulate|spatial", help="What to measure.")],
    link: Annotated[
        list[str] | None,
        typer.Option("--link", metavar="NAME", help="loopback, 1gbit, 400mbit, 250mbit (all by default), 100mbit."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="fc-densenet, unet3d, small-tensors-1000 (all by default), fc-densenet-tiny, fc-densenet-small.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=1.0, help="allreduce: for each model on each link (default 8, --full 60)."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="More models or grids, more rounds; takes several times as long.")
    ] = False,
    samples: Annotated[
        int, typer.Option("--samples", min=64, help="ingest: how many of 512 KiB, once on disk for each loader.")
    ] = 1024,
    mds_python: Annotated[
        Path | None,
        typer.Option(
            "--mds-python", metavar="FILE", help="ingest: the Python of an environment with mosaicml-streaming."
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    import json as codec

    from exitwave.ingest.errors import UsageError

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    if what == "simulate":
        from exitwave.simulate.bench import bench_simulate
        from exitwave.workflows.session import open_session
        from exitwave.workflows.tables import bench_table

        with open_session(json=json, quiet=quiet) as session:
            measured = bench_simulate(full=full, note=session.note)
            session.result(measured, lambda: bench_table(measured))
        return
    if what == "pipeline":
        from exitwave.workflows.bench_pipeline import bench_pipeline
        from exitwave.workflows.session import open_session
        from exitwave.workflows.tables import bench_table

        with open_session(json=json, quiet=quiet) as session:
            measured = bench_pipeline(full=full, note=session.note)
            session.result(measured, lambda: bench_table(measured))
        return
    if what == "ingest":
        from contextlib import redirect_stdout

        from exitwave.ingest.bench import bench_ingest
        from exitwave.workflows.session import open_session
        from exitwave.workflows.tables import bench_table

        with open_session(json=json, quiet=quiet) as session:
            with redirect_stdout(sys.stderr):  # some loaders print
                measured = bench_ingest(samples=samples, mds_python=mds_python, note=session.note)
            session.result(measured, lambda: bench_table(measured))
        return
    if what == "spatial":
        from exitwave.train.bench_spatial import run_bench_spatial, spatial_table

        spatial = run_bench_spatial(full=full, say=say)
        print(codec.dumps(spatial, indent=1) if json else spatial_table(spatial))
        return
    if what != "allreduce":
        raise UsageError(f"bench: {what!r} does not exist: choose allreduce, ingest, pipeline, simulate or spatial")
    from exitwave.train.allreduce.bench import run_bench, table

    document = run_bench(links=link, models=model, seconds=seconds, full=full, say=say)
    print(codec.dumps(document, indent=1) if json else table(document))
