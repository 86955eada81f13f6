"""One suite for every Transport: ranks in threads of this process, and real processes over gloo.

Each check runs on every rank. For torch.distributed this file launches itself once under torchrun and runs all checks
there; the last check loses a rank and therefore comes last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exitwave.train.loopback import LoopbackHub
from exitwave.train.transport import TorchTransport, Transport, TransportError

SIZE = 3
LIMIT_S = 20.0


def each_kind_of_reduction(t: Transport) -> None:
    values = torch.arange(5.0)
    expected = {
        "sum": sum(values + r for r in range(SIZE)),
        "product": torch.stack([values + r for r in range(SIZE)]).prod(0),
        "min": values,
        "max": values + SIZE - 1,
    }
    for op, result in expected.items():
        own = values + t.rank
        assert t.allreduce(own, op).wait(LIMIT_S) is own
        assert torch.equal(own, result)


def bitwise_on_int64_words(t: Transport) -> None:
    words = torch.tensor([-1, 0b111, -(2**63)], dtype=torch.int64)
    words[1] = 0b111 ^ (1 << t.rank)
    both = words.clone()
    t.allreduce(words, "and").wait(LIMIT_S)
    t.allreduce(both, "or").wait(LIMIT_S)
    assert words.tolist() == [-1, 0, -(2**63)]
    assert both.tolist() == [-1, 0b111, -(2**63)]


def dtypes_and_shapes(t: Transport) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        for shape in ((), (1,), (2, 3), (0,)):
            tensor = torch.full(shape, 1 + t.rank, dtype=dtype)
            t.allreduce(tensor).wait(LIMIT_S)
            assert torch.equal(tensor, torch.full(shape, 6, dtype=dtype))


def broadcast_from_each_root(t: Transport) -> None:
    for root in range(SIZE):
        tensor = torch.full((4,), t.rank, dtype=torch.uint8)
        t.broadcast(tensor, root).wait(LIMIT_S)
        assert tensor.tolist() == [root] * 4


def collect_at_each_root(t: Transport) -> None:
    for root in range(SIZE):
        rows = t.collect(torch.tensor([t.rank, root], dtype=torch.int64), root).wait(LIMIT_S)
        if t.rank == root:
            assert rows.tolist() == [[rank, root] for rank in range(SIZE)]


def gather_any_length(t: Transport) -> None:
    assert t.gather(b"x" * t.rank).wait(LIMIT_S) == [b"", b"x", b"xx"]
    assert t.gather(b"").wait(LIMIT_S) == [b""] * SIZE


def many_in_flight_keep_their_order(t: Transport) -> None:
    tensors = [torch.full((1000,), float(k * (t.rank + 1))) for k in range(20)]
    handles = [t.allreduce(tensor) for tensor in tensors]
    for k in reversed(range(20)):
        assert torch.equal(handles[k].wait(LIMIT_S), torch.full((1000,), 6.0 * k))
        assert handles[k].done()
        handles[k].wait(0.1)  # again, harmless


def all_ranks_receive_the_same_bytes(t: Transport) -> None:
    generator = torch.Generator().manual_seed(t.rank)
    tensor = torch.randn(10001, generator=generator)
    t.allreduce(tensor).wait(LIMIT_S)
    assert len(set(t.gather(tensor.numpy().tobytes()).wait(LIMIT_S))) == 1


def a_limit_leaves_the_collective_in_flight(t: Transport) -> None:
    if t.rank == 0:
        tensor = torch.ones(3)
        handle = t.allreduce(tensor)
        assert not handle.done()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                handle.wait(0.1)
        t.board.post("go", "now")
        assert handle.wait(LIMIT_S).tolist() == [3.0] * 3
    else:
        wait_for_note(t, "go")
        t.allreduce(torch.ones(3)).wait(LIMIT_S)


def the_board_shows_notes_to_all_without_their_taking_part(t: Transport) -> None:
    keys = [f"note/{r}" for r in range(SIZE)]
    assert t.board.read(["never written"]) == [None]
    t.board.post(keys[t.rank], "old")
    t.board.post(keys[t.rank], f"Å {t.rank}")
    t.gather(b"").wait(LIMIT_S)
    assert t.board.read(keys) == [f"Å {r}" for r in range(SIZE)]


def a_lost_rank_fails_all_others(t: Transport, leave: Callable[[], None]) -> None:
    if t.rank == 1:
        leave()
        return
    handle = t.allreduce(torch.ones(10))
    with pytest.raises(TransportError, match="collective failed"):
        handle.wait(LIMIT_S)


def wait_for_note(t: Transport, key: str) -> None:
    until = time.monotonic() + LIMIT_S
    while t.board.read([key]) == [None]:
        assert time.monotonic() < until
        time.sleep(0.01)


CHECKS: list[Callable[..., None]] = [
    each_kind_of_reduction,
    bitwise_on_int64_words,
    dtypes_and_shapes,
    broadcast_from_each_root,
    collect_at_each_root,
    gather_any_length,
    many_in_flight_keep_their_order,
    all_ranks_receive_the_same_bytes,
    a_limit_leaves_the_collective_in_flight,
    the_board_shows_notes_to_all_without_their_taking_part,
    a_lost_rank_fails_all_others,
]


def run_check(check: Callable[..., None], t: Transport, leave: Callable[[], None]) -> str:
    try:
        check(t, leave) if check is a_lost_rank_fails_all_others else check(t)
    except BaseException:
        return traceback.format_exc()
    return "passed"


# ------------------------------------------------------------------------------------------------ implementations


def loopback_results() -> dict[str, list[str]]:
    results: dict[str, list[str]] = {}
    for check in CHECKS:
        hub = LoopbackHub(SIZE)
        said = ["did not end"] * SIZE

        def play(rank: int, hub=hub, said=said, check=check) -> None:
            said[rank] = run_check(check, hub.transport(rank), lambda: hub.lose(rank))

        threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        results[check.__name__] = said
    return results


def torch_results(folder: Path) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
    ran = subprocess.run(
        [*command, __file__, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    files = [folder / f"{rank}.json" for rank in range(SIZE)]
    assert all(f.exists() for f in files), ran.stderr[-3000:]
    rows = [json.loads(f.read_text()) for f in files]
    return {check.__name__: [row.get(check.__name__, "did not run") for row in rows] for check in CHECKS}


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    t = TorchTransport(None, timeout_s=LIMIT_S, label="contract")
    results: dict[str, str] = {}
    out = folder / f"{t.rank}.json"

    def leave() -> None:
        results[a_lost_rank_fails_all_others.__name__] = "passed"
        out.write_text(json.dumps(results))
        os._exit(0)

    for check in CHECKS:
        results[check.__name__] = run_check(check, t, leave)
        out.write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, list[str]]]:
    return {"loopback": loopback_results(), "torch": torch_results(tmp_path_factory.mktemp("transports"))}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("implementation", ["loopback", "torch"])
def test_transport(results, implementation, check):
    for rank, said in enumerate(results[implementation][check.__name__]):
        assert said == "passed", f"rank {rank}: {said}"


def test_loopback_refuses_what_would_abort_gloo():
    hub = LoopbackHub(2)
    a = hub.transport(0).allreduce(torch.ones(2))
    hub.transport(1).allreduce(torch.ones(3))
    with pytest.raises(TransportError, match="tensors differ between ranks"):
        a.wait(0.0)
    a = hub.transport(0).allreduce(torch.ones(2), "min")
    hub.transport(1).allreduce(torch.ones(2), "max")
    with pytest.raises(TransportError, match="different collectives"):
        a.wait(0.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
