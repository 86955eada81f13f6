"""Reading the batch that comes next while the present one is in use: one batch, in one thread beside the caller's.

What comes next is not guessed: a batch of the sampler knows the one behind it (`Batch.ahead`). A DataLoader without
workers hands the very object to the data set; over a process boundary it becomes a plain list, since workers read
ahead by themselves. Nothing else changes: a batch is given when it is asked for, an error in it is raised then, and one
that was read but never asked for is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

__all__ = ["Batch", "ReadAhead", "with_ahead"]

_Result = TypeVar("_Result")


class Batch(list[int]):
    """Sample numbers of a batch, and those of the batch `ahead` of it, where there is one."""

    ahead: Batch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def with_ahead(batches: Iterable[Sequence[int]]) -> Iterator[Batch]:
    """The same batches, each knowing the next. The source is asked for one batch more than was given."""
    last: Batch | None = None
    for numbers in batches:
        batch = Batch(numbers)
        if last is not None:
            last.ahead = batch
            yield last
            last.ahead = None  # a chain of all batches would grow with the epoch
        last = batch
    if last is not None:
        yield last


class ReadAhead(Generic[_Result]):
    """`read(numbers)`, begun before it is asked for. For one thread at a time; empty again after a fork."""

    def __init__(self, read: Callable[[Sequence[int]], _Result]) -> None:
        self._read = read
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[list[int], Future[_Result]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._read,)

    def get(self, numbers: Sequence[int]) -> _Result:
        """The batch `numbers`: what has been begun of it, or read now."""
        if self._pid != os.getpid():
            self._reset()  # the thread that was to finish it has stayed in the parent
        begun, self._begun = self._begun, None
        if begun is not None:
            if begun[0] == numbers:
                return begun[1].result()
            begun[1].cancel()
        return self._read(numbers)

    def begin(self, numbers: Sequence[int]) -> None:
        """Starts on the batch that will be asked for next."""
        if self._pid != os.getpid():
            self._reset()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="exitwave-ahead")
        self._begun = list(numbers), self._thread.submit(self._read, numbers)
