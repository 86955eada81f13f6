"""The command `exitwave`: runs a verb and turns whatever happens into an exit code and one readable message.

The verbs themselves are in `verbs_…`; this module stays light, so
that a Ctrl-C while the rest is being imported is as quiet as any other.

    0    done
    1    internal error (a fault of exitwave)
    2    usage or configuration: nothing was started
    3    finished, but with failed or damaged parts
    75   interrupted and resumable: first Ctrl-C, SIGTERM, disk full
    130  second Ctrl-C
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError
from exitwave.workflows.interrupts import cut_at_first_signal

__all__ = ["main", "run"]

_REFUSED = {
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder",
    errno.ENAMETOOLONG: "the name is too long",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Entry point of the `exitwave` command."""
    cut_at_first_signal()
    _open_closed_streams()
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Standard streams that came closed (`>&-`) lead nowhere; else a data file would get their number and text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def register_verbs() -> None:
    """Import the modules whose verbs register themselves, when a verb is to run and not before."""
    from exitwave.workflows import (  # noqa: F401
        verbs_bench,
        verbs_data,
        verbs_model,
        verbs_service,
        verbs_train,
        verbs_tune,
        verbs_views,
    )


def run(arguments: Sequence[str]) -> int:
    """Run one verb. Returns the exit code; everything a person should know has been printed."""
    debug = "--debug" in arguments
    try:
        register_verbs()
        from exitwave.workflows.commands import invoke

        return invoke(arguments)
    except BaseException as error:
        return _explain(error, arguments, debug=debug)


def _explain(error: BaseException, arguments: Sequence[str], *, debug: bool) -> int:
    """Print one message for `error` on stderr and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone: `exitwave … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        _say("Interrupted before anything was started.")
        return InterruptedRunError.exit_code
    if isinstance(error, InterruptedRunError):
        _say(f"{error}\nTo go on from here, run the same command again:\n  {command_line(arguments)}")
        return error.exit_code
    if isinstance(error, ExitwaveError):
        _say(str(error))
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _FULL:
        where = f" while writing {error.filename}" if error.filename else ""
        _say(
            f"The disk is full{where}. Nothing half-written was kept under a final name. Make room, then run the same "
            f"command again to go on:\n  {command_line(arguments)}"
        )
        return InterruptedRunError.exit_code
    if isinstance(error, OSError) and error.errno in _REFUSED and error.filename:
        _say(f"{os.fsdecode(error.filename)}: cannot be used: {_REFUSED[error.errno]}. Choose another path.")
        return 2
    if isinstance(error, OSError) and type(error).__name__ == "NotAPlainFileError":  # without its module's imports
        _say(f"{os.fsdecode(error.filename)}: cannot be read: {error.strerror}. Remove it, or put the file back.")
        return 2
    _say(_internal(error, debug=debug))
    return 1


def _internal(error: BaseException, *, debug: bool) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    head = f"exitwave failed by a fault of its own: {type(error).__name__}: {text[:500]}{place}."
    if debug:
        return head
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="exitwave-traceback-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exception(error, file=file)
        return f"{head}\nThe traceback is in {file.name}; --debug shows it."
    except OSError:
        return f"{head}\n--debug shows the traceback."


def command_line(arguments: Sequence[str]) -> str:
    """The command as typed; without `--fresh`, which would not go on but start again."""
    return shlex.join(["exitwave", *(a for a in arguments if a != "--fresh")])


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
