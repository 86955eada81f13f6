"""The verbs from structures to data: init, plan, simulate, status, failures, retry, verify, inspect, show, stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from exitwave.workflows.commands import (
    DATA,
    ClusterOption,
    Debug,
    Json,
    Overrides,
    Quiet,
    TaskMemory,
    TaskTimeout,
    Workers,
    verb,
)
from exitwave.workflows.session import open_session

CampaignFile = Annotated[
    Path, typer.Argument(metavar="CAMPAIGN.yaml", help="A campaign, or a pipeline whose `campaign:` section is used.")
]
DatasetFolder = Annotated[
    Path, typer.Argument(metavar="DATASET", help="The folder that `simulate --out` made, or the RUN that holds it.")
]


@verb(
    "init",
    panel=DATA,
    purpose="Write a commented configuration to start from.",
    example="exitwave init quickstart.yaml\nexitwave init big.yaml --template reconstruct",
    then="Read the file (every choice is explained in it), then `exitwave plan FILE` to see what it would cost, "
    "or `exitwave run FILE --out RUN` to do everything in one go.",
    codes="0 written; 2 the file exists already, or no such template.",
)
def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write; it must not exist.")],
    template: Annotated[
        str,
        typer.Option(
            "--template",
            metavar="NAME",
            help="quickstart, classify (minutes), reconstruct (an hour), or a campaign: regress, volume, seed-small.",
        ),
    ] = "quickstart",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.scaffold import write_template

    with open_session(quiet=quiet) as session:
        write_template(template, path)
        session.note(f"Wrote {path}. Next: exitwave plan {path}")


@verb(
    "plan",
    panel=DATA,
    purpose="Say what a campaign would do and cost, without simulating it.",
    more="Reads every structure, says which are rejected and why, counts samples, shards and bytes against the "
    "free disk, "
    "and estimates core-hours and duration from a short calibration (a few seconds). Refuses what could not run.",
    example="exitwave plan quickstart.yaml\nexitwave plan quickstart.yaml --set samples_per_structure=64 --json",
    then="`exitwave simulate CAMPAIGN.yaml --out DATASET`, or `exitwave run` for a pipeline.",
    codes="0 it can run (rejected structures are listed); 2 it cannot: configuration, no structure left, no "
    "room on disk.",
)
def plan(
    campaign: CampaignFile,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DATASET", help="Where it would be written; its disk is checked.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="Simulate a few samples (a minute) and show them there."),
    ] = None,
    workers: Workers = None,
    overrides: Overrides = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.campaigns import (
        crystal_plan,
        estimated_document,
        plan_document,
        read_campaign,
        resume_document,
        tell_warnings,
    )
    from exitwave.workflows.preview import write_preview
    from exitwave.workflows.tables import plan_table

    with open_session(json=json, quiet=quiet) as session:
        estimate = estimated_document(campaign, overrides or (), out=out, workers=workers) if report is None else None
        if estimate is not None:
            for text in () if json else estimate["warnings"]:
                session.note(f"note: {text}")
            session.result(estimate, lambda: plan_table(estimate))
            return
        planned = read_campaign(campaign, overrides or (), session=session)
        crystals = crystal_plan(planned, "--report") if report is not None else None
        tell_warnings(session, planned)
        document = plan_document(planned, out=out or Path(), workers=workers)
        if out is not None:
            document["resume"] = resume_document(planned, out)
        if report is not None and crystals is not None:
            document["preview"] = write_preview(crystals, report, tell=session.note).path
        session.result(document, lambda: plan_table(document))
        if report is not None:
            session.hint(f"open {report}")


@verb(
    "simulate",
    panel=DATA,
    purpose="Run a campaign: simulate its samples into a data set.",
    more="Called again on the same DATASET it goes on: what is committed is never computed twice. Another "
    "campaign on it is "
    "refused with the difference. The first Ctrl-C finishes the shards in hand, the second stops at once; both resume.",
    example="exitwave simulate quickstart.yaml --out data/quick --workers 2\n"
    "exitwave simulate quickstart.yaml --out data/quick --cluster slurm --workers 64 "
    '--set cluster.slurm.walltime="04:00:00"\n'
    "exitwave simulate quickstart.yaml --out data/one --cluster inline --set samples_per_structure=1",
    then="`exitwave status DATASET` (also from another terminal while it runs), `exitwave verify DATASET`, "
    "`exitwave train TRAIN.yaml --data DATASET --out RUN` (`exitwave init TRAIN.yaml` writes one).",
    codes="0 all committed; 2 configuration; 3 finished, some shards failed (`exitwave failures DATASET`); 75 "
    "interrupted "
    "or disk full, the same command goes on; 130 stopped at once.",
)
def simulate(
    campaign: CampaignFile,
    out: Annotated[Path, typer.Option("--out", metavar="DATASET", help="The data set's folder, made if needed.")],
    preview: Annotated[
        bool,
        typer.Option(
            "--preview", help="Before it begins: pictures of a few samples (a minute) in DATASET-preview.html."
        ),
    ] = False,
    cluster: ClusterOption = None,
    workers: Workers = None,
    task_timeout: TaskTimeout = None,
    task_memory: TaskMemory = None,
    overrides: Overrides = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.simulate.parametric import ParametricSpec
    from exitwave.workflows.campaigns import crystal_plan, exit_code_of, patience_of, read_campaign, simulate_campaign
    from exitwave.workflows.preview import write_preview
    from exitwave.workflows.slurm import cluster_of_task

    with (
        open_session(json=json, quiet=quiet) as session,
        cluster_of_task(cluster, campaign, overrides or (), out) as cluster,
    ):
        planned = read_campaign(campaign, overrides or (), session=session)
        shown = out.absolute().with_name(f"{out.absolute().name}-preview.html")
        if preview:
            made = write_preview(crystal_plan(planned, "--preview"), shown, tell=session.note)
            session.note(f"{made.samples} samples are shown in {shown}; Ctrl-C if they are not what you meant.")
        patience = patience_of(task_timeout, task_memory)
        document = simulate_campaign(session, planned, out, cluster=cluster, workers=workers, patience=patience)
        if preview:
            document["preview"] = str(shown)
        session.result(document, lambda: document["message"])
        failed = f"exitwave failures {out}"
        own = isinstance(planned.spec, ParametricSpec)
        training = campaign if planned.trains else "TRAIN.yaml"
        then = f"exitwave verify {out}" if own else f"exitwave train {training} --data {out} --out RUN"
        if not own and not planned.trains:
            then += " (`exitwave init TRAIN.yaml` writes one)"
        session.hint(failed if document["failed"] else then)
        raise typer.Exit(exit_code_of(document))


@verb(
    "status",
    panel=DATA,
    purpose="Show how far a campaign is: samples and shards by state, rate, time left.",
    more="Reads what is on disk, so it works from any terminal, while the campaign runs and after it died. Of the "
    "folder of `exitwave tune` it shows the trials.",
    example="exitwave status data/quick\nexitwave status data/quick --watch\nexitwave status STUDY --json",
    then="`exitwave failures DATASET` if shards failed; `exitwave verify DATASET` when all are committed.",
    codes="0 shown; 2 no data set there.",
)
def status(
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="A data set, or the folder of `run` or `tune`.")],
    watch: Annotated[bool, typer.Option("--watch", help="Redraw every second until it ends or Ctrl-C.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.status import show_status

    with open_session(json=json, quiet=True, patient=True) as session:
        if watch and not json:
            from exitwave.workflows.watching import watch_status

            watch_status(session, dataset)
        else:
            show_status(session, dataset)


States = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        metavar="CLASS",
        help="Only failures of this class: error, memory, timeout or killed. May be given several times.",
    ),
]


@verb(
    "failures",
    panel=DATA,
    purpose="List what failed in a campaign, why and where.",
    example="exitwave failures data/quick\nexitwave failures data/quick --state timeout --json",
    then="Mend the cause, then `exitwave retry DATASET`, or `exitwave simulate` again: only what is missing runs.",
    codes="0 shown (also when nothing failed); 2 no data set there.",
)
def failures(
    dataset: DatasetFolder, state: States = None, json: Json = False, quiet: Quiet = False, debug: Debug = False
) -> None:
    from exitwave.workflows.status import failures_of
    from exitwave.workflows.tables import failures_table

    with open_session(json=json, quiet=quiet) as session:
        rows = failures_of(dataset, states=state or ())
        session.result_list(rows, lambda: failures_table(rows))


@verb(
    "retry",
    panel=DATA,
    purpose="Run the failed shards of a campaign again.",
    more="A campaign that is running is asked to. Otherwise it is started here, where its structures can be found from "
    "the data set alone; if not, the next `exitwave simulate` on this data set tries them again.",
    example="exitwave retry data/quick\nexitwave retry data/quick --state memory --workers 1 --task-memory 8GB",
    then="`exitwave failures DATASET` lists what failed again.",
    codes="0 all committed, or asked for; 2 no data set there; 3 some failed again; 75 interrupted, the same command "
    "goes on; 130 stopped at once.",
)
def retry(
    dataset: DatasetFolder,
    state: States = None,
    cluster: ClusterOption = None,
    workers: Workers = None,
    task_timeout: TaskTimeout = None,
    task_memory: TaskMemory = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.campaigns import exit_code_of, patience_of
    from exitwave.workflows.retrying import retry_failures

    with open_session(json=json, quiet=quiet) as session:
        patience = patience_of(task_timeout, task_memory)
        document = retry_failures(
            session, dataset, states=state or (), cluster=cluster, workers=workers, patience=patience
        )
        session.result(document, lambda: document["message"])
        raise typer.Exit(exit_code_of(document))


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
