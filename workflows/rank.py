"""One rank of a training: what `exitwave train` does when torchrun or srun started it.

A rank that fails writes its error to RUN/rank-errors/rank-N.json before it leaves, so that the launcher can show one
readable message instead of every rank's traceback.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.files import read_plain_text, write_atomic
from exitwave.ingest.processes import die_with_parent, keep_freed_memory
from exitwave.workflows.config import RankEnvironment, prefer_own_interface
from exitwave.workflows.datasets import find_dataset, require_split
from exitwave.workflows.session import Session

__all__ = ["RANK_ERRORS", "check_mesh", "clear_rank_errors", "read_rank_errors", "run_rank"]

RANK_ERRORS = "rank-errors"


def run_rank(
    session: Session,
    place: RankEnvironment,
    config: Path,
    data: Path,
    out: Path,
    *,
    cache: Path | None,
    cache_capacity: int | None = None,
    mesh: str,
    fresh: bool,
    overrides: Sequence[str],
    online: Path | None = None,
    replay: Path | None = None,
) -> None:
    """Train as the rank at `place`; leaves an error behind as a file and raises it."""
    die_with_parent()
    if place.launcher == "srun":
        prefer_own_interface()
    try:
        if place.job:
            out.mkdir(parents=True, exist_ok=True)  # where the ranks meet by a file; torch would wait for it in silence
        _train(session, place, config, data, out, cache=cache, cache_capacity=cache_capacity, mesh=mesh,
               fresh=fresh, overrides=overrides, online=online, replay=replay)  # fmt: skip
    except BaseException as error:
        with suppress(OSError):
            _write_error(out, place.rank, error)
        raise


def _train(
    session: Session,
    place: RankEnvironment,
    config: Path,
    data: Path,
    out: Path,
    *,
    cache: Path | None,
    cache_capacity: int | None = None,
    mesh: str,
    fresh: bool,
    overrides: Sequence[str],
    online: Path | None = None,
    replay: Path | None = None,
) -> None:
    from exitwave.workflows.train_config import read_training

    shape = check_mesh(mesh, place.world_size)
    training = read_training(config, overrides)
    data = find_dataset(data)
    if online is None:
        require_split(data, training.spec.train_split)
    from exitwave.train.mesh import RankInfo
    from exitwave.train.online import read_online
    from exitwave.train.spatial_mesh import mesh_of
    from exitwave.train.trainer import train

    keep_freed_memory()
    arriving = read_online(online, replay)
    info = RankInfo(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        init_method=place.init_method(out),
        attempt=place.attempt,
    )
    parallel = mesh_of(training.spec, shape, data)
    if place.ours or place.rank > 0:
        train(
            training.spec, data=data, out=out, rank_info=info, parallel=parallel, cache=cache,
            cache_capacity=cache_capacity, fresh=fresh, online=arriving,
            stop=session.stop.is_set,
        )  # fmt: skip
        return
    with session.progress() as feed:
        result = train(
            training.spec, data=data, out=out, rank_info=info, parallel=parallel, cache=cache,
            cache_capacity=cache_capacity, fresh=fresh, online=arriving,
            emit=feed,
            stop=session.stop.is_set,
        )  # fmt: skip
    from exitwave.workflows.launch import training_document

    document = training_document(out, result)
    session.result(document, lambda: document["message"])


def check_mesh(mesh: str, world_size: int | None) -> tuple[int, int] | None:
    """(D, S) of "DxS", None of "auto". UsageError for anything else, or when D x S is not the number of ranks."""
    if mesh == "auto":
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}x[1-9][0-9]{0,8}", mesh):
        raise UsageError(
            f"--mesh {mesh}: expected auto or DxS, for example 2x1 for two data-parallel ranks, 1x2 for samples that "
            "two ranks share."
        )
    d, s = (int(part) for part in mesh.split("x"))
    if world_size is not None and d * s != world_size:
        raise UsageError(f"--mesh {mesh}: {d} x {s} ranks, but there are {world_size} ranks.")
    return d, s


def clear_rank_errors(out: Path) -> None:
    """Forget the errors of an earlier attempt."""
    shutil.rmtree(out / RANK_ERRORS, ignore_errors=True)


def read_rank_errors(out: Path) -> list[dict[str, Any]]:
    """What the ranks left behind, the cause first: those that only lost contact with another come last."""
    errors = []
    for path in sorted((out / RANK_ERRORS).glob("rank-*.json")):
        with suppress(OSError, ValueError):
            errors.append(json.loads(read_plain_text(path)))
    return sorted(errors, key=_blame)


def _blame(error: Mapping[str, Any]) -> tuple[bool, bool, float]:
    lost = "lost contact" in str(error.get("message", ""))
    return lost, error.get("exit_code") == InterruptedRunError.exit_code, float(error.get("t", 0))


def _write_error(out: Path, rank: int, error: BaseException) -> None:
    known = isinstance(error, ExitwaveError)
    code = error.exit_code if isinstance(error, ExitwaveError) else 1
    if isinstance(error, SystemExit) and not error.code:
        return
    record = {
        "rank": rank,
        "t": time.time(),
        "exit_code": code,
        "kind": type(error).__name__,
        "message": str(error) if known else f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }
    folder = out / RANK_ERRORS
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"rank-{rank}.json", json.dumps(record).encode())
