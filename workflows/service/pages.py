"""The pages: small templates that a script fills from the API. Text is escaped; nothing is loaded from elsewhere."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Path, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from exitwave.workflows.scaffold import template_names, template_text
from exitwave.workflows.service.access import COOKIE, SESSION_S, Access
from exitwave.workflows.service.guard import cookie_of

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

_environment = Environment(
    loader=PackageLoader("exitwave.workflows.service", "assets"), autoescape=True, undefined=StrictUndefined
)
_ASSETS = {"service.css": "text/css", "service.js": "text/javascript"}
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"


def _root(request: Request) -> str:
    """The path under which a proxy shows the service; empty without one."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    access: Access = request.app.state.access
    cookie = cookie_of(request.scope)
    csrf = access.csrf(cookie) if cookie and access.is_session(cookie) else ""
    html = _environment.get_template(template).render(csrf=csrf, root=_root(request), **values)
    return HTMLResponse(html, status, headers={"cache-control": "no-store"})


@router.get("/")
async def runs(request: Request) -> HTMLResponse:
    return _page(request, "runs.html.j2")


@router.get("/submit")
async def submit(request: Request) -> HTMLResponse:
    return _page(request, "submit.html.j2", templates=template_names())


@router.get("/templates/{name}")
async def template(name: Annotated[str, Path(max_length=60)]) -> PlainTextResponse:
    if name not in template_names():
        raise HTTPException(404, "no such template")
    return PlainTextResponse(template_text(name))


@router.get("/runs/{id}")
async def run(request: Request, id: Annotated[str, Path(max_length=310)]) -> HTMLResponse:
    if await asyncio.to_thread(request.app.state.runs.place, id) is None:
        raise HTTPException(404, "no such run")
    return _page(request, "run.html.j2", id=id)


@router.get("/runs/{id}/report")
async def report(request: Request, id: Annotated[str, Path(max_length=310)]) -> Response:
    try:
        html = await asyncio.to_thread(request.app.state.runs.report, id)
    except LookupError:
        raise HTTPException(404, "no such run") from None
    if html is None:
        raise HTTPException(404, "no report yet")
    return HTMLResponse(html, headers={"content-security-policy": _REPORT_POLICY})


@router.get("/assets/{name}")
async def asset(name: str) -> Response:
    if name not in _ASSETS:
        raise HTTPException(404, "no such asset")
    text = (resources.files("exitwave.workflows.service") / "assets" / name).read_text(encoding="utf-8")
    return Response(text, media_type=_ASSETS[name], headers={"cache-control": "no-cache"})


@router.get("/login")
async def login(request: Request, next: str = "/") -> HTMLResponse:
    return _page(request, "login.html.j2", next=next, wrong=False)


@router.post("/login")
async def logged_in(request: Request) -> Response:
    try:
        form = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=10)
    except ValueError:
        raise HTTPException(400, "more fields than a login has") from None
    token, next = form.get("token", [""])[0], form.get("next", ["/"])[0]
    access: Access = request.app.state.access
    if not access.is_token(token.strip()):
        return _page(request, "login.html.j2", 401, next=next, wrong=True)
    root = _root(request)
    answer = RedirectResponse(root + _local(next), 303)
    answer.set_cookie(
        COOKIE,
        access.open_session(),
        max_age=SESSION_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path=root or "/",
    )
    return answer


def _local(path: str) -> str:
    """Where to go after the login: a path of ours, never another site."""
    if not path.startswith("/") or path.startswith(("//", "/\\")) or any(ord(c) < 33 for c in path):
        return "/"
    return path


@router.post("/logout")
async def logout(request: Request) -> Response:
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, path=_root(request) or "/")
    return answer
