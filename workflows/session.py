"""One run of a verb: where its words go, and what stops it.

Results go to stdout; notes and progress go to stderr. With `--json` stdout carries one JSON document and nothing else,
whatever a library prints: file descriptor 1 points to stderr while the verb works. `--quiet` silences notes and
progress, never errors or results.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from exitwave.ingest.errors import InterruptedRunError
from exitwave.workflows.interrupts import Interrupts
from exitwave.workflows.progress import progress_view

__all__ = ["Session", "compact_json", "json_text", "open_session"]


class Session:
    """What a verb needs to talk and to be stopped."""

    def __init__(self, *, json: bool, quiet: bool, interrupts: Interrupts, stdout: int) -> None:
        self.json = json
        self.quiet = quiet
        self.interrupts = interrupts
        self.stop = interrupts.stop
        self.finishing = interrupts.finishing
        self._stdout = stdout

    def note(self, text: str) -> None:
        """A line for a person, on stderr."""
        if not self.quiet:
            with suppress(OSError):  # a terminal that hung up must not end the work that it started
                print(text, file=sys.stderr, flush=True)

    def hint(self, command: str) -> None:
        """What to do next, after a result: for a person who reads along, never for a program."""
        if not self.json:
            self.note(f"Next: {command}")

    def result(self, document: Mapping[str, Any], show: Callable[[], object] | None = None) -> None:
        """The verb's result: the document with `--json`, else what `show` returns, printed by rich."""
        self._print(document, show)

    def _print(self, document: Any, show: Callable[[], object] | None) -> None:
        if self.json:
            data = (json_text(document) + "\n").encode()
            while data:
                data = data[os.write(self._stdout, data) :]
        elif show is not None:
            shown = show()
            if shown is not None:
                from rich.console import Console

                Console(soft_wrap=isinstance(shown, str), highlight=False).print(shown)

    def result_list(self, rows: list[Any], show: Callable[[], object]) -> None:
        """As `result`, for a document that is a list."""
        self._print(rows, show)

    def progress(self) -> AbstractContextManager[Callable[[Mapping[str, Any]], None]]:
        """Feed events to what this yields."""
        return progress_view(quiet=self.quiet)


@contextmanager
def open_session(*, json: bool = False, quiet: bool = False, patient: bool = False) -> Iterator[Session]:
    """Signals handled, stdout kept clean for `--json`; both put back at the end."""
    stdout = 1
    if json:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(2, 1)
    try:
        with Interrupts(quiet=quiet and patient, patient=patient) as interrupts:
            yield Session(json=json, quiet=quiet, interrupts=interrupts, stdout=stdout)
    except KeyboardInterrupt:  # not for the command line's parser to see: it has an exit code of its own for it
        raise InterruptedRunError("Interrupted; nothing half-done was kept.") from None
    finally:
        sys.stdout.flush()
        if json:
            os.dup2(stdout, 1)
            os.close(stdout)


def json_text(document: Any) -> str:
    """`document` as strict JSON: what is not a finite number becomes null, NumPy scalars become numbers."""
    return json.dumps(_plain(document), indent=2, ensure_ascii=False, allow_nan=False)


def compact_json(document: Any) -> str:
    """As `json_text`, on one line and without spaces: for the network."""
    return json.dumps(_plain(document), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
