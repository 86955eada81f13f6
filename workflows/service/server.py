"""The application put together, and the process that serves it: one lock, one loop, one look at the jobs a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import FileLock
from exitwave.workflows.provenance import exitwave_version
from exitwave.workflows.service import api, pages
from exitwave.workflows.service.access import Access, load_token
from exitwave.workflows.service.guard import Guard
from exitwave.workflows.service.limits import Limits, PunctualProtocol, raise_descriptor_limit
from exitwave.workflows.service.runs import Runs

__all__ = ["make_app", "serve"]

_LOOK_S = 1.0
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


def make_app(root: Path, token: str, *, hosts: Sequence[str] = _LOCAL) -> Any:
    """The ASGI application over `root`: limits, then the token, then what was asked for."""
    runs = Runs(root)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(_look_after(runs))
        yield
        watch.cancel()

    app = FastAPI(
        title="exitwave",
        version=exitwave_version(),
        description="Campaigns, pipelines and their data sets below one folder. Every call but `/healthz` needs the "
        "header `Authorization: Bearer …`.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.runs, app.state.access = runs, Access(token)
    app.include_router(api.router)
    app.include_router(pages.router)
    return Limits(Guard(app, app.state.access), hosts=hosts)


async def _look_after(runs: Runs) -> None:
    while True:
        try:
            await asyncio.to_thread(runs.jobs.reconcile)
        except Exception:  # a full disk, say: the next look may do better, and the pages must live
            logging.getLogger("exitwave.service").exception("looking after the jobs failed; it is tried again")
        await asyncio.sleep(_LOOK_S)


def serve(
    root: Path, *, port: int, host: str, root_path: str, names: Sequence[str], ready: Callable[[str, Path], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C; runs go on without it. `ready(address, token file)` is called when it answers.

    Raises UsageError where another service has the root or the port is taken.
    """
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder; `exitwave serve --root DIR` serves what is below an existing one.")
    own = root / ".exitwave"
    own.mkdir(mode=0o700, exist_ok=True)
    lock = FileLock(own / "service.lock")
    if not lock.acquire():
        raise UsageError(f"{root}: another service has this root ({lock.holder()}). Stop it, or serve another folder.")
    try:
        PunctualProtocol.most_connections = raise_descriptor_limit()
        app = make_app(root, load_token(own / "token"), hosts=[*_LOCAL, host, *names])
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            root_path=root_path,
            http=PunctualProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=32 * 1024,
        )
        _Server(config, lambda address: ready(address, own / "token")).run_or_refuse()
    finally:
        lock.release()


class _Server(uvicorn.Server):
    """uvicorn's, which says where it is when it answers, and in our words why it does not."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            address = self.servers[0].sockets[0].getsockname()
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            self._ready(f"http://{shown}:{address[1]}{self.config.root_path}")

    def run_or_refuse(self) -> None:
        """Until it is stopped. Raises UsageError where the port cannot be had."""
        with contextlib.suppress(KeyboardInterrupt):
            try:
                self.run()
            except SystemExit:
                raise UsageError(
                    f"port {self.config.port} of {self.config.host} cannot be served on: it is taken, or not ours to "
                    "take. Give another --port (0 chooses a free one)."
                ) from None
