"""What others ask of a running controller: files in `commands/`, each one request, consumed by the controller.

| command | what the controller does |
| --- | --- |
| drain | no new tasks; what runs is finished and committed, then exit 75 |
| cancel | what runs is abandoned, at once, then exit 75; what is committed stays |
| retry | failed tasks (of the classes in `states`, or all) get a new chance |

A file appears whole (`write_atomic`), so that a reader never sees half a request, and it is removed once it was obeyed:
a controller that dies in between obeys it again, which does no harm. `drain` and `cancel` are meant for the controller
that ran when they were written (`epoch`); a later one removes them unobeyed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import disk_full_means_interrupted, read_plain, write_atomic
from exitwave.simulate.attempts import CLASSES

__all__ = ["COMMANDS_NAME", "Command", "read_commands", "write_command"]

COMMANDS_NAME = "commands"
Verb = Literal["drain", "cancel", "retry"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One request. `states`: the classes of failure that are meant, all where empty. `why`: why it is none."""

    path: Path
    verb: Verb | None
    epoch: int = 0
    states: tuple[str, ...] = field(default=())
    why: str = ""

    def done(self) -> None:
        self.path.unlink(missing_ok=True)


def write_command(dataset: Path, verb: Verb, *, epoch: int = 0, states: Collection[str] = ()) -> Path:
    """Ask for `verb`. Raises UsageError where that cannot be written or names no class of failure."""
    if unknown := set(states) - set(CLASSES):
        raise UsageError(f"--state {', '.join(sorted(unknown))}: one of {', '.join(CLASSES)} expected")
    folder = dataset / COMMANDS_NAME
    with disk_full_means_interrupted(folder):
        folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns()}-{os.getpid()}.json"
    content = {"command": verb, "epoch": epoch, "states": sorted(states), "t": time.time()}
    write_atomic(path, json.dumps(content).encode() + b"\n")
    return path


def read_commands(dataset: Path) -> list[Command]:
    """What is asked for, oldest first. What is no request has no verb, and says why."""
    try:
        paths = sorted(p for p in (dataset / COMMANDS_NAME).iterdir() if p.suffix == ".json" and p.name[0] != ".")
    except OSError:
        return []
    return [_read(path) for path in paths]


def _read(path: Path) -> Command:
    try:
        content = json.loads(read_plain(path)[:65536])
    except (OSError, ValueError, RecursionError) as error:
        return Command(path=path, verb=None, why=f"cannot be read ({error})")
    verb = content.get("command") if isinstance(content, dict) else None
    if verb not in get_args(Verb):
        return Command(path=path, verb=None, why=f"drain, cancel or retry expected, found {str(verb)[:60]!r}")
    states, epoch = content.get("states") or [], content.get("epoch", 0)
    if not isinstance(states, list) or any(s not in CLASSES for s in states) or not isinstance(epoch, int):
        return Command(path=path, verb=None, why=f"states of {', '.join(CLASSES)} expected, found {str(states)[:60]}")
    return Command(path=path, verb=cast(Verb, verb), epoch=epoch, states=tuple(states))
