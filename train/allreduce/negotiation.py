"""The bit-vector protocol: how ranks that become ready in any order agree on one order, without a coordinator.

The protocol (arXiv 1909.11150), as every rank follows it:

1.  Every rank holds the same cache: place -> request (name, signature, tensor group). The place is the request's bit.
2.  What becomes ready on a rank is submitted; it stays pending until it is executed. It is never dropped.
3.  A cycle begins. The rank sends one message: a bit for each pending cached request whose tensor group is pending as
    a whole (a group's bits move all or none), and three status bits: it wants to shut down; it met a name that has no
    place ("uncached"); it met a cached name with another signature ("invalid").
4.  The messages are combined by bitwise AND. All ranks now hold the same words and decide alike from them alone.
5.  If some rank met an invalid entry, all exchange the invalid bits by OR and erase those entries, and with each its
    whole tensor group. On every rank, pending requests for them are uncached from here on.
6.  Whatever is ready on every rank, and was not erased in this cycle, is reduced, in the order of bits; the rest stays
    pending for the next cycle.
7.  If some rank met an uncached name (or an entry was erased), the slow path runs: every rank sends its uncached
    requests to all. From the same messages all make the same insertions, in the order of ranks and of submission, each
    at the lowest free place. One name with two signatures is a mismatch: all ranks fail, with the same words.
8.  If some rank asked for shutdown, the cycle ends there: nothing more is reduced, on any rank.

Invariants (tests/unit/test_allreduce_negotiation.py drives them over many ranks and schedules):

- every rank joins every cycle, and every exchange within it;
- cache and bits change only on events that all ranks saw (4, 5, 7);
- a request is executed once or still pending, never lost or doubled;
- the sequence of executed tensor groups is the same on all ranks;
- tensor groups are atomic.

Cycles may be *pipelined*: a rank may begin cycle k+1 before it has the words of cycle k, and ignores bits of requests
that an earlier cycle executed. Then a name must not be submitted again before all ranks have finished the cycles begun
before its execution. The engine ensures this: each backward pass has as many cycles as tensor groups, on every rank,
and all are finished at its end. A pipelined cycle must not meet uncached or invalid requests.

Everything here is pure: `begin` and `step` return new values; whoever drives them does the exchanging.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce import readiness

__all__ = ["Bits", "Decision", "Erase", "Message", "Request", "State", "Unknown", "begin", "step", "submit"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rank wants one tensor reduced."""

    name: str
    signature: str  # shape, dtype, operation, scales: whatever has to be the same on all ranks, readable
    group: str  # the tensor group; the same in all its members
    group_size: int  # members of the group


@dataclass(frozen=True, kw_only=True)
class Bits:
    """Step 3 and 4: the words of a cycle. Sent by one rank; received after AND over all ranks."""

    words: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Erase:
    """Step 5: invalid bits. Sent by one rank; received after OR over all ranks."""

    words: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Step 7: uncached requests, by rank. A rank sends its own (one row); received: one row for each rank."""

    rows: tuple[tuple[Request, ...], ...]


Message = Bits | Erase | Unknown


@dataclass(frozen=True, kw_only=True)
class State:
    """One rank's view. `cache` is the same on all ranks after the same cycles; `pending` is this rank's own."""

    cache: tuple[Request | None, ...] = ()
    pending: tuple[Request, ...] = ()  # submitted here and not executed yet, in order of submission
    wants_shutdown: bool = False
    agreed: readiness.Agreed | None = None  # the AND of the cycle under way, between its exchanges

    def places(self) -> dict[str, int]:
        """name -> bit."""
        return {request.name: bit for bit, request in enumerate(self.cache) if request is not None}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do now. When `send` is not None, the cycle goes on with that exchange; else it is over."""

    state: State
    execute: tuple[tuple[Request, ...], ...] = ()  # tensor groups to reduce now, in this order
    send: Message | None = None
    mismatch: str | None = None  # all ranks raise this
    shutdown: bool = False


def submit(state: State, requests: Iterable[Request]) -> State:
    """Step 2. Raises `UsageError` for a name that is already pending, and then submits none of `requests`."""
    taken = {request.name for request in state.pending}
    added = []
    for request in requests:
        if request.name in taken:
            raise UsageError(f"{request.name} was submitted twice before it was reduced")
        taken.add(request.name)
        added.append(request)
    return replace(state, pending=(*state.pending, *added))


def begin(state: State) -> Bits:
    """Step 3: this rank's message of a new cycle."""
    places = state.places()
    whole = _whole_groups(state.pending)
    hits = [members for members in whole.values() if all(_is_hit(state, places, member) for member in members)]
    return Bits(
        words=readiness.pack(
            [places[member.name] for members in hits for member in members],
            len(state.cache),
            shutdown=state.wants_shutdown,
            uncached=bool(_uncached(state, places, whole)),
            invalid=bool(_invalid_bits(state, places)),
        )
    )


def step(state: State, message: Message) -> Decision:
    """Steps 4 to 8: what follows from `message`, the combined words or rows that every rank received alike."""
    if isinstance(message, Bits):
        agreed = readiness.unpack(message.words, len(state.cache))
        if agreed.shutdown:
            return Decision(state=replace(state, agreed=None), shutdown=True)
        state = replace(state, agreed=agreed)
        if agreed.invalid:
            bits = _invalid_bits(state, state.places())
            return Decision(state=state, send=Erase(words=readiness.pack_bits(bits, len(state.cache))))
        return _execute(state, erased=frozenset())
    if isinstance(message, Erase):
        erased = readiness.bits_of(message.words, len(state.cache))
        groups = {request.group for bit in erased if (request := state.cache[bit]) is not None}
        erased = frozenset(bit for bit, r in enumerate(state.cache) if r is not None and r.group in groups)
        cache = tuple(None if bit in erased else request for bit, request in enumerate(state.cache))
        return _execute(replace(state, cache=cache), erased=erased)
    return _insert(state, message.rows)


def _execute(state: State, *, erased: frozenset[int]) -> Decision:
    """Step 6, and on to step 7 where the words ask for it."""
    agreed = state.agreed
    assert agreed is not None
    pending = {request.name for request in state.pending}
    groups: dict[str, list[Request]] = {}
    for bit in sorted(agreed.ready - erased):
        request = state.cache[bit]
        if request is not None and request.name in pending:  # else: executed by an earlier, pipelined cycle
            groups.setdefault(request.group, []).append(request)
    execute = tuple(tuple(members) for members in groups.values())
    done = {request.name for members in execute for request in members}
    state = replace(state, pending=tuple(r for r in state.pending if r.name not in done))
    send: Message | None = None
    if agreed.uncached or erased:
        own = _uncached(state, state.places(), _whole_groups(state.pending))
        send = Unknown(rows=(own,))
    return Decision(state=state if send else replace(state, agreed=None), execute=execute, send=send)


def _insert(state: State, rows: Sequence[tuple[Request, ...]]) -> Decision:
    """Step 7: the same insertions on every rank, or the same refusal."""
    asked: dict[str, dict[str, list[int]]] = {}  # name -> what is asked -> ranks that ask it
    first: dict[str, Request] = {}  # in the order of ranks, then of submission
    for rank, row in enumerate(rows):
        for request in row:
            what = f"{request.signature}, in tensor group {request.group!r} of {request.group_size}"
            asked.setdefault(request.name, {}).setdefault(what, []).append(rank)
            first.setdefault(request.name, request)
    state = replace(state, agreed=None)
    for name, variants in asked.items():
        if len(variants) > 1:
            said = "; ".join(f"rank {_ranks(ranks)}: {what}" for what, ranks in variants.items())
            return Decision(state=state, mismatch=f"ranks disagree on tensor {name!r}: {said}")
    places = state.places()
    cache = list(state.cache)
    free = [bit for bit, request in enumerate(cache) if request is None]
    for name, request in first.items():
        if name in places:
            continue
        if free:
            cache[free.pop(0)] = request
        else:
            cache.append(request)
    return Decision(state=replace(state, cache=tuple(cache)))


def _whole_groups(pending: Sequence[Request]) -> dict[str, tuple[Request, ...]]:
    """Tensor groups of which every member is pending here."""
    groups: dict[str, list[Request]] = {}
    for request in pending:
        groups.setdefault(request.group, []).append(request)
    return {name: tuple(members) for name, members in groups.items() if len(members) == members[0].group_size}


def _is_hit(state: State, places: dict[str, int], request: Request) -> bool:
    cached = state.cache[places[request.name]] if request.name in places else None
    return cached is request or cached == request


def _uncached(state: State, places: dict[str, int], whole: dict[str, tuple[Request, ...]]) -> tuple[Request, ...]:
    return tuple(r for r in state.pending if r.group in whole and r.name not in places)


def _invalid_bits(state: State, places: dict[str, int]) -> list[int]:
    return sorted(places[r.name] for r in state.pending if r.name in places and not _is_hit(state, places, r))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks)} ranks)" if len(ranks) > 8 else "")
