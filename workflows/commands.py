"""The command line's frame: groups of verbs in the order of use, options that several verbs share, and `invoke`.

Verbs register themselves with `@verb(...)`; each gets the same sections of help: what it does, a worked example, what
comes next, its exit codes. Everything heavy is imported inside the verbs, so that help answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

__all__ = ["ClusterOption", "Debug", "Json", "Overrides", "Quiet", "Workers", "app", "invoke", "verb"]

DATA = "1. From structures to data"
TRAIN = "2. From data to a model"
LINE = "3. The whole line, and looking at results"
HELP = "4. When something is wrong"

app = typer.Typer(
    name="exitwave",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Simulate electron scattering on a cluster, stream the shards, train networks on them.\n\n"
        "The quickest way to see everything once (a few minutes on two cores):\n\n"
        "\b\n"
        "    exitwave init quickstart.yaml\n"
        "    exitwave run quickstart.yaml --out runs/first\n"
        "    (then open runs/first/report.html in a browser)\n\n"
        "The same, step by step: init, plan, simulate, verify, stage, train, evaluate, report. Every verb that is "
        "interrupted goes on where it was when the same command is given again."
    ),
    epilog=(
        "Exit codes: 0 done; 1 internal error; 2 usage or configuration; 3 finished with failed or damaged parts; "
        "75 interrupted, the same command goes on; 130 stopped at once. `exitwave VERB --help` explains each verb."
    ),
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes; errors and results remain.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Change a key of the configuration, e.g. --set scan.step_A=0.5 or --set structures.0.split=test. "
        "May be given several times.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="KIND",
        help="Where tasks run: local (worker processes on this machine; the default), inline (in this process), slurm "
        "(workers in jobs), slurm-allocation (under srun), cuda (one worker a GPU), or the address of a running Dask "
        "scheduler, tcp://HOST:PORT or tls://HOST:PORT. More in a file's `cluster:` section; see docs/slurm.md.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="Worker processes; by default one for each core."),
]

TaskTimeout = Annotated[
    float | None,
    typer.Option(
        "--task-timeout",
        min=1.0,
        metavar="SECONDS",
        help="A shard that takes longer is stopped and fails as `timeout`; by default 30 times what the longest should "
        "need, at least ten minutes.",
    ),
]
TaskMemory = Annotated[
    str | None,
    typer.Option(
        "--task-memory",
        metavar="SIZE",
        help="A shard that uses more (say 4GB) is stopped and fails as `memory`; by default what its worker may use.",
    ),
]

Verb = TypeVar("Verb", bound=Callable[..., Any])


def verb(
    name: str, *, panel: str, purpose: str, example: str, then: str, codes: str, more: str = ""
) -> Callable[[Verb], Verb]:
    """Register a verb with its help: purpose, details, a worked example, what comes next, exit codes."""
    lines = "\n".join(f"    {line}" for line in example.strip().splitlines())
    text = f"{purpose}\n\n"
    if more:
        text += f"{more}\n\n"
    text += f"[bold]Example[/bold]\n\n\b\n{lines}\n\n[bold]Next[/bold]\n\n{then}\n\n"
    text += f"[bold]Exit codes[/bold]\n\n{codes}"
    register = app.command(name, rich_help_panel=panel, short_help=purpose, help=text)

    def decorate(function: Verb) -> Verb:
        register(function)
        return function

    return decorate


def invoke(arguments: Sequence[str]) -> int:
    """Parse the arguments and run the verb. Returns its exit code; errors of use print one message and return 2."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=list(arguments), prog_name="exitwave", standalone_mode=False)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message() if not str(error) else str(error))
            return 0
        _show_usage_error(error)
        return 2
    except typer.Abort:
        print("Stopped: nothing was answered.", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def _show_usage_error(error: Any) -> None:
    """One line with what is wrong, one with where help is."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "exitwave"
    print(f"{path}: {error.format_message()}", file=sys.stderr)
    print(f"`{path} --help` shows what it takes, with an example.", file=sys.stderr)
