"""Who is missing: heartbeats, progress notes, and the wait that never hangs.

Every rank posts a small note on the transport's board a few times within the time limit: a beat number, how far it is
and what it lacks. A rank that waits for a collective looks at the notes now and then:

1. after a quarter of the limit it warns, naming the ranks and tensors that are missing;
2. at the limit it posts the verdict as the board's failure note and raises `StallError`;
3. a rank that finds a failure note raises `StallError` with the same words, where it waits or at its next call;
4. when a collective breaks (a peer's connection closed), the rank watches the beats for a moment to name the rank that
   stopped, posts the verdict and raises.

So a failing rank fails all ranks soon, and all say the same. `explain` is pure.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from exitwave.ingest.errors import ExitwaveError
from exitwave.train.transport import Board, Handle, TransportError

__all__ = ["Progress", "StallError", "StallWarning", "Watch", "explain"]

T = TypeVar("T")
_SHOWN = 8  # names or ranks spelt out in a message


class StallError(ExitwaveError):
    """A reduction cannot end: a rank died, never submitted a tensor, or failed itself."""


class StallWarning(UserWarning):
    """A reduction takes long; the message names whom it waits for."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One rank's note: how far it is, and what it has not submitted of the reduction under way."""

    step: int  # reductions finished
    phase: str  # "idle", "backward", "waiting", "failed", "left"
    missing: tuple[str, ...] = ()  # tensors of the next reduction that this rank has not submitted
    submitted: tuple[str, ...] = ()  # tensors that this rank waits for, where ranks choose what to submit
    beat: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Progress:
        raw = json.loads(text)
        return cls(**{**raw, "missing": tuple(raw["missing"]), "submitted": tuple(raw["submitted"])})


def explain(
    *,
    what: str,
    own: Progress,
    waited_s: float,
    rank: int,
    notes: Sequence[Progress | None],
    silent_s: Sequence[float | None],
) -> str:
    """The sentence that names the missing ranks and tensors, as rank `rank` (whose note is `own`) sees them.

    `notes[r]`: rank r's last note, None if it never wrote one. `silent_s[r]`: seconds without a new beat when that is
    so long that the rank must be gone, else None.
    """
    reasons = []
    for other, (note, silent) in enumerate(zip(notes, silent_s, strict=True)):
        if other == rank:
            continue
        if note is None:
            reasons.append(f"rank {other} never showed a sign of life")
        elif note.phase == "left":
            reasons.append(f"rank {other} has left (at step {note.step})")
        elif silent is not None:
            without = f", missing {_names(note.missing)}" if note.missing else ""
            reasons.append(f"rank {other} died: no sign of life for {silent:.1f} s (at step {note.step}{without})")
        else:
            lacks = note.missing or tuple(name for name in own.submitted if name not in note.submitted)
            if note.step < own.step or (note.step == own.step and lacks):
                instead = f", waits for {_names(note.submitted)}" if note.submitted else ""
                absent = _names(lacks) if lacks else "everything"
                place = f"at step {note.step}, {note.phase}{instead}"
                reasons.append(f"rank {other} is alive but has not submitted {absent} ({place})")
    because = "; ".join(reasons[:_SHOWN]) + (f"; … {len(reasons) - _SHOWN} more ranks" if len(reasons) > _SHOWN else "")
    because = because or "every other rank is alive and has submitted its part; the network may be slow or blocked"
    return f"rank {rank} waits since {waited_s:.1f} s for {what} (step {own.step}): {because}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", … ({len(names)} tensors)" if len(names) > _SHOWN else "")


class Patience:
    """One wait: rules 1 to 3 at each `tick`."""

    def __init__(self, watch: Watch, what: Callable[[], str]) -> None:
        self.begun = time.monotonic()
        self._watch = watch
        self._what = what
        self._warned = False

    def tick(self) -> None:
        """Raise `StallError` when it is time to; warn before."""
        watch = self._watch
        watch.check(reread=True)
        waited = time.monotonic() - self.begun
        left = False
        with contextlib.suppress(TransportError):  # without the store the collective may still end
            notes, silent = watch.look()
            left = any(n is not None and n.phase == "left" and s for n, s in zip(notes, silent, strict=True))
        if waited > watch.timeout_s or left:
            limit = "" if left else f". Stopped after the limit of {watch.timeout_s:g} s"
            watch.fail(StallError(watch.explain(self._what(), waited) + limit))
        if waited > watch.timeout_s / 4 and not self._warned:
            self._warned = True
            warnings.warn(watch.explain(self._what(), waited), StallWarning, stacklevel=4)


class Watch:
    """Posts this rank's notes from a thread, and waits for handles on its behalf.

    `snapshot` is called from the thread and says how far this rank is (its beat is filled in here). Close the watch, or
    let the process end: an exit hook stops the thread in time.
    """

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        snapshot: Callable[[], Progress],
    ) -> None:
        self._left = threading.Event()
        self._process = os.getpid()
        self.timeout_s = timeout_s
        self.interval_s = min(max(timeout_s / 20, 0.1), 2.0)
        self._board = board
        self._rank = rank
        self._keys = [f"progress/{r}" for r in range(size)]
        self._snapshot = snapshot
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> (beat, when it was first seen here)
        self._failure: str | None = None
        self._post("idle")
        self._thread = threading.Thread(
            target=_beat, args=(weakref.ref(self), self._left, self.interval_s), daemon=True
        )
        self._thread.start()
        _OPEN.add(self)

    # -- what the engine calls

    def wait(self, handle: Handle[T], what: Callable[[], str]) -> T:
        """`handle.wait`, with rules 1 to 4. `what` names the collective for messages."""
        patience = self.patience(what)
        while True:
            try:
                return handle.wait(self.interval_s)
            except TimeoutError:
                patience.tick()
            except TransportError as error:
                self._broken(error, what(), patience.begun)

    def patience(self, what: Callable[[], str]) -> Patience:
        """For a wait of several collectives: call its `tick` between them."""
        return Patience(self, what)

    def check(self, *, reread: bool = False) -> None:
        """Rule 3: raise when some rank, this one included, has failed."""
        if self._failure is None and reread:
            self._read_failure()
        if self._failure is not None:
            raise StallError(self._failure)

    def fail(self, error: ExitwaveError) -> None:
        """Tell all ranks, then raise `error` here (or the failure that was posted first)."""
        if self._failure is None:
            with contextlib.suppress(TransportError):
                if self._board.read(["failure"])[0] is None:
                    self._board.post("failure", str(error))
                self._post("failed")
            self._failure = str(error)
        raise error

    def close(self) -> None:
        """Stop the beats; say so."""
        _OPEN.discard(self)
        if os.getpid() != self._process:  # a forked child that ends: this rank goes on
            return
        if not self._left.is_set():
            self._left.set()
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=5)
            with contextlib.suppress(TransportError):
                self._post("left")

    def __del__(self) -> None:
        self._left.set()

    # -- inside

    def beat(self) -> None:
        """One beat of the thread."""
        with contextlib.suppress(TransportError):
            self._post(None)
            self._read_failure()

    def _post(self, phase: str | None) -> None:
        now = self._snapshot()
        self._beat += 1
        self._board.post(self._keys[self._rank], replace(now, beat=self._beat, phase=phase or now.phase).to_json())

    def _read_failure(self) -> None:
        with contextlib.suppress(TransportError):
            self._failure = self._failure or self._board.read(["failure"])[0]

    def look(self) -> tuple[list[Progress | None], list[float | None]]:
        """Read all notes. A rank is silent when its beat stood still for four intervals of ours."""
        texts = self._board.read(self._keys)
        notes = [None if text is None else Progress.from_json(text) for text in texts]
        now = time.monotonic()
        silent: list[float | None] = []
        for rank, note in enumerate(notes):
            beat = note.beat if note else 0
            if self._seen.get(rank, (-1, 0.0))[0] != beat:
                self._seen[rank] = (beat, now)
            still = now - self._seen[rank][1]
            silent.append(still if still > 4 * self.interval_s else None)
        return notes, silent

    def explain(self, what: str, waited_s: float) -> str:
        own = self._snapshot()
        try:
            notes, silent = self.look()
        except TransportError as error:
            return f"rank {self._rank} waits since {waited_s:.1f} s for {what} (step {own.step}): {error}"
        return explain(what=what, own=own, waited_s=waited_s, rank=self._rank, notes=notes, silent_s=silent)

    def _broken(self, error: TransportError, what: str, begun: float) -> None:
        """Rule 4: find out who stopped, for as long as it takes to tell."""
        until = time.monotonic() + 6 * self.interval_s
        why = str(error)
        while time.monotonic() < until:
            self.check(reread=True)
            try:
                notes, silent = self.look()
            except TransportError as store_error:
                why = f"{why}; {store_error} (the rank that holds the store may be the one that died)"
                break
            gone = [r for r, n in enumerate(notes) if silent[r] is not None or (n is not None and n.phase == "left")]
            if any(r != self._rank for r in gone):
                break
            time.sleep(self.interval_s / 4)
        self.fail(StallError(f"{self.explain(what, time.monotonic() - begun)}. {why}"))


def _beat(watch: weakref.ref[Watch], left: threading.Event, interval_s: float) -> None:
    while not left.wait(interval_s):
        alive = watch()
        if alive is None:
            return
        alive.beat()
        del alive


_OPEN: weakref.WeakSet[Watch] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside the store when the interpreter goes away would abort the process."""
    for watch in list(_OPEN):
        watch.close()
