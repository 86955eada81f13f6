"""The verb `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exitwave.workflows.commands import LINE, ClusterOption, Debug, Json, Overrides, Quiet, Workers, verb
from exitwave.workflows.session import open_session


@verb(
    "tune",
    panel=LINE,
    purpose="Search for the best hyperparameters: many short trainings on one data set.",
    more="The pipeline's `tune:` section says what is searched (dotted keys of the file, each with a range), how many "
    "trials, how long each of them trains. The data set is simulated once; then each worker of the cluster trains one "
    "trial at a time, and trials that fall behind are given up. The same command goes on where it was: trials that "
    "ended are not run again, the others go on from their checkpoints. A larger tune.trials adds trials; any other "
    "change of the search is refused.",
    example="exitwave tune quickstart.yaml --out tuned --set tune.trials=12 --set tune.budget='{steps: 200}' \\\n"
    "    --set tune.space='{train.optimizer.lr: {log_uniform: [1e-4, 1e-2]}}'",
    then="Open STUDY/report.html. `exitwave evaluate STUDY/trials/N --data STUDY` measures the best trial; "
    "`exitwave run STUDY/best.yaml --out RUN` runs the whole line with its values.",
    codes="0 searched; 2 configuration, or another search is in STUDY; 3 no trial was finished, or some failed by "
    "damage (a loss that is not finite is an answer, and no damage); 75 interrupted, every trial at a checkpoint, the "
    "same command goes on; 130 stopped at once.",
)
def tune(
    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE.yaml", help="A pipeline with a `tune:` section.")],
    out: Annotated[Path, typer.Option("--out", metavar="STUDY", help="The search's folder, made if needed.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DATASET", help="Search on this data set instead of simulating one."),
    ] = None,
    cluster: ClusterOption = None,
    workers: Workers = None,
    overrides: Overrides = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.tune import tune_pipeline

    with open_session(json=json, quiet=quiet) as session:
        document = tune_pipeline(
            session, pipeline, out, data=data, cluster=cluster, workers=workers, overrides=overrides or ()
        )
        session.result(document, lambda: document["message"])
        raise typer.Exit(int(document["exit_code"]))
