"""Training while the data set still grows: batches from a reservoir of what has arrived, repeatable afterwards.

1. Samples are numbered by *arrival*: the order of the manifest's lines, which is never rewritten. A sample's number
   stays what it is however much comes later; loader processes look into the manifest again for one they do not know.
2. Before each draw rank 0 looks how far the manifest is (`seq` of its last line) and tells the others; all run the same
   reservoir on it, and each takes its piece of the batch.
3. A log of (step, seq), one entry for each step that saw more than the one before, stands in the checkpoint. With it,
   the run can be resumed, and done again when all data has long arrived, in the very same order. exitwave's own trainer
   decides on each step before it is drawn and writes the decision down first (`arrivals`): there, the sampler is told.
4. When arrivals must wait, a small file says so to the campaign (`backpressure.json`, renewed while it holds):
   producers ask `held_back`. One not renewed for a minute counts for nothing: a dead trainer holds nobody.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from exitwave.ingest.dataset import Dataset
from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.files import read_plain, write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest
from exitwave.ingest.order import partition
from exitwave.ingest.reading import ShardFiles
from exitwave.ingest.records import Manifest, ShardRecord
from exitwave.ingest.reservoir import Reservoir

__all__ = ["BACKPRESSURE_NAME", "GrowingDataset", "ReservoirSampler", "held_back"]

BACKPRESSURE_NAME = "backpressure.json"
_STALE_S = 60.0
_RENEW_S = 5.0
_WORTH_SPARING_S = 0.05
_LOOK_SHARE = 20  # looks for new lines take at most one part in so many of the time

Array = np.ndarray[Any, Any]
Log = list[list[int]]


class GrowingDataset:
    """Map-style, by number of arrival; give it to a DataLoader with a `ReservoirSampler` and `collate_fn=collate`.

    `split`: only shards of that split count. `refresh()` looks for more; reading a number that is not known does, too.
    Shards that a tombstone took out keep their numbers, and their samples are read as long as their files are there.
    """

    def __init__(
        self,
        path: str | Path,
        fields: Sequence[str] = ("cbed", "potential"),
        split: str | None = "train",
        cache: str | Path | None = None,
        verify: bool = True,
    ) -> None:
        self.root = Path(path)
        self.fields = tuple(fields)
        self.split_name = split
        manifest = load_manifest(self.root)
        self.dataset_id = manifest.header.dataset_id
        staged = None if cache is None else Path(cache) / self.dataset_id / "ready"
        self._files = ShardFiles(self.root, staged=staged, verify=verify)
        self._size = -1
        self._next_look = 0.0
        self._arrived: dict[str, ShardRecord] = {}  # in order of seq
        self._take(manifest)
        self._data.read([], self.fields)  # a field that is not there shows now, not in a worker

    def _take(self, manifest: Manifest) -> None:
        for shard in sorted(manifest.shards, key=lambda s: s.seq):
            if self.split_name in (None, shard.split):
                self._arrived.setdefault(shard.shard_id, shard)
        shards = sorted(self._arrived.values(), key=lambda s: s.seq)
        self._data = Dataset(self.root, manifest, shards, self._files, split_name=self.split_name)
        self._seqs = np.array([shard.seq for shard in shards], dtype=np.int64)
        self.seq = manifest.next_seq - 1

    def refresh(self, *, at_once: bool = False) -> int:
        """Looks whether more has arrived; returns the `seq` of the manifest's last line as far as it was read.

        A long manifest is not read anew for each of its lines, unless `at_once`.
        """
        size = (self.root / MANIFEST_NAME).stat().st_size
        began = time.monotonic()
        if size != self._size and (at_once or began >= self._next_look):
            self._take(load_manifest(self.root))
            self._size = size
            took = time.monotonic() - began
            self._next_look = began + (_LOOK_SHARE * took if took > _WORTH_SPARING_S else 0.0)
        return self.seq

    @property
    def data(self) -> Dataset:
        """What has arrived so far, as far as anybody looked."""
        return self._data

    def until(self, seq: int) -> GrowingDataset:
        """The samples in the lines up to `seq`, which stay as many; it shares the open files."""
        view = copy.copy(self)
        shards = [shard for shard in self._data.shards if shard.seq <= seq]
        view._arrived = {shard.shard_id: shard for shard in shards}
        view._seqs = np.array([shard.seq for shard in shards], dtype=np.int64)
        view._data = Dataset(self.root, self._data.manifest, shards, self._files, split_name=self.split_name)
        view._next_look = float("inf")
        return view

    def n_arrived(self, seq: int) -> int:
        """Samples in the lines up to `seq`."""
        return int(self._data._starts[np.searchsorted(self._seqs, seq, side="right")])

    def digest_until(self, seq: int) -> str:
        """A hash of which shards those are, in order of arrival."""
        ids = "\n".join(f"{s.shard_id} {s.n}" for s in self._data.shards if s.seq <= seq)
        return xxhash.xxh3_64_hexdigest(ids.encode())

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: array[0] for name, array in self._read([i]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Any:
        from exitwave.ingest.batches import SampleList

        return SampleList(self._read(indices))

    def _read(self, indices: Sequence[int]) -> dict[str, Array]:
        if max(indices, default=0) >= len(self._data):
            self.refresh()
        return self._data.read(indices, self.fields)


class ReservoirSampler:
    """This rank's batches of arrival numbers, without end or for `steps` of them; a DataLoader's `batch_sampler`.

    `global_batch` samples a step over all ranks. `agree`: rank 0's number to all ranks (a broadcast); needed for more
    than one rank. `all_arrived`: whether the campaign has ended, asked while waiting. `replay`: the state of a run to
    do again. `wait_s`: InterruptedRunError when nothing came for so long and there is nothing to draw from.

    `decide`: the line of the manifest up to which a step knows, for each step in order from 0 on, on every rank; then
    neither the manifest nor `agree` is asked. `log`: where who decides keeps (step, seq). `backpressure`: whether to
    hold producers back.
    """

    def __init__(
        self,
        dataset: GrowingDataset,
        *,
        rank: int,
        world_size: int,
        global_batch: int,
        seed: int,
        capacity: int,
        watermark: int,
        steps: int | None = None,
        agree: Callable[[int], int] | None = None,
        all_arrived: Callable[[], bool] = lambda: False,
        replay: dict[str, Any] | None = None,
        wait_s: float = 3600.0,
        poll_s: float = 0.2,
        decide: Callable[[int], int] | None = None,
        log: Log | None = None,
        backpressure: bool = True,
    ) -> None:
        if not 0 <= rank < world_size or global_batch < world_size:
            raise UsageError(f"rank {rank} of {world_size}, batch {global_batch}: expected a sample for every rank")
        if world_size > 1 and agree is None and decide is None:
            raise UsageError(
                "several ranks need `agree`: a broadcast of rank 0's number, or they would draw differently"
            )
        self.dataset = dataset
        self.rank, self.world_size, self.global_batch = rank, world_size, global_batch
        self.steps = steps
        self._settings = {"seed": seed, "capacity": capacity, "watermark": watermark}
        self._agree = agree or (lambda seq: seq)
        self._all_arrived = all_arrived
        self._replay: tuple[int, Log] = (replay["step"], replay["log"]) if replay else (0, [])
        self._wait_s, self._poll_s = wait_s, poll_s
        self._decide = decide
        self._log: Log = [] if log is None else log
        self._backpressure = backpressure
        self.waiting = 0  # samples that arrived and have no place yet, when the last batch was drawn
        self._committed = 0
        self._holding = False
        self._renewed = 0.0
        self.reservoir = Reservoir(**self._settings)

    def __iter__(self) -> Iterator[list[int]]:
        """From the committed step on. The reservoir is built anew from the log: reading ahead leaves no trace."""
        self.reservoir = Reservoir(**self._settings)
        past, done = self._past(), self._committed
        if self._decide is None:
            self._log = list(past)
        offered = seq = 0
        step = 0
        try:
            while self.steps is None or step < self.steps:
                seq, offered = self._fill(step, done, past, seq, offered)
                if self._decide is None and step >= done and (not self._log or self._log[-1][1] != seq):
                    self._log.append([step, seq])
                batch = np.array(self.reservoir.draw(self.global_batch))
                step += 1
                if step > done:
                    yield partition(batch, self.rank, self.world_size).tolist()
        finally:
            self._tell(False, 0)

    def _past(self) -> Log:
        return [[step, seq] for step, seq in self._log if step < self._committed]

    def _fill(self, step: int, done: int, past: Log, seq: int, offered: int) -> tuple[int, int]:
        """Offers what has arrived, as the log says or as it is now, until a batch may be drawn."""
        if self._decide is not None:
            seq = self._decide(step)
            self._see(seq)
            offered = self._offer(seq, offered)
            self.waiting = self.dataset.n_arrived(seq) - offered
            if step >= done:
                self._tell(self.waiting > 0, self.waiting)
            return seq, offered
        for steps, log in ((done, past), self._replay):
            if step < steps:
                seq = [entry[1] for entry in log if entry[0] <= step][-1]
                self._see(seq)
                return seq, self._offer(seq, offered)
        deadline = time.monotonic() + self._wait_s
        while True:
            # One number says both how far the manifest is and whether that is all: ranks must agree on the two.
            mine = 2 * self.dataset.refresh() + int(self._all_arrived()) if self.rank == 0 else 0
            told = self._agree(mine)
            seq, ended = told >> 1, bool(told & 1)
            self._see(seq)
            offered = self._offer(seq, offered)
            waiting = self.dataset.n_arrived(seq) - offered
            self._tell(waiting > 0, waiting)
            if self.reservoir.ready(all_arrived=ended):
                return seq, offered
            if ended or time.monotonic() > deadline:
                raise InterruptedRunError(
                    f"{self.dataset.root}: {len(self.reservoir.items)} samples arrived, expected "
                    f"{self.reservoir.watermark} to begin with. Run it again when there are more, or lower the "
                    "watermark."
                )
            time.sleep(self._poll_s)

    def _see(self, seq: int) -> None:
        """Waits until the manifest is as far here as rank 0 or the log has it; a network file system may lag."""
        deadline = time.monotonic() + self._wait_s
        while self.dataset.refresh() < seq:
            if time.monotonic() > deadline:
                raise InterruptedRunError(
                    f"{self.dataset.root}: the manifest ends at line {self.dataset.seq}, expected {seq} at least"
                )
            time.sleep(self._poll_s)

    def _offer(self, seq: int, offered: int) -> int:
        for item in range(offered, self.dataset.n_arrived(seq)):
            if not self.reservoir.offer(item):
                return item
        return max(offered, self.dataset.n_arrived(seq))

    def _tell(self, hold: bool, waiting: int) -> None:
        """Writes, renews or removes the file that holds the campaign back; rank 0 does."""
        now = time.monotonic()
        if (
            self.rank != 0
            or not self._backpressure
            or (hold == self._holding and (not hold or now - self._renewed < _RENEW_S))
        ):
            return
        path = self.dataset.root / BACKPRESSURE_NAME
        with contextlib.suppress(OSError, ExitwaveError):  # read-only: its campaign is over, or not ours to slow; full
            if hold:
                why = f"{waiting} samples wait for a place among {self.reservoir.capacity} not yet seen"
                write_atomic(path, json.dumps({"hold": True, "why": why, "time": time.time()}).encode())
            else:
                path.unlink(missing_ok=True)
        self._holding, self._renewed = hold, now

    def commit(self, n: int) -> None:
        """Records that the next `n` samples over all ranks, one global batch, went into the model."""
        if n != self.global_batch:
            raise UsageError(f"commit of {n} samples: expected a global batch of {self.global_batch}")
        self._committed += 1

    def state_dict(self) -> dict[str, Any]:
        """The position, the settings, and the log of (step, seq) up to it; plain values."""
        log = self._past()
        return {
            **self._settings,
            "dataset_id": self.dataset.dataset_id,
            "split": self.dataset.split_name,
            "global_batch": self.global_batch,
            "step": self._committed,
            "log": log,
            "shards_digest": self.dataset.digest_until(log[-1][1]) if log else "",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` stopped, on any number of ranks; UsageError for another data set or settings."""
        mine = self.state_dict()
        log = [list(entry) for entry in state["log"]]
        if self._decide is not None and self._log[: len(log)] != log:
            raise UsageError(
                f"the checkpoint knows of {len(log)} arrivals that the log of arrivals beside it does not hold; it was "
                "changed or is of another run"
            )
        if log:
            self.dataset.refresh()
            mine["shards_digest"] = self.dataset.digest_until(log[-1][1])
        wrong = [
            f"{k} {state.get(k)!r} then, {mine[k]!r} now"
            for k in mine
            if k not in ("step", "log") and state.get(k) != mine[k]
        ]
        if wrong:
            raise UsageError("the run cannot continue from the same reservoir: " + "; ".join(wrong))
        self._committed = int(state["step"])
        if self._decide is None:
            self._log = log

    def reuse(self) -> dict[int, int]:
        """Histogram: times a sample was drawn -> samples, of all that arrived in the reservoir so far."""
        return self.reservoir.reuse()


def held_back(root: Path, *, min_free_bytes: int = 0) -> str | None:
    """Why a producer should wait before its next shard, or None: the trainer is behind, or the disk is nearly full."""
    if min_free_bytes and (free := shutil.disk_usage(root).free) < min_free_bytes:
        return f"{free} bytes free, expected {min_free_bytes}"
    try:
        found = json.loads(read_plain(Path(root) / BACKPRESSURE_NAME))
        fresh = 0 <= time.time() - float(found["time"]) < _STALE_S
        return str(found["why"]) if found["hold"] and fresh else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
