"""The verbs about what is stored: verify, stage, inspect, show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from exitwave.workflows.commands import DATA, Debug, Json, Quiet, verb
from exitwave.workflows.session import open_session
from exitwave.workflows.verbs_data import DatasetFolder  # its verbs stand before these in the help


@verb(
    "verify",
    panel=DATA,
    purpose="Read every byte of a data set again and compare it with its checksums.",
    example="exitwave verify data/quick",
    then="If something is damaged: the message names shard, sample and field. Delete the named file and run "
    "`exitwave simulate` again to compute that shard anew.",
    codes="0 all that is committed is whole (it is said when samples are still to come); 2 no data set there; 3 "
    "something is damaged or missing.",
)
def verify(dataset: DatasetFolder, json: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    from exitwave.ingest.verify import verify_dataset
    from exitwave.workflows.campaigns import as_document
    from exitwave.workflows.datasets import completeness, find_dataset
    from exitwave.workflows.tables import verify_table

    with open_session(json=json, quiet=quiet) as session:
        dataset = find_dataset(dataset)
        document = as_document(verify_dataset(dataset))
        found = completeness(dataset)
        if found is not None:
            document |= {"planned": found.planned, "committed": found.committed, "unfinished": found.sentence}
        session.result(document, lambda: verify_table(document))
        raise typer.Exit(0 if document["ok"] else 3)


@verb(
    "stage",
    panel=DATA,
    purpose="Copy a data set's shards to fast local storage, verified.",
    more="A shard appears in the cache only whole and with the right checksum. Called again it copies what is missing; "
    "two at once share the work of one. DATASET may be an address that fsspec opens, such as s3://bucket/data. Modes: "
    "replicate (every shard), stream (what fits; `exitwave train --cache-capacity` moves it along), partition (a share "
    "for each node). With --peers each shard is read from the data set by one node, and passed on.",
    example="exitwave stage data/quick --cache /tmp/cache --capacity 20GB\n"
    "exitwave stage data/quick --cache /tmp/cache --peers 10.0.0.1:7070,10.0.0.2:7070 --me 10.0.0.1:7070 "
    "--secret-file secret",
    then="`exitwave train TRAIN.yaml --data DATASET --cache DIR --out RUN` reads from there.",
    codes="0 staged; 2 configuration, or the capacity is too small; 3 a shard is damaged; 75 interrupted or "
    "disk full, the "
    "same command goes on.",
)
def stage(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="A data set, the RUN that holds it, or its URL.")],
    cache: Annotated[Path, typer.Option("--cache", metavar="DIR", help="The cache's folder, made if needed.")],
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="SIZE", help="At most this much, e.g. 20GB or 500MiB.")
    ] = None,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="replicate, stream or partition.")] = "replicate",
    share: Annotated[
        str | None, typer.Option("--share", metavar="K/N", help="partition: this is the K-th of N nodes.")
    ] = None,
    exchange: Annotated[
        float,
        typer.Option("--exchange", metavar="Q", min=0.0, max=1.0, help="partition: the part dealt anew each epoch."),
    ] = 0.0,
    epoch: Annotated[int, typer.Option("--epoch", metavar="E", min=0, help="partition: for this epoch.")] = 0,
    peers: Annotated[
        str | None, typer.Option("--peers", metavar="HOST:PORT,…", help="All nodes, the same list on each.")
    ] = None,
    me: Annotated[
        str | None, typer.Option("--me", metavar="HOST:PORT", help="Which of the peers this node is.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", metavar="FILE", help="The secret of the peers, for its owner only.")
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", metavar="N", min=1, max=64, help="Copies at a time; by default 4.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.config import parse_bytes
    from exitwave.workflows.staging import StageChoices, parse_share, stage_dataset

    choices = StageChoices(
        mode=mode,  # type: ignore[arg-type]  # checked there
        capacity_bytes=parse_bytes(capacity) if capacity is not None else None,
        share=None if share is None else parse_share(share),
        exchange=exchange,
        epoch=epoch,
        peers=tuple(peers.split(",")) if peers else (),
        me=me,
        secret_file=secret_file,
        in_flight=in_flight,
    )
    with open_session(json=json, quiet=quiet) as session:
        document = stage_dataset(session, dataset, cache, choices)
        session.result(document, lambda: document["message"])


@verb(
    "inspect",
    panel=DATA,
    purpose="Say what a data set, a shard or anybody's file holds: fields, shapes, units, structures, parameters.",
    more="Of HDF5, EMD, hspy, Zarr and .npy files of others it lists the arrays; --draft-map prints a mapping file for "
    "`exitwave ingest`, guessed from what stands in the file.",
    example="exitwave inspect data/quick\nexitwave inspect data/quick/shards/3f/3f9c….h5\n"
    "exitwave inspect scan12.hspy --draft-map > map.yaml",
    then="`exitwave show DATASET UID` for one sample as pictures; `exitwave ingest FILES… --map map.yaml --out D`.",
    codes="0 shown; 2 none of these, or no mapping can be guessed; 3 the file is damaged.",
)
def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A data set's folder, a shard (.h5), or an HDF5, EMD, hspy, Zarr file."),
    ],
    draft_map: Annotated[
        bool, typer.Option("--draft-map", help="Print a mapping file for `exitwave ingest` to start from.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.inspecting import draft_text, inspect_path
    from exitwave.workflows.tables import inspect_table

    with open_session(json=json, quiet=quiet) as session:
        if draft_map and not json:
            print(draft_text(file), end="")
            return
        document = inspect_path(file)
        session.result(document, lambda: inspect_table(document))


@verb(
    "show",
    panel=DATA,
    purpose="Show one sample: its parameters, and pictures of its patterns, label and other fields.",
    more="UID is a sample's id as `inspect` lists them, or `#N` for the N-th sample of the data set.",
    example="exitwave show data/quick '#0' --out sample.png\nexitwave show data/quick '#0' --out sample.html",
    then="Open the picture.",
    codes="0 shown; 2 no such sample.",
)
def show(
    dataset: DatasetFolder,
    uid: Annotated[str, typer.Argument(metavar="UID", help="A sample's id, or #N.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The picture (.png, .pdf, .svg), or a page (.html); by default sample-UID.png here.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.inspecting import show_sample
    from exitwave.workflows.tables import sample_table

    with open_session(json=json, quiet=quiet) as session:
        document: dict[str, Any] = show_sample(dataset, uid, out)
        session.result(document, lambda: sample_table(document))
