"""Nothing but health, the login page and its assets is answered without the token. Plain ASGI, before any body is read.

A program presents `Authorization: Bearer …` with each request. A browser presents its session's cookie; where the
request changes something, also the header `X-CSRF-Token`. An API call that may not gets 401, a page leads to /login.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote

from exitwave.workflows.service.access import COOKIE, Access
from exitwave.workflows.service.limits import App, Receive, Scope, Send, answer

__all__ = ["Guard", "cookie_of"]

_OPEN = ("/healthz", "/login", "/assets/")
_HARMLESS = ("GET", "HEAD", "OPTIONS")


def cookie_of(scope: Scope) -> str:
    """The session's cookie, empty where there is none."""
    for name, value in scope["headers"]:
        if name == b"cookie":
            try:
                found = SimpleCookie(value.decode("latin-1")).get(COOKIE)
            except CookieError:
                continue
            if found is not None:
                return found.value
    return ""


class Guard:
    """Wraps the application."""

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["path"].startswith("/api/") or scope["method"] not in _HARMLESS or not _wants_page(scope):
            await answer(
                send,
                401,
                b'{"detail": "a token is needed: Authorization: Bearer ..."}',
                (b"www-authenticate", b'Bearer realm="exitwave"'),
            )
        else:
            await answer(send, 303, b"", (b"location", f"/login?next={quote(scope['path'], safe='/')}".encode()))

    def _is_open(self, path: str) -> bool:
        return any(path == each or (each.endswith("/") and path.startswith(each)) for each in _OPEN)

    def _may(self, scope: Scope) -> bool:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if (bearer := headers.get(b"authorization")) is not None:
            return self._access.is_bearer(bearer)
        cookie = cookie_of(scope)
        if not cookie or not self._access.is_session(cookie):
            return False
        return scope["method"] in _HARMLESS or self._access.is_csrf(cookie, headers.get(b"x-csrf-token", ""))


def _wants_page(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
