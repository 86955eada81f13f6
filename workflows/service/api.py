"""The HTTP API: what is there, what becomes of it, and what shall become of it. Each answer is read from disk.

Errors are JSON, `{"detail": …}`: 404 no such run, 409 not in this state, 413 too large, 422 a configuration or a
request that is refused, with the same words that the command line uses.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from exitwave.ingest.errors import ExitwaveError
from exitwave.workflows.resolved import dump_yaml
from exitwave.workflows.service.live import TooManyError
from exitwave.workflows.service.runs import Conflict, Runs
from exitwave.workflows.session import compact_json

__all__ = ["router"]

RunId = Annotated[
    str, Path(min_length=1, max_length=310, description="As `GET /api/runs` names it.", examples=["my-run"])
]


class Submission(BaseModel):
    """A campaign or a pipeline, as YAML text or as the same structure in JSON."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100, description="Of the run's folder below the service's root.")
    configuration: str | dict[str, Any]
    online: bool | None = Field(
        default=None, description="Train while the campaign runs; null: if the configuration has a section `online`."
    )
    ranks: int | None = Field(default=None, ge=1, le=1024, description="Training processes; null: as it says.")


class Command(BaseModel):
    """`drain`: finish what is in hand, then stop. `cancel`: stop at once. `resume`: go on. `retry`: failures again."""

    model_config = ConfigDict(extra="forbid")

    command: Literal["drain", "cancel", "resume", "retry"]


class Said(BaseModel):
    """An error."""

    detail: str


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Said, "description": "What came is no JSON."},
    401: {"model": Said, "description": "No token, or a wrong one."},
    404: {"model": Said, "description": "No such run."},
}

_TEXT: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
}

router = APIRouter()


def _runs(request: Request) -> Runs:
    runs: Runs = request.app.state.runs
    return runs


def _document(data: Any, status: int = 200) -> Response:
    return Response(compact_json(data), status, media_type="application/json")


def _missing(id: str) -> HTTPException:
    return HTTPException(404, f"no run {id[:80]!r}; GET /api/runs lists them")


@router.get("/healthz", tags=["service"])
async def healthz() -> dict[str, bool]:
    """Whether the service answers. The only call that needs no token."""
    return {"ok": True}


@router.get("/api/runs", tags=["runs"], responses={401: _ERRORS[401]})
async def list_runs(
    request: Request,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> JSONResponse:
    """All runs below the root, newest first: `{"runs": […], "total": N}`."""
    found = await asyncio.to_thread(_runs(request).listed, offset, limit)
    return _document(found)  # type: ignore[return-value]


@router.post(
    "/api/runs",
    tags=["runs"],
    status_code=201,
    responses={
        **{status: _ERRORS[status] for status in (400, 401)},
        **{status: {"model": Said} for status in (409, 413, 422, 507)},
    },
)
async def submit(request: Request, submission: Submission) -> Response:
    """Check a configuration, write it below the root, and start it."""
    text = submission.configuration
    try:
        if not isinstance(text, str):
            text = await asyncio.to_thread(dump_yaml, text)
        facts = await asyncio.to_thread(
            _runs(request).submit, submission.name, text, online=submission.online, ranks=submission.ranks
        )
    except Conflict as error:
        raise HTTPException(409, str(error)) from None
    except (ExitwaveError, ValueError, TypeError, RecursionError) as error:
        raise HTTPException(422, str(error)[:4000]) from None
    except OSError as error:  # a full disk, a root that became read-only
        raise HTTPException(507, f"it cannot be written below the root: {error.strerror or error}") from None
    return _document(facts, 201)


@router.get("/api/runs/{id}", tags=["runs"], responses=_ERRORS)
async def get_run(request: Request, id: RunId) -> JSONResponse:
    """Everything about one run: state, progress, parts, loss curve, metrics."""
    runs = _runs(request)
    try:
        text = runs.fresh_text(id) or await asyncio.to_thread(runs.text, id)
    except LookupError:
        raise _missing(id) from None
    return Response(text, media_type="application/json")  # type: ignore[return-value]


@router.get(
    "/api/runs/{id}/events",
    tags=["runs"],
    responses={**_ERRORS, 200: {"content": {"text/event-stream": {}}}, 503: {"model": Said}},
    response_class=StreamingResponse,
)
async def watch_run(request: Request, id: RunId) -> StreamingResponse:
    """Server-sent events: `event: run` with the run's facts, at once and whenever they change."""
    runs = _runs(request)
    if await asyncio.to_thread(runs.place, id) is None:
        raise _missing(id)
    stream = runs.live.watch(id)
    try:
        first = await anext(stream)
    except TooManyError:
        raise HTTPException(503, "too many watchers") from None

    async def both() -> Any:
        yield first
        async for more in stream:
            yield more

    return StreamingResponse(
        both(), media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
    )


@router.get("/api/runs/{id}/failures", tags=["runs"], responses=_ERRORS)
async def failures(request: Request, id: RunId) -> JSONResponse:
    """What failed, why and where: `[{task, state, why, host, attempts, seconds, structures}]`."""
    try:
        return _document(await asyncio.to_thread(_runs(request).failures, id))  # type: ignore[return-value]
    except LookupError:
        raise _missing(id) from None


@router.get("/api/runs/{id}/log", tags=["runs"], responses=_TEXT)
async def log(request: Request, id: RunId) -> Response:
    """The end of what its processes printed, where the service started them."""
    try:
        return PlainTextResponse(await asyncio.to_thread(_runs(request).log, id))
    except LookupError:
        raise _missing(id) from None


@router.get("/api/runs/{id}/newest", tags=["runs"], responses=_ERRORS)
async def newest(request: Request, id: RunId) -> JSONResponse:
    """The newest sample as pictures (data URIs): `{uid, formula, pictures: [{caption, src}]}`, empty where none is."""
    try:
        return _document(await asyncio.to_thread(_runs(request).newest, id))  # type: ignore[return-value]
    except LookupError:
        raise _missing(id) from None


@router.post(
    "/api/runs/{id}/commands",
    tags=["runs"],
    status_code=202,
    responses={**_ERRORS, 409: {"model": Said}, 413: {"model": Said}, 422: {"model": Said}},
)
async def command(request: Request, id: RunId, command: Command) -> Response:
    """Ask for something; the answer is the run's facts afterwards."""
    try:
        facts = await asyncio.to_thread(_runs(request).command, id, command.command)
    except LookupError:
        raise _missing(id) from None
    except Conflict as error:
        raise HTTPException(409, str(error)) from None
    return _document(facts, 202)


@router.get("/metrics", tags=["service"], responses={401: _ERRORS[401]}, response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    """For Prometheus."""
    return PlainTextResponse(await asyncio.to_thread(_runs(request).metrics), media_type="text/plain; version=0.0.4")
