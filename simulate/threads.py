"""One thread per worker process: several workers share a machine, and the number of threads can change the bits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

__all__ = ["limit_threads", "single_threaded"]


@cache
def _controller() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def single_threaded() -> AbstractContextManager[Any]:
    """Within it, BLAS and OpenMP use one thread each."""
    context: AbstractContextManager[Any] = _controller().limit(limits=1)
    return context


def limit_threads() -> None:
    """For the rest of this process BLAS, OpenMP and numba use one thread each."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1)
    try:
        import numba
    except ImportError:
        return
    numba.set_num_threads(1)
