"""A folder that is being built beside its final name, and gets that name only when it is whole.

Steps. (1) `.<name>.part/` is made beside the target, and locked: a second builder of the same target is refused, and
the lock dies with its process. (2) `key.json` in it says what is being built. The same command after a kill finds its
own key and goes on with what is there; work of another command (or torn) is thrown away. (3) What is built lies in
`.<name>.part/content`. (4) At the end everything in it is synced, `content` is renamed to the target, and the rest is
removed. So the target is there whole or not at all, whenever the process dies.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import (
    FileLock,
    disk_full_means_interrupted,
    fsync_dir,
    part_path,
    read_plain_text,
    write_atomic,
)

__all__ = ["build_beside", "build_file", "refuse_existing", "refuse_inside"]


def refuse_existing(out: Path) -> None:
    """UsageError when `out` is there already, or names nothing new (`.`); an empty folder may be built in."""
    if out.name in ("", ".."):
        raise UsageError(f"{out}: expected the name of something new, such as {out / 'new'}.")
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UsageError(f"{out}: is there already, and nothing is overwritten. Choose another --out, or remove it.")


def refuse_inside(out: Path, sources: Mapping[str, Path]) -> None:
    """UsageError when `out` lies in one of the sources, or is one: they stay as they are."""
    target = out.resolve()
    for what, source in sources.items():
        inside = source.resolve()
        if target == inside or (inside.is_dir() and inside in target.parents):
            raise UsageError(f"{out}: lies inside {what} ({source}), which stays untouched. Choose another --out.")


@contextlib.contextmanager
def build_beside(out: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """The folder in which to build `out`, which gets its name when the block ends without an exception.

    `key` (plain JSON values) says what is built: partial work is taken up again only where it is the same.
    UsageError when `out` is there already or is being built by another process; InterruptedRunError on a full disk.
    """
    refuse_existing(out)
    part = out.parent / f".{out.name}.part"
    with disk_full_means_interrupted(out):
        try:
            part.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{out}: a part of the path is a file, not a folder.") from None
        with FileLock(part / "lock"):
            _take_up(part, json.dumps(key, sort_keys=True, ensure_ascii=False, default=str))
            try:
                yield part / "content"
            except UsageError:  # the same command cannot succeed: nothing is left of it
                shutil.rmtree(part, ignore_errors=True)
                raise
            _sync_tree(part / "content")
            refuse_existing(out)
            try:
                (part / "content").rename(out)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise UsageError(f"{out}: appeared meanwhile, and nothing is overwritten.") from None
                raise
            fsync_dir(out.parent)
            shutil.rmtree(part, ignore_errors=True)


def _take_up(part: Path, key: str) -> None:
    """Leaves `part` with this key and a `content` that belongs to it.

    The other key goes first and the new one comes last: a kill between the two leaves work of no key, thrown away by
    the next call, and never half of what its own command would take up again. So does all else beside `content`.
    """
    known = part / "key.json"
    if not known.exists() or read_plain_text(known, errors="replace") != key:
        known.unlink(missing_ok=True)
        fsync_dir(part)
        for path in part.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        write_atomic(known, key.encode())
    (part / "content").mkdir(exist_ok=True)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            fd = os.open(Path(parent) / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_dir(Path(parent))


@contextlib.contextmanager
def build_file(out: Path) -> Iterator[Path]:
    """A temporary path beside `out`; the file written there gets the name `out`, which must not exist, at the end."""
    refuse_existing(out)
    with disk_full_means_interrupted(out):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{out}: a part of the path is a file, not a folder.") from None
        part = part_path(out.parent, out.name)
        try:
            yield part
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.link(part, out)
            except FileExistsError:
                raise UsageError(
                    f"{out}: is there already, and nothing is overwritten. Choose another --out."
                ) from None
        finally:
            part.unlink(missing_ok=True)
        fsync_dir(out.parent)
