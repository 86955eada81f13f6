"""What lies below the root: runs and data sets, by name. Nothing is remembered; folders are the truth.

An id is the path below the root with `~` between its parts. Ids of requests are only ever looked up among those that a
scan has found: no path is made of what a request says, so none can lead out. Links are not followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exitwave.ingest.manifest import MANIFEST_NAME
from exitwave.workflows.online_spec import SETTINGS_NAME

__all__ = ["NAME", "Kind", "Place", "find_place", "read_inside", "scan"]

Kind = Literal["pipeline", "study", "campaign", "training"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEPTH = 3  # folders of folders of runs
_MOST = 10_000
_MARKS: tuple[tuple[str, Kind], ...] = (
    ("pipeline.yaml", "pipeline"),
    ("tune.yaml", "study"),
    ("train.json", "training"),
    (MANIFEST_NAME, "campaign"),
    ("campaign.yaml", "campaign"),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One run on disk."""

    id: str
    path: Path
    kind: Kind

    @property
    def dataset(self) -> Path | None:
        """The data set that it has or is."""
        if self.kind == "training":
            return None
        return self.path if self.kind == "campaign" else self.path / "dataset"

    @property
    def training(self) -> Path | None:
        """The folder of its training; a study has many."""
        return {"pipeline": self.path / "train", "training": self.path}.get(self.kind)

    @property
    def is_online(self) -> bool:
        """Whether it trains, or trained, while its campaign runs."""
        return self.kind == "pipeline" and (self.path / "train" / SETTINGS_NAME).is_file()


def scan(root: Path) -> list[Place]:
    """All runs below `root`, by id. A run's own parts (its data set, its trainings) are not runs beside it."""
    found = []
    for place in _walk(root, (), _DEPTH):
        found.append(place)
        if len(found) == _MOST:
            break
    return sorted(found, key=lambda place: place.id)


def _walk(folder: Path, parts: tuple[str, ...], depth: int) -> Iterator[Place]:
    try:
        with os.scandir(folder) as entries:
            below = sorted(e.name for e in entries if NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in below:
        here = (*parts, name)
        kind = _kind(folder / name)
        if kind is not None:
            yield Place(id="~".join(here), path=folder / name, kind=kind)
        elif depth > 1:
            yield from _walk(folder / name, here, depth - 1)


def _kind(folder: Path) -> Kind | None:
    """None also where a mark or a part of it is a link, which could lead out of the root."""
    if any((folder / part).is_symlink() for part in ("dataset", "train")):
        return None
    return next((kind for mark, kind in _MARKS if _is_plain_file(folder / mark)), None)


def _is_plain_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def read_inside(root: Path, path: Path) -> bytes | None:
    """A regular file's bytes, None where it is none, or lies elsewhere than below `root`.

    Where it lies is asked of what was opened, so that a link that is put in its place meanwhile leads nowhere.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        real = Path(f"/proc/self/fd/{fd}").readlink()
        if not stat.S_ISREG(os.fstat(fd).st_mode) or Path(os.path.realpath(root)) not in real.parents:
            return None
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read()
    finally:
        os.close(fd)


def find_place(root: Path, id: str) -> Place | None:
    """The run of that id, looked up and not composed. None where there is none."""
    parts = id.split("~")
    if len(parts) > _DEPTH or not all(NAME.fullmatch(part) for part in parts):
        return None
    folder = root
    for part in parts:
        folder = folder / part
        if folder.is_symlink() or not folder.is_dir():
            return None
    kind = _kind(folder)
    return None if kind is None else Place(id=id, path=folder, kind=kind)
