"""The verbs from structures to data: init, plan, simulate, status, failures, retry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
