"""What Ctrl-C, SIGTERM and a terminal that hangs up do.

1. The first signal sets `stop`. Work that can be cut between two units stands in a `finishing` block: it looks at
   `stop`, finishes what is in hand, and raises `InterruptedRunError`. All other work (reading, planning, measuring) is
   cut where it is, by a KeyboardInterrupt (`Cut`). Either way: exit 75, and the same command resumes.
2. The second ends the process at once with exit 130. Nothing is lost by any of these: files appear under their final
   names only whole, so that the same command resumes then, too.

A training rank is told by its launcher, which may send more than one signal (a terminal's Ctrl-C reaches the rank and
the launcher, and the launcher passes it on): there, every signal is the first one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Cut", "Interrupts", "cut_at_first_signal"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Cut(KeyboardInterrupt):
    """A KeyboardInterrupt whose exit code is ours to give.

    A plain one that passes through `exec` of a text (every data class and named tuple being imported makes one) marks
    the whole process: Python then ends it by SIGINT, whatever exit code it was given. A subclass leaves no mark.
    """


def cut_at_first_signal() -> None:
    """From here on Ctrl-C raises `Cut`, unless the process was told to ignore it. For the time before `Interrupts`."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Cut

    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP for the time of a `with` block, in the main thread."""

    def __init__(self, *, quiet: bool = False, patient: bool = False) -> None:
        self.stop = threading.Event()
        self.last_words: list[Callable[[], Any]] = []  # called before an exit at once, e.g. to kill child processes
        self._quiet = quiet
        self._patient = patient
        self._finishing: str | None = "the work in hand" if patient else None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    self._before[number] = signal.signal(number, self._handle)
        return self

    @contextlib.contextmanager
    def finishing(self, what: str) -> Iterator[None]:
        """For work that looks at `stop`; `what` it finishes before it stops, as a person is told."""
        before, self._finishing = self._finishing, what
        try:
            yield
        finally:
            self._finishing = before

    def __exit__(self, *_: object) -> None:
        if self.stop.is_set() and not self._patient:
            return  # the process is about to end, and a second signal means the same until it has
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.stop.is_set():
            self.stop.set()
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            if self._finishing is None:
                _write(f"{name}: stopping.")
                raise Cut
            if not self._quiet:
                _write(
                    f"{name}: finishing {self._finishing}, then stopping. Again: stop at once (nothing committed is "
                    "lost)."
                )
        elif not self._patient:
            for call in self.last_words:
                try:
                    call()
                except Exception:
                    continue
            show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
            _write(f"{show_cursor}Stopped at once. The same command goes on from what is committed.")
            os._exit(130)


def _write(text: str) -> None:
    """Straight to the file descriptor: a signal may come while a stream is being written."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode() if os.isatty(2) else f"{text}\n".encode())
