"""The verb that serves: `exitwave serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exitwave.ingest.errors import UsageError
from exitwave.workflows.commands import LINE, Debug, Quiet, verb
from exitwave.workflows.session import open_session

__all__ = ["serve"]


@verb(
    "serve",
    panel=LINE,
    purpose="Serve pages and an HTTP API over all runs and data sets below a folder.",
    more="Submit campaigns and pipelines, watch them live, read failures and reports, drain, cancel and resume, from a "
    "browser or a program. What it starts goes on without it; started again it finds everything as it is. It listens "
    "on this machine only; the token is in a file that only you can read. From another machine: ssh -L 8787:localhost:"
    "8787 HOST, or a proxy that speaks TLS (--root-path, --name). The API describes itself at /openapi.json.",
    example="exitwave serve --root runs\n"
    'curl -H "Authorization: Bearer $(cat runs/.exitwave/token)" http://127.0.0.1:8787/api/runs',
    then="Open the address that it prints, and log in with the token.",
    codes="0 stopped by Ctrl-C or SIGTERM; 2 no such folder, another service has it, or the port is taken.",
)
def serve(
    root: Annotated[Path, typer.Option("--root", metavar="DIR", help="Runs and data sets are below this folder.")],
    port: Annotated[int, typer.Option("--port", metavar="P", min=0, max=65535, help="0 chooses a free one.")] = 8787,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="HOST", help="A host name that browsers may use for it, such as a proxy's."),
    ] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="/PREFIX", help="The path under which a proxy shows it.")
    ] = "",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    try:
        from exitwave.workflows.service.server import serve as run_service
    except ModuleNotFoundError as error:
        raise UsageError(f"`exitwave serve` needs {error.name}: pip install 'exitwave[service]'") from None

    with open_session(quiet=quiet, patient=True) as session:

        def ready(address: str, token: Path) -> None:
            print(f"Serving {root} at {address}", flush=True)
            session.note(f"The token is in {token}. Ctrl-C stops the service, not what it started.")

        run_service(root.resolve(), port=port, host=host, root_path=root_path, names=name or (), ready=ready)
