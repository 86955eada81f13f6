"""What a request may be: who it says it is for, how large, how slow. Plain ASGI and uvicorn; the application sees none.

A request without a token can cost no more than its headers: bodies are counted as they come and cut at the limit,
connections that send no whole request in time are closed, and there are never more of them than file descriptors.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MOST_BYTES", "Limits", "PunctualProtocol", "answer", "raise_descriptor_limit"]

MOST_BYTES = 1 << 20
MOST_HEADER_BYTES = 32 << 10
REQUEST_S = 10.0

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
)


class Limits:
    """Wraps the application."""

    def __init__(self, app: App, *, hosts: Sequence[str], most_bytes: int = MOST_BYTES) -> None:
        """`hosts`: names that the header Host may give (a page of another site must not reach us by rebinding)."""
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._most = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or _name(hosts[0]) not in self._hosts:
            await _refuse(send, 421, "this service does not answer to that host name")
            return
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
            await _refuse(send, 431, f"at most {MOST_HEADER_BYTES} bytes of headers are taken")
            return
        sizes = [value for name, value in headers if name == b"content-length"]
        if any(not size.isdigit() or int(size) > self._most for size in sizes):
            await _refuse(send, 413, f"at most {self._most} bytes are taken")
            return
        if len(sizes) > 1 or (sizes and any(name == b"transfer-encoding" for name, _ in headers)):
            await _refuse(send, 400, "one length is expected, given in one way")  # a proxy may read the other one
            return
        counted, started = 0, False

        async def receive_some() -> Message:
            nonlocal counted
            message = await receive()
            if message["type"] == "http.request":
                counted += len(message.get("body", b""))
                if counted > self._most:
                    return {"type": "http.disconnect"}
            return message

        async def send_safely(message: Message) -> None:
            nonlocal started
            if counted > self._most and not started:
                return  # whatever it makes of half a body
            if message["type"] == "http.response.start":
                started = True
                own = {name for name, _ in message.get("headers", ())}
                message["headers"] = [*message.get("headers", ()), *(h for h in _HEADERS if h[0] not in own)]
            await send(message)

        try:
            await self._app(scope, receive_some, send_safely)
        except Exception:
            if counted <= self._most:
                raise
        if counted > self._most and not started:
            await _refuse(send, 413, f"at most {self._most} bytes are taken")


def _name(host: bytes) -> str:
    """Without the port: `localhost:8787`, `[::1]:8787`."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[: text.find("]") + 1]
    return text.rsplit(":", 1)[0] if ":" in text else text


async def _refuse(send: Send, status: int, why: str) -> None:
    await answer(send, status, f'{{"detail": "{why}"}}'.encode(), (b"connection", b"close"))


async def answer(send: Send, status: int, body: bytes, header: tuple[bytes, bytes]) -> None:
    """A whole answer (JSON, where there is a body) that the application has no part in."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), header, *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class PunctualProtocol(H11Protocol):
    """HTTP/1.1 whose requests must be whole in time, and of whose connections there are never too many."""

    most_connections = 512
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
            return
        self._deadline = self.loop.call_later(REQUEST_S, self._too_late)

    def data_received(self, data: bytes) -> None:
        """A deadline runs from the first byte of a request to its last; also of a second one, and of a body."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._deadline is None and not self.transport.is_closing():
                self._deadline = self.loop.call_later(REQUEST_S, self._too_late)
        else:
            self._no_deadline()

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_deadline()
        super().connection_lost(exc)


def raise_descriptor_limit() -> int:
    """As many open files as this process may have; returns how many connections leave room for the rest."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(32, min(1024, soft - 256))
