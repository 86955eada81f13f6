"""How ranks exchange tensors: one small Protocol, spoken by torch.distributed (here) and by ranks inside one process
(`exitwave.train.loopback`).

Everything above (the allreduce engine, spatial parallelism) talks to a `Transport` and never to torch.distributed. The
Protocol asks little: start a collective and get a `Handle`; wait for the handle with a time limit; write small notes on
a `Board` that the other ranks can read at any time, without taking part. The notes are how a rank tells "slow" from
"dead", and names it.

Rules that every implementation keeps (tests/contract/test_transports.py):

1. Collectives of one transport are matched by their order. Two streams of collectives whose relative order may differ
   between ranks (data and control) need two transports.
2. A collective never blocks when started; `Handle.wait` is the only call that does, and it raises `TimeoutError` when
   the limit passes while leaving the collective in flight: the caller may wait again.
3. A collective that cannot succeed any more raises `TransportError` from `wait`, on every rank that is still alive.
4. All ranks receive the same bytes.
5. Tensors given to one collective must have the same shape and dtype on all ranks. Callers verify this first: gloo
   aborts the process when the sizes differ.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from exitwave.ingest.errors import ExitwaveError, UsageError

__all__ = [
    "Board",
    "Handle",
    "PendingTransfer",
    "ReduceKind",
    "TorchTransport",
    "Transport",
    "TransportError",
]

ReduceKind = Literal["sum", "product", "min", "max", "and", "or"]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class TransportError(ExitwaveError):
    """A collective that was started cannot end: a peer is gone, or ranks asked for different things."""


class Handle(Protocol[T_co]):
    """A collective in flight."""

    def done(self) -> bool:
        """True when `wait` would return, or raise its `TransportError`, at once."""

    def wait(self, timeout_s: float) -> T_co:
        """The result. Raises `TimeoutError` (still in flight, wait again) or `TransportError` (over)."""


class Board(Protocol):
    """Small texts under string keys, readable by all ranks at any time; the last write of a key stands."""

    def post(self, key: str, text: str) -> None:
        """Write one note. Raises `TransportError` when the board's host is gone."""

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """The notes under `keys`, None for those never written. Never blocks for a missing one."""


class Transport(Protocol):
    """Collectives among `size` ranks, of which this is number `rank`."""

    @property
    def rank(self) -> int:
        """This rank's number within the transport, 0..size-1."""

    @property
    def size(self) -> int:
        """How many ranks take part."""

    @property
    def board(self) -> Board:
        """Notes shared by the ranks of this transport."""

    def allreduce(self, tensor: torch.Tensor, op: ReduceKind = "sum") -> Handle[torch.Tensor]:
        """Reduce `tensor` (contiguous, any shape) in place over all ranks; "and" and "or" are bitwise on int64."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        """Overwrite `tensor` (contiguous) with rank `root`'s."""

    def collect(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        """On rank `root` the ranks' tensors, stacked: (rank, *shape); on the others something to wait for."""

    def gather(self, payload: bytes) -> Handle[list[bytes]]:
        """Every rank's `payload` (any length), in rank order, on every rank.

        Wait for it before starting anything else on this transport: it may take two collectives.
        """


# --------------------------------------------------------------------------------------------- torch.distributed


_TORCH_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
}


class PendingTransfer:
    """A send or receive under way. Its wait has no limit of its own: gloo breaks the connection when one passes."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when it is over. Raises `TransportError` when the peer is gone or the transport's limit passes."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(f"the transfer failed: {_first_line(error)}") from error


# Collectives under way, with their backends: to destroy a backend that has one is to wait for gloo's own limit, so one
# that was given up keeps its backend until it is over.
_flying: deque[tuple[Any, Any]] = deque()
_flying_lock = threading.Lock()


def _keep(work: Any, backend: Any) -> None:
    with _flying_lock:
        while _flying and _flying[0][0].is_completed():
            _flying.popleft()
        _flying.append((work, backend))


class _WorkHandle(Generic[T]):
    """A torch.distributed Work, and how to read the result from it."""

    def __init__(self, work: Any, result: Callable[[], T], *, blocking_wait: bool) -> None:
        self._work = work
        self._result = result
        self._blocking_wait = blocking_wait  # gloo's wait has a time limit; NCCL's only joins CUDA streams

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        if self._blocking_wait:
            try:
                self._work.wait(datetime.timedelta(seconds=max(timeout_s, 1e-3)))
            except RuntimeError as error:
                if not self._work.is_completed():
                    raise TimeoutError(f"still in flight after {timeout_s:.3g} s") from None
                raise TransportError(f"the collective failed: {_first_line(error)}") from error
        else:
            while not self._work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"still in flight after {timeout_s:.3g} s")
                time.sleep(5e-5)
            try:
                self._work.wait()
            except RuntimeError as error:
                raise TransportError(f"the collective failed: {_first_line(error)}") from error
        return self._result()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


_notebooks: list[tuple[Any, Any, threading.Lock]] = []  # the default store, our connection to it, its lock


def _notebook(store: Any) -> tuple[Any, threading.Lock]:
    """One connection of our own to the rendezvous store for all boards of this process."""
    for known, own, lock in _notebooks:
        if known is store:
            return own, lock
    own = store
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        own = store.clone()  # a blocking get elsewhere must not silence this rank's heartbeat
    _notebooks[:] = [(store, own, threading.Lock())]
    return own, _notebooks[0][2]


class _StoreBoard:
    """Notes in a torch.distributed store (the rendezvous' TCPStore), under a prefix."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._lock = _notebook(store)
        self._prefix = prefix

    def post(self, key: str, text: str) -> None:
        try:
            with self._lock:
                self._store.set(f"{self._prefix}/{key}", text)
        except RuntimeError as error:  # includes DistStoreError, DistNetworkError
            raise TransportError(f"the rendezvous store does not answer: {_first_line(error)}") from error

    def read(self, keys: Sequence[str]) -> list[str | None]:
        try:
            with self._lock:
                return [self._read_one(f"{self._prefix}/{key}") for key in keys]
        except RuntimeError as error:
            raise TransportError(f"the rendezvous store does not answer: {_first_line(error)}") from error

    def _read_one(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        raw: bytes = self._store.get(key)
        return raw.decode()


class TorchTransport:
    """Collectives of torch.distributed among the ranks of `process_group`, on connections of its own.

    Of its own, because collectives are matched by order and the group carries the caller's. Made collectively:
    all ranks of `process_group`, and only they, construct it in the same order. `backend` None means the backend of
    `process_group`; "gloo" serves control messages (NCCL has no bitwise operations).

    Raises `TransportError`, naming the missing ranks, when not all come within `timeout_s`. A collective is given up
    somewhat later than that, so that a caller who waits `timeout_s` for it speaks first, with better words.
    """

    def __init__(self, process_group: Any = None, *, backend: str | None = None, timeout_s: float, label: str) -> None:
        if not dist.is_initialized():
            raise UsageError("no process group: call torch.distributed.init_process_group first, or run on one rank")
        parent = process_group if process_group is not None else dist.group.WORLD
        self._rank, self._size = dist.get_rank(parent), dist.get_world_size(parent)
        place = _meet(parent, self._size, timeout_s, label)
        store = c10d._get_default_store()
        timeout = datetime.timedelta(seconds=1.25 * timeout_s + 2)
        self._blocking_wait = (backend or dist.get_backend(parent)) == "gloo"
        try:
            if self._blocking_wait:
                connections = c10d.PrefixStore(f"{place}/gloo", store)
                self._backend: Any = dist.ProcessGroupGloo(connections, self._rank, self._size, timeout)
            else:
                group = dist.new_group(
                    dist.get_process_group_ranks(parent),
                    backend=dist.get_backend(parent),
                    timeout=timeout,
                    use_local_synchronization=True,
                )
                self._backend = group._get_backend(torch.device("cuda"))
        except RuntimeError as error:
            raise TransportError(f"the {label} transport could not be opened: {_first_line(error)}") from error
        self._board = _StoreBoard(store, place)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def board(self) -> Board:
        return self._board

    def allreduce(self, tensor: torch.Tensor, op: ReduceKind = "sum") -> Handle[torch.Tensor]:
        options = dist.AllreduceOptions()
        options.reduceOp = _TORCH_OPS[op]
        return self._start(tensor, self._backend.allreduce, [tensor], options)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._start(tensor, self._backend.broadcast, [tensor], options)

    def collect(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        options = dist.GatherOptions()
        options.rootRank = root
        if self._rank != root:
            return self._start(tensor, self._backend.gather, [], [tensor], options)
        rows = torch.zeros((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return self._start(rows, self._backend.gather, [list(rows.unbind())], [tensor], options)

    def gather(self, payload: bytes) -> Handle[list[bytes]]:
        return _GatherHandle(payload, self.size, self._gather_counted)

    def _gather_counted(self, output: torch.Tensor, own: torch.Tensor) -> _WorkHandle[torch.Tensor]:
        return self._start(output, self._backend.allgather, [list(output.chunk(self.size))], [own])

    @property
    def point_to_point(self) -> bool:
        """Whether `send` and `receive` serve (gloo); else use `backend`'s own collectives."""
        return self._blocking_wait

    @property
    def backend(self) -> Any:
        """The torch.distributed backend object, for collectives that the Protocol does not name."""
        return self._backend

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> PendingTransfer:
        """Start sending `tensor` (contiguous) to rank `to`, who receives it under the same tag."""
        return self._transfer(self._backend.send, tensor, to, tag)

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> PendingTransfer:
        """Start receiving into `tensor` (contiguous) what rank `sender` sends under this tag."""
        return self._transfer(self._backend.recv, tensor, sender, tag)

    def sever(self) -> None:
        """End all transfers under way on this rank with an error, and refuse further ones.

        A thread inside a transfer that will never come cannot be ended otherwise, and would abort the process when
        the interpreter goes away. gloo has no call for it; but a wait that runs out closes all of its connections.
        """
        if not self._blocking_wait or self._size == 1:
            return
        with contextlib.suppress(RuntimeError):
            never = self._backend.recv([torch.zeros(1)], (self._rank + 1) % self._size, 2**31 - 1)
            never.wait(datetime.timedelta(milliseconds=1))

    def _transfer(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> PendingTransfer:
        try:
            return PendingTransfer(call([tensor], peer, tag))
        except RuntimeError as error:
            raise TransportError(f"the transfer could not start: {_first_line(error)}") from error

    def _start(self, result: T, collective: Callable[..., Any], *args: Any) -> _WorkHandle[T]:
        try:
            work = collective(*args)
        except RuntimeError as error:
            raise TransportError(f"the collective could not start: {_first_line(error)}") from error
        _keep(work, self._backend)
        return _WorkHandle(work, lambda: result, blocking_wait=self._blocking_wait)


_meetings: dict[str, int] = {}


def _meet(parent: Any, size: int, timeout_s: float, label: str) -> str:
    """Wait until all ranks are here, so that a rank that never comes is named. Returns a store prefix of their own."""
    place = c10d._get_process_group_name(parent)
    number = _meetings[place] = _meetings.get(place, 0) + 1
    store = c10d._get_default_store()
    prefix = f"exitwave/{place}/{number}"
    key = f"{prefix}/meet"
    try:
        store.set(f"{key}/{dist.get_rank(parent)}", label)
        store.add(key, 1)
        deadline = time.monotonic() + timeout_s
        while store.add(key, 0) < size:
            if time.monotonic() > deadline:
                missing = [rank for rank in range(size) if not store.check([f"{key}/{rank}"])]
                raise TransportError(
                    f"rank {dist.get_rank(parent)} waited {timeout_s:g} s to open the {label} transport: "
                    f"rank {', '.join(map(str, missing[:8]))} never came ({len(missing)} of {size} missing)"
                )
            time.sleep(0.005)
    except RuntimeError as error:
        raise TransportError(f"the rendezvous store does not answer: {_first_line(error)}") from error
    return prefix


class _GatherHandle:
    """Two all-gathers: the lengths at once, then, within `wait`, the payloads padded to the longest."""

    def __init__(
        self, payload: bytes, size: int, start: Callable[[torch.Tensor, torch.Tensor], _WorkHandle[torch.Tensor]]
    ) -> None:
        self._payload = payload
        self._size = size
        self._start = start
        self._lengths = start(torch.zeros(size, dtype=torch.int64), torch.tensor([len(payload)], dtype=torch.int64))
        self._payloads: _WorkHandle[torch.Tensor] | None = None

    def done(self) -> bool:
        return self._payloads is not None and self._payloads.done()

    def wait(self, timeout_s: float) -> list[bytes]:
        lengths = [int(n) for n in self._lengths.wait(timeout_s)]
        longest = max(*lengths, 1)
        if self._payloads is None:
            padded = torch.frombuffer(bytearray(self._payload.ljust(longest, b"\0")), dtype=torch.uint8)
            self._payloads = self._start(torch.zeros(self._size * longest, dtype=torch.uint8), padded)
        rows = self._payloads.wait(timeout_s).view(self._size, longest).numpy()  # (rank, byte)
        return [rows[rank, :n].tobytes() for rank, n in enumerate(lengths)]
