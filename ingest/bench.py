"""`exitwave bench ingest`: reading shuffled batches beside raw reads and beside other loaders, in one run.

All loaders read the same samples of 512 KiB from the page cache, in batches of 32 tensors, in one process without
workers. First each must show that it is right: the multiset of (uid, checksum) of one of its epochs equals that of the
samples. Then all run in turns, the first of a round another each time, so that a busy moment of the machine falls on
all; medians and spread over the rounds, and ratios of the medians.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.bench_data import (
    SAMPLE_SHAPE,
    make_dataset,
    manifest_sums,
    repeat_shard,
    write_plain,
    write_webdataset,
)
from exitwave.ingest.buffers import page_aligned
from exitwave.ingest.dataset import Dataset, open_dataset
from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.ingest.staging import stage
from exitwave.ingest.verify import verify_dataset

__all__ = ["MOSAIC_HOW", "bench_ingest"]

_BATCH = 32
_RAW = "raw sequential readv, into the memory of two batches"
_RAW_SMALL = "raw sequential readv, into 1 MiB that stays in the processor's cache"
_RAW_PIECE = 1 << 20
_MANY_A_SHARD = 250
_PEERS = ("litdata", "webdataset", "mosaicml-streaming")
MOSAIC_HOW = (
    "mosaicml-streaming needs an environment of its own: python -m venv mds && mds/bin/pip install mosaicml-streaming; "
    "then give --mds-python mds/bin/python"
)

Array = np.ndarray[Any, Any]
Note = Callable[[str], None]
Contender = Callable[[int], float]  # the number of the round -> seconds of an epoch


def bench_ingest(
    *,
    samples: int = 1024,
    rounds: int = 7,
    many: int = 100_000,
    mds_python: Path | None = None,
    folder: Path | None = None,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """The benchmark's JSON document: {"bench", "machine", "rows", "targets", "skipped"}.

    `samples` of 512 KiB are read; they lie on disk once for each loader. `many` tiny ones for the time to the first
    batch. `mds_python`: an interpreter that has mosaicml-streaming. `folder`: where to put it all, removed at the end
    (default: the system's folder for temporary files).

    Raises:
        ExitwaveError: a loader gave other samples than there are, so that its speed would say nothing.
    """
    if samples < 2 * _BATCH or rounds < 1:
        raise UsageError(f"bench ingest: {samples} samples, {rounds} rounds; expected at least {2 * _BATCH} and 1")
    if mds_python is not None and not mds_python.is_file():
        raise UsageError(f"{mds_python}: expected the Python interpreter of an environment. {MOSAIC_HOW}")
    with tempfile.TemporaryDirectory(prefix="exitwave-bench-", dir=folder) as name, contextlib.ExitStack() as closing:
        work = Path(name)
        note(f"writing {samples} samples of 512 KiB for each loader")
        root = make_dataset(work / "ours", n=samples, per_shard=min(256, max(_BATCH, samples // 8)))
        skipped: list[str] = []
        contenders = _contenders(root, work, samples, mds_python, skipped, closing, note)
        times: dict[str, list[float]] = {what: [] for what in contenders}
        for number in range(rounds):
            note(f"round {number + 1} of {rounds}")
            turn = list(contenders)
            for what in turn[number % len(turn) :] + turn[: number % len(turn)]:
                times[what].append(contenders[what](number + 1))
        rows = [_row(what, samples, seconds) for what, seconds in times.items()]
        staging_rows, staging = _staging(root, work, rounds, note)
        rows += staging_rows
        targets = [*_reading_targets({row["what"]: row["samples_per_s"] for row in rows}), *staging]
        targets.append(_damage(work, note))
        targets += _probes(work, many, note)
    return {"bench": "ingest", "machine": _machine(), "rows": rows, "targets": targets, "skipped": skipped}


def _contenders(
    root: Path,
    work: Path,
    samples: int,
    mds_python: Path | None,
    skipped: list[str],
    closing: contextlib.ExitStack,
    note: Note,
) -> dict[str, Contender]:
    """Everything that runs in turns, each after its gate."""
    from exitwave.ingest import bench_peers as peers
    from exitwave.ingest.batches import ShardDataset

    data = open_dataset(root)
    expected = manifest_sums(data)
    batches, small = _memory(2 * _BATCH * data.shards[0].extent("cbed").stride), _memory(_RAW_PIECE)
    found: dict[str, Contender] = {
        _RAW: lambda number: _timed(lambda: _raw(data, batches)),
        _RAW_SMALL: lambda number: _timed(lambda: _raw(data, small)),
        "bare random preadv": lambda number: _timed(lambda: _bare(data, number)),
    }

    def gate(what: str, whole: bool) -> None:
        if not whole or len(expected) != samples:
            raise ExitwaveError(f"bench ingest: an epoch of {what} does not hold each sample once, byte by byte")

    def add(what: str, epoch: Callable[[int], Any]) -> None:
        note(f"{what}: is an epoch of it right?")
        gate(what, peers.sums_of(epoch(0)) == expected)
        found[what] = lambda number: _timed(lambda: deque(epoch(number), maxlen=0))

    for what, options in {
        "exitwave": {},
        "exitwave, one thread": {"threads": 1},
        "exitwave, checksums off": {"verify": False},
    }.items():
        ours = ShardDataset(root, fields=("cbed",), **options)  # type: ignore[arg-type]
        add(what, lambda number, ours=ours: peers.ours_epoch(ours, epoch=number, batch=_BATCH))  # type: ignore[misc]
    for what, write, epoch in (
        ("litdata", peers.write_litdata, peers.litdata_epoch),
        ("webdataset", lambda path, n: write_webdataset(path, n, max(_BATCH, n // 8)), peers.webdataset_epoch),
    ):
        try:
            version(what)
        except PackageNotFoundError:
            skipped.append(f"{what}: not installed (pip install 'exitwave[bench]')")
            continue
        add(f"{what} {version(what)}", epoch(write(work / what, samples), batch=_BATCH))
    if mds_python is None:
        skipped.append(MOSAIC_HOW)
        return found
    plain = write_plain(work / "plain", samples)
    note("mosaicml-streaming: is an epoch of it right?")
    mosaic = peers.Mosaic(mds_python, plain, work, batch=_BATCH)
    closing.callback(mosaic.close)
    gate("mosaicml-streaming", mosaic.is_whole(plain))
    found[f"mosaicml-streaming {mosaic.version}"] = lambda number: mosaic.epoch_s()
    return found


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _raw(data: Dataset, memory: Array) -> None:
    """The bytes of all samples in the order of the files, 1 MiB at a time, into `memory` (MiBs), round and round."""
    view, at = memory.data, 0
    for shard in data.shards:
        extent = shard.extent("cbed")
        fd = os.open(data.root / shard.path, os.O_RDONLY)
        os.lseek(fd, extent.offset, os.SEEK_SET)
        left = extent.nbytes
        while left:
            got = os.readv(fd, [view[at : at + min(left, _RAW_PIECE)]])
            left -= got
            at = (at + _RAW_PIECE) % len(view)
        os.close(fd)


def _memory(nbytes: int) -> Array:
    """Touched memory that starts at a page: where it starts else decides by half over how fast bytes are copied."""
    memory = page_aligned(nbytes)
    memory[:] = 0
    return memory


def _bare(data: Dataset, number: int) -> None:
    """What any loader at least does: one `preadv` a sample, shuffled, into a fresh array for each batch."""
    order = np.random.default_rng(number).permutation(len(data)).tolist()
    files = {shard.shard_id: os.open(data.root / shard.path, os.O_RDONLY) for shard in data.shards}
    size = data.shards[0].extent("cbed").stride
    for first in range(0, len(order), _BATCH):
        batch = np.empty((_BATCH, size), np.uint8)
        for k, i in enumerate(order[first : first + _BATCH]):
            shard, row = data.record_of(i)
            os.preadv(files[shard.shard_id], [batch[k].data], shard.extent("cbed").offset + row * size)
    for fd in files.values():
        os.close(fd)


def _row(what: str, samples: int, seconds: list[float]) -> dict[str, Any]:
    rates = [samples / s for s in seconds]
    size = 4 * int(np.prod(SAMPLE_SHAPE))
    median = statistics.median(rates)
    return {
        "what": what,
        "samples_per_s": round(median, 1),
        "min": round(min(rates), 1),
        "max": round(max(rates), 1),
        "GB_per_s": round(median * size / 1e9, 3),
        "rounds": len(rates),
    }


def _target(name: str, value: float, target: str, holds: bool, digits: int = 3) -> dict[str, Any]:
    return {"name": name, "value": round(value, digits), "target": target, "holds": bool(holds)}


def _reading_targets(rate: dict[str, float]) -> list[dict[str, Any]]:
    targets = []
    for raw, what in ((_RAW, "into memory"), (_RAW_SMALL, "into a cached buffer")):
        ratio = rate["exitwave"] / rate[raw]
        targets.append(_target(f"shuffled epoch / raw sequential reads {what}", ratio, ">= 0.80", ratio >= 0.8))
    peers = {what: rate[what] for what in rate if what.startswith(_PEERS)}
    if peers:
        best = max(peers, key=lambda what: peers[what])
        ratio = rate["exitwave"] / peers[best]
        targets.append(_target(f"samples/s / the best peer's ({best})", ratio, ">= 2", ratio >= 2))
    return targets


def _staging(root: Path, work: Path, rounds: int, note: Note) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Staging beside `cp -r` of the same shards, in turns, into empty folders; once with `sync` behind `cp`, too.

    What is staged is on the disk when `stage` returns; after `cp` alone it is in memory. Both ratios are given.
    """
    note("staging beside cp")
    samples = len(open_dataset(root))
    times: dict[str, list[float]] = {"stage, checked and synced": [], "cp": [], "cp, then sync": []}

    def copy(sync: bool, number: int) -> None:
        target = work / f"cp-{number}-{sync}"
        subprocess.run(["cp", "-r", str(root / "shards"), str(target)], check=True)
        if sync:
            subprocess.run(["sync", *map(str, target.rglob("*.h5"))], check=True)

    for number in range(min(rounds, 3)):
        ways: list[tuple[str, Callable[[], Any]]] = [
            ("stage, checked and synced", lambda number=number: stage(root, work / f"cache-{number}")),  # type: ignore[misc]
            ("cp", lambda number=number: copy(False, number)),  # type: ignore[misc]
            ("cp, then sync", lambda number=number: copy(True, number)),  # type: ignore[misc]
        ]
        for what, way in ways[number % 3 :] + ways[: number % 3]:
            os.sync()  # what others left to be written must not fall on this one
            times[what].append(_timed(way))
        for path in (*work.glob("cp-*"), *work.glob("cache-*")):
            shutil.rmtree(path)
    median = {what: statistics.median(seconds) for what, seconds in times.items()}
    rows = [_row(what, samples, seconds) for what, seconds in times.items()]
    ratios = {what: median[what] / median["stage, checked and synced"] for what in ("cp", "cp, then sync")}
    return rows, [_target(f"staging with checksums / {w}", r, ">= 0.9", r >= 0.9) for w, r in ratios.items()]


def _damage(work: Path, note: Note, flips: int = 64) -> dict[str, Any]:
    """Single bits flipped and half-copied files of full length, one after the other, against `verify`."""
    note("bit flips and half-copied files")
    copy = work / "damaged"
    small = make_dataset(copy, n=2 * _BATCH, per_shard=_BATCH, shape=(2, 2, 16, 16))
    shard = open_dataset(small).shards[0]
    path, found = small / shard.path, 0
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for byte in rng.integers(0, len(whole), flips).tolist():
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ (1 << byte % 8)]) + whole[byte + 1 :])
        found += not verify_dataset(small).ok
    for part in (1, 2, 3):
        half = len(whole) * part // 4
        path.write_bytes(whole[:half] + bytes(len(whole) - half))
        found += not verify_dataset(small).ok
    return _target(
        f"of {flips} single bit flips and 3 half-copied files found", found / (flips + 3), "1", found == flips + 3
    )


def _probes(work: Path, many: int, note: Note) -> list[dict[str, Any]]:
    """Time to the first batch of `many` samples; memory with ten times as many, beside a hundredth of those.

    Each in fresh processes, in turns.
    """
    note(f"{many} samples: time to the first batch")
    root = make_dataset(work / f"many-{many}", n=many, per_shard=_MANY_A_SHARD, shape=(4, 4))
    most = max(2 * _BATCH, 10 * many)
    few = max(2 * _BATCH, most // 100)
    one = make_dataset(work / "one", n=_MANY_A_SHARD, per_shard=_MANY_A_SHARD, shape=(4, 4))
    roots = {n: repeat_shard(work / f"repeated-{n}", one, -(-n // _MANY_A_SHARD)) for n in (few, most)}
    firsts: list[float] = []
    growth: dict[int, list[float]] = {n: [] for n in roots}
    for _ in range(3):
        firsts.append(_probe(root)["first_batch_s"])
        for n, repeated in roots.items():
            growth[n].append(_probe(repeated)["growth_bytes"] / 1e6)
    first = statistics.median(firsts)
    of_few, of_most = (statistics.median(growth[n]) for n in (few, most))
    more = of_most - of_few
    return [
        _target(f"seconds to the first batch of {many} samples, warm", first, "<= 0.3", first <= 0.3),
        _target(f"MB of a loader's own memory, {most} samples", of_most, "<= 50", of_most <= 50, 1),
        _target(f"MB more with {most} samples than with {few}", more, "<= 50", more <= 50, 1),
    ]


def _probe(root: Path) -> Any:
    command = [sys.executable, "-m", "exitwave.ingest.bench_probe", str(root), "1000"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def _machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
