"""Random schedules over many in-process ranks: any rank may do anything that is its turn, at any moment.

Each schedule ends in one of these ways, and `walk` raises `Broken` for any other:

- every rank has reduced all that it submitted, each once;
- all ranks refused a mismatch, or shut down, at the same collective and in the same words;
- a rank was lost: every other rank's next collective fails, all at the same one, none having gone further. Calls by
  name then go on in a new world of the ranks that are left: what was pending is reduced there, once.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from protocol_machines import Broken, ScheduleMachine, SessionMachine, group, require

__all__ = ["random_schedule", "walk"]


def walk(machine: Any, rng: random.Random, lost: int | None = None) -> tuple[str, list[Any]]:
    """Play one schedule; how it ended ("reduced", "mismatch", "shutdown", "lost"), and the ranks that are left.

    `lost`: this rank dies at a random moment.
    """
    size = machine.size
    locals_ = [machine.start(rank) for rank in range(size)]
    sent: list[list[Any]] = []  # collective -> contributions of the ranks so far, in rank order once complete
    joined, heard = [0] * size, [0] * size
    results: dict[int, Any] = {}
    dies_after = rng.randint(0, 12) if lost is not None else -1
    failed: dict[int, int] = {}  # rank -> the collective that it found broken
    idle = 0
    limit = 400 + 60 * _submissions(machine)
    eager = rng.random() ** 2  # how much a rank does at a time
    while True:
        order = rng.sample(range(size), size)
        if rng.random() < 0.3:
            order = order[: rng.randint(1, size)]  # the others are busy
        for rank in order:
            if rank == lost and dies_after <= 0:
                continue
            if rank in failed:
                continue
            while True:
                moves = machine.moves(rank, locals_[rank])
                hears = heard[rank] in results and heard[rank] < joined[rank]
                if moves and (not hears or rng.random() < 0.6):
                    move = moves[0] if len(moves) == 1 else rng.choice(moves)
                    if move == "stop" and rng.random() < 0.9:
                        break
                    locals_[rank], messages = machine.act(rank, locals_[rank], move)
                elif hears:
                    message = results[heard[rank]]
                    heard[rank] += 1
                    locals_[rank], messages = machine.hear(rank, locals_[rank], message)
                else:
                    break
                for message in messages:
                    if joined[rank] == len(sent):
                        sent.append([None] * size)
                    row = sent[joined[rank]]
                    row[rank] = message
                    joined[rank] += 1
                    if all(one is not None for one in row):
                        results[joined[rank] - 1] = machine.combine(row)
                if rank == lost:
                    dies_after -= 1
                    if dies_after <= 0:
                        break
                if rng.random() > eager:
                    break
        idle += 1
        require(idle < limit, "no progress: a livelock")
        if lost is not None and dies_after <= 0:
            gone = joined[lost]  # this collective can never end
            for rank in range(size):
                if rank not in failed and rank != lost and heard[rank] == gone and joined[rank] > gone:
                    failed[rank] = heard[rank]
            if all(rank in failed or machine.done(rank, locals_[rank]) for rank in range(size) if rank != lost):
                return _lost(machine, locals_, failed, lost)
            continue
        if all(machine.done(rank, local) for rank, local in enumerate(locals_)):
            return _whole(machine, locals_, heard)


def _submissions(machine: Any) -> int:
    if isinstance(machine, SessionMachine):
        return sum(len(versions) for versions in machine.scripts[0])
    return len(machine._groups) * machine._passes


def _passes(machine: Any) -> int:
    return max(map(len, machine.scripts[0])) if isinstance(machine, SessionMachine) else machine._passes


def _whole(machine: Any, locals_: list[Any], heard: list[int]) -> tuple[str, list[Any]]:
    first = machine.log(locals_[0])
    alike: dict[int, Any] = {}  # collectives heard -> what such ranks hold
    for rank, local in enumerate(locals_):
        require(machine.log(local) == first, f"ranks executed different orders: {machine.log(local)}, {first}")
        held = alike.setdefault(heard[rank], machine.shared(local))
        require(held == machine.shared(local), "ranks that heard the same hold different caches or verdicts")
        machine.final(rank, local)
    ends = {ended for local in locals_ if (ended := getattr(local, "ended", ""))}
    require(len(ends) <= 1, f"ranks ended differently: {ends}")
    return next(iter(ends), "reduced").partition(":")[0], locals_


def _lost(machine: Any, locals_: list[Any], failed: dict[int, int], lost: int) -> tuple[str, list[Any]]:
    left = [local for rank, local in enumerate(locals_) if rank != lost]
    ended = {getattr(local, "ended", "") for local in left}
    longest = max((machine.log(local) for local in left), key=len, default=())
    require(len(set(failed.values())) <= 1, "ranks failed at different collectives")
    require(len(ended) <= 1, "some ranks ended, others failed")
    for local in left:
        log = machine.log(local)
        require(log == longest[: len(log)], f"ranks executed different orders: {log}, {longest}")
        require(max(Counter(log).values(), default=0) <= _passes(machine), f"doubled: {log}")
        if isinstance(machine, SessionMachine) and failed:
            require(log == longest, "a rank went further than the last collective that all joined")
    return "lost", left


def random_schedule(kind: str, seed: int, most_ranks: int = 64) -> Counter[str]:
    """Make up one schedule of "session", "bitvector", "coordinator" or "static" from a seed and play it; what it had.

    Raises `Broken`, naming the seed.
    """
    rng = random.Random(f"{kind} {seed}")
    size = rng.randint(1, most_ranks) if rng.random() < 0.9 else most_ranks
    had: Counter[str] = Counter(schedules=1, ranks=size)
    lost = rng.randrange(size) if size > 1 and rng.random() < 0.15 else None
    try:
        if kind == "session":
            machine: Any = _session(rng, size, had, mayend=lost is None)
        else:
            joined = frozenset(rng.sample(range(size), rng.randint(1, size))) if rng.random() < 0.25 else frozenset()
            had["with joined ranks"] += bool(joined)
            sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 8))]
            machine = ScheduleMachine(kind, size, sizes, passes=rng.randint(1, 2), joined=joined)
        outcome, left = walk(machine, rng, lost)
        if outcome == "lost" and kind == "session" and not any(local.ended for local in left):
            ranks = [rank for rank in range(size) if rank != lost]
            again, left = walk(machine.restarted(ranks, left), rng)
            require(again == "reduced", f"the restart ended as {again}")
            had["restarted without it"] += 1
        had[outcome] += 1
        had["reductions"] += len(machine.log(left[0])) if left else 0
    except Exception as error:
        raise Broken(f"{kind} schedule of seed {seed}, {size} ranks: {type(error).__name__}: {error}") from error
    return had


def _session(rng: random.Random, size: int, had: Counter[str], mayend: bool) -> SessionMachine:
    """Known and unknown names, signatures that change (everywhere, or on one rank alone), an end for all."""
    n_groups = rng.randint(1, 6)
    versions = []
    for g in range(n_groups):
        members = rng.randint(1, 3)
        signature, script = "float32 (3,)", []
        for k in range(rng.randint(1, 3)):
            if k and rng.random() < 0.3:
                signature = f"float32 ({rng.randint(4, 9)},)"
                had["with changed signatures"] = 1
            script.append(group(f"g{g}", members, signature))
        versions.append(tuple(script))
    known = [v[0] for v in versions if rng.random() < 0.5]
    had["with unknown names"] = int(len(known) < n_groups)
    scripts = [tuple(versions) for _ in range(size)]
    stops = None
    if mayend and size > 1 and rng.random() < 0.1:
        odd, g = rng.randrange(size), rng.randrange(n_groups)
        changed = list(versions)
        k = rng.randrange(len(versions[g]))
        other = group(f"g{g}", versions[g][k][0].group_size, "float64 (7,)")
        changed[g] = (*versions[g][:k], other, *versions[g][k + 1 :])
        scripts[odd] = tuple(changed)
    elif mayend and rng.random() < 0.1:
        stops = rng.randrange(size)
    return SessionMachine(scripts, [request for members in known for request in members], stops)
