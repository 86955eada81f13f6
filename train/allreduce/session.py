"""Calls that ranks make by name, negotiated before any data moves.

A session joins one process set. Each call submits a tensor group and takes part in cycles of `negotiation` until all
ranks have submitted the same: only then do the tensors travel. Names that were seen before cost one small message; new
names, or changed signatures, take the slow path, where a mismatch becomes the same exception on every rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.train.allreduce import negotiation
from exitwave.train.allreduce.agreement import MismatchError
from exitwave.train.allreduce.negotiation import Request
from exitwave.train.allreduce.stall import Progress, Watch
from exitwave.train.transport import Transport

__all__ = ["Session"]


class Session:
    """One rank's end of a process set. `data` and `control` are transports of their own (see transport's rule 1)."""

    def __init__(self, data: Transport, control: Transport, *, timeout_s: float) -> None:
        self.data = data
        self.size = control.size
        self._control = control
        self._state = negotiation.State()
        self._calls = 0
        self.cycles = 0
        self.watch = Watch(
            control.board, rank=control.rank, size=control.size, timeout_s=timeout_s, snapshot=self._note
        )

    def agree(self, requests: Sequence[Request]) -> None:
        """Return once every rank has submitted the same `requests` (one tensor group).

        Raises `MismatchError` on every rank when they differ, `StallError` when some rank never submits them, and
        `UsageError`, after telling the other ranks, for a name twice.
        """
        self.watch.check(reread=True)
        try:
            self._state = negotiation.submit(self._state, requests)
        except UsageError as error:
            self.watch.fail(error)
        names = {request.name for request in requests}
        patience = self.watch.patience(lambda: ", ".join(sorted(names)))
        pause_s = 0.0
        while names & {request.name for request in self._state.pending}:
            if pause_s:
                time.sleep(pause_s)
                patience.tick()
            try:
                self._cycle()
            except MismatchError:
                kept = tuple(r for r in self._state.pending if r.name not in names)
                self._state = replace(self._state, pending=kept)
                raise
            pause_s = min(2 * pause_s + 1e-4, 0.05)  # nobody learns more by asking faster
        self._calls += 1

    def fail(self, error: ExitwaveError) -> None:
        """Tell all ranks about an error of this one, then raise it."""
        self.watch.fail(error)

    def close(self) -> None:
        """Leave; other ranks that wait for this one are told."""
        self.watch.close()

    def _cycle(self) -> None:
        message: negotiation.Message | None = negotiation.begin(self._state)
        while message is not None:
            decision = negotiation.step(self._state, self._exchange(message))
            self._state = decision.state
            if decision.mismatch is not None:
                raise MismatchError(decision.mismatch)
            message = decision.send
        self.cycles += 1

    def _exchange(self, message: negotiation.Message) -> negotiation.Message:
        what = self._names
        if isinstance(message, negotiation.Unknown):
            payload = json.dumps([asdict(request) for request in message.rows[0]]).encode()
            rows = self.watch.wait(self._control.gather(payload), what)
            return negotiation.Unknown(rows=tuple(tuple(Request(**r) for r in json.loads(row)) for row in rows))
        words = torch.tensor(message.words, dtype=torch.int64)
        if isinstance(message, negotiation.Bits):
            return negotiation.Bits(words=_ints(self.watch.wait(self._control.allreduce(words, "and"), what)))
        return negotiation.Erase(words=_ints(self.watch.wait(self._control.allreduce(words, "or"), what)))

    def _names(self) -> str:
        return ", ".join(request.name for request in self._state.pending[:8])

    def _note(self) -> Progress:
        waiting = tuple(request.name for request in self._state.pending)
        return Progress(step=self._calls, phase="waiting" if waiting else "idle", submitted=waiting)


def _ints(words: torch.Tensor) -> tuple[int, ...]:
    return tuple(words.tolist())
