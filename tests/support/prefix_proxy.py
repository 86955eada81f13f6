"""A reverse proxy as sites put before notebooks: everything below /PREFIX goes to one port, without the prefix."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

_HOP = {"connection", "transfer-encoding", "content-encoding", "content-length", "keep-alive", "upgrade", "host"}


class PrefixProxy:
    """A context manager; `url` is what a browser opens. Web sockets are passed on too. `missed`: what was not found."""

    def __init__(self, target: str, prefix: str) -> None:
        self.target, self.prefix = target.rstrip("/"), "/" + prefix.strip("/")
        self.url = ""
        self.missed: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if not request.path.startswith(self.prefix + "/"):
            if request.path != "/favicon.ico":
                self.missed.append(request.path)
            return web.Response(status=404, text="outside the prefix")
        path = request.raw_path[len(self.prefix) :]
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._socket(request, path)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        async with self._session.request(
            request.method, self.target + path, headers=headers, data=await request.read(), allow_redirects=False
        ) as answer:
            if answer.status == 404:
                self.missed.append(path)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())

    async def _socket(self, request: web.Request, path: str) -> web.StreamResponse:
        asked = request.headers.get("Sec-WebSocket-Protocol", "")
        protocols = [p.strip() for p in asked.split(",") if p.strip()]
        address = self.target.replace("http", "ws", 1) + path
        async with self._session.ws_connect(address, protocols=protocols, origin=self.target) as there:
            here = web.WebSocketResponse(protocols=protocols)
            await here.prepare(request)

            async def pump(source: Any, sink: Any) -> None:
                async for message in source:
                    if message.type == aiohttp.WSMsgType.TEXT:
                        await sink.send_str(message.data)
                    elif message.type == aiohttp.WSMsgType.BINARY:
                        await sink.send_bytes(message.data)
                await sink.close()

            await asyncio.wait(
                [asyncio.ensure_future(pump(here, there)), asyncio.ensure_future(pump(there, here))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            return here

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=True)
        application = web.Application()
        application.router.add_route("*", "/{tail:.*}", self._pass_on)
        self._runner = web.AppRunner(application, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{port}{self.prefix}"
        self._ready.set()

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    def __enter__(self) -> PrefixProxy:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
