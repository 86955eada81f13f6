"""The manifest: an append-only file of JSON lines, and the one truth of what is committed.

Protocol. (1) One controller holds the data set's lease, whose fencing epoch it writes into each line. (2) A commit is
one line, appended in one write and synced; a line counts once it ends in a newline. (3) A crash can leave only the
last line torn: readers ignore it, the next writer cuts it off before it appends. (4) A line with a lower epoch than one
before it comes from a controller that lost its lease without noticing: readers ignore it. (5) Before each append the
writer looks whether the file is as it left it; if another has written, it stops.
Each line ends in a checksum of itself (`line_crc32c`), so that a flipped bit in the truth is found as well.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import crc32c
import numpy as np

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.files import disk_full_means_interrupted, fsync_dir, open_to_read, part_path, read_plain
from exitwave.ingest.records import Header, Manifest, PublishedShard, ShardRecord, Tombstone
from exitwave.ingest.schema import MANIFEST_FORMAT, MANIFEST_VERSION, TABLES

__all__ = [
    "MANIFEST_NAME",
    "ManifestWriter",
    "create_dataset",
    "encode_line",
    "load_header",
    "load_manifest",
    "read_records_from",
]

MANIFEST_NAME = "manifest.jsonl"
_MANY_UIDS = 1 << 16
_SUM = re.compile(rb',"line_crc32c":"([0-9a-f]{8})"\}$')


def encode_line(data: Mapping[str, Any]) -> bytes:
    """A line of the manifest, with its checksum and its newline."""
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return body[:-1] + b',"line_crc32c":"%08x"}\n' % crc32c.crc32c(body)


def _decode(line: bytes, where: str) -> dict[str, Any]:
    """One line without its newline. UsageError naming file and line when it is not what a writer wrote."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not a line of JSON ({error}). {_WHAT_TO_DO}") from None
    if not isinstance(data, dict) or "kind" not in data:
        raise UsageError(f"{where}: expected an object with a `kind`, found {line[:60]!r}. {_WHAT_TO_DO}")
    if (data.get("format", MANIFEST_FORMAT), data.get("version", MANIFEST_VERSION)) != (
        MANIFEST_FORMAT,
        MANIFEST_VERSION,
    ):
        return data  # another version may sum its lines otherwise: its own message comes from the header
    if (found := _SUM.search(line)) is not None:
        expected = crc32c.crc32c(line[: found.start()] + b"}")
        if int(found[1], 16) != expected:
            raise UsageError(f"{where}: checksum {found[1].decode()}, expected {expected:08x}. {_WHAT_TO_DO}")
    elif "line_crc32c" in data:
        raise UsageError(f"{where}: expected the line's checksum at its end, found {line[-30:]!r}. {_WHAT_TO_DO}")
    return data


_WHAT_TO_DO = "The manifest is damaged: restore it from a copy, or build the data set anew."


def create_dataset(root: Path, header: Header) -> None:
    """Makes the folder and a manifest that holds only the header. UsageError when there is a manifest already."""
    path = root / MANIFEST_NAME
    data = encode_line(header.to_json())
    with disk_full_means_interrupted(root, len(data)):
        try:
            (root / "shards").mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{root}: is a file, expected a folder for the data set") from None
        part = part_path(root, MANIFEST_NAME)
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(part, path)
        except FileExistsError:
            raise UsageError(f"{path}: there is a data set already. Choose another folder, or resume it.") from None
        finally:
            part.unlink(missing_ok=True)
        fsync_dir(root)


def load_header(root: Path) -> Header:
    """The manifest's first line alone, which costs the same however long it is. Raises as `load_manifest` does."""
    path = Path(root) / MANIFEST_NAME
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            line = file.readline()
    except (FileNotFoundError, NotADirectoryError):
        return load_manifest(root).header  # says what is missing
    if not line.endswith(b"\n"):
        raise UsageError(f"{path}:1: the header is missing. {_WHAT_TO_DO}")
    return _header(_decode(line[:-1], f"{path}:1"), f"{path}:1")


class _Lines(Iterator[bytes]):
    """The whole lines of a file, one at a time, without their newlines; `torn` says that something follows the last.

    One at a time: of a long manifest the text is several times what is kept of it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.torn = False

    def __next__(self) -> bytes:
        line = self._file.readline()
        if line.endswith(b"\n"):
            return line[:-1]
        self.torn = bool(line)
        raise StopIteration


def load_manifest(root: Path) -> Manifest:
    """Reads the manifest of the data set in `root`.

    UsageError naming file and line: no manifest, another format or version, a broken line (but the last), a path that
    leaves the data set, a shard committed twice.
    """
    path = Path(root) / MANIFEST_NAME
    try:
        file = os.fdopen(open_to_read(path), "rb")
    except (FileNotFoundError, NotADirectoryError):
        if not Path(root).exists():
            raise UsageError(f"{root}: no such folder.") from None
        raise UsageError(
            f"{root}: is not an exitwave data set (or not yet): there is no {MANIFEST_NAME} in it."
        ) from None
    live: dict[str, ShardRecord] = {}
    tombstones: list[Tombstone] = []
    next_seq = epoch = stale = 0
    with file:
        lines = _Lines(file)
        if (first := next(lines, None)) is None:
            raise UsageError(f"{path}:1: the header is missing. {_WHAT_TO_DO}")
        header = _header(_decode(first, f"{path}:1"), f"{path}:1")
        for where, record in _records(lines, path):
            if record.epoch < epoch:
                stale += 1
                continue
            epoch = record.epoch
            next_seq = max(next_seq, record.seq + 1)
            if isinstance(record, Tombstone):
                tombstones.append(record)
                live.pop(record.shard_id, None)
                continue
            _parsed(lambda shard: _check_fields(shard, header), record, where)
            if record.shard_id in live:
                raise UsageError(f"{where}: shard {record.shard_id} is committed twice. {_WHAT_TO_DO}")
            live[record.shard_id] = record
    return Manifest(
        header=header,
        shards=tuple(sorted(live.values(), key=lambda s: (s.generation, s.task, s.shard_id))),
        tombstones=tuple(tombstones),
        next_seq=next_seq,
        torn_tail=lines.torn,
        stale=stale,
        epoch=epoch,
    )


def read_records_from(root: Path, offset: int) -> list[ShardRecord | Tombstone]:
    """The whole lines that begin at or after byte `offset`, which is the end of some earlier one, parsed but not
    compared with those before. Raises UsageError for a damaged line.
    """
    path = Path(root) / MANIFEST_NAME
    with os.fdopen(open_to_read(path), "rb") as file:
        file.seek(offset)
        *lines, _ = file.read().split(b"\n")
    return [record for _, record in _records(lines, path)]


def _header(data: dict[str, Any], where: str) -> Header:
    found = (data.get("format"), data.get("version"))
    if found != (MANIFEST_FORMAT, MANIFEST_VERSION):
        raise UsageError(
            f"{where}: found format {found[0]!r} version {found[1]}, expected {MANIFEST_FORMAT!r} version "
            f"{MANIFEST_VERSION}. Read it with the exitwave that wrote it ({data.get('exitwave_version', 'unknown')})."
        )
    return _parsed(Header.from_json, data, where)


def _records(lines: Iterable[bytes], path: Path) -> Iterator[tuple[str, ShardRecord | Tombstone]]:
    for number, line in enumerate(lines, start=2):
        where = f"{path}:{number}"
        data = _decode(line, where)
        if data["kind"] == "shard":
            yield where, _parsed(ShardRecord.from_json, data, where)
        elif data["kind"] == "tombstone":
            yield where, _parsed(Tombstone.from_json, data, where)
        else:
            raise UsageError(f"{where}: kind {data['kind']!r}, expected shard or tombstone. {_WHAT_TO_DO}")


def _check_fields(shard: PublishedShard, header: Header) -> None:
    """UsageError unless the shard's arrays are the header's fields, in their order, dtype and shape."""
    expected = [(f.name, f.stored_dtype.str, f.shape, f.encoding, f.scale) for f in header.fields]
    found = [(e.field, e.dtype, e.sample_shape, e.encoding, e.scale) for e in shard.extents if e.field not in TABLES]
    tables = [e.field for e in shard.extents if e.field in TABLES]
    if expected != found or sorted(tables) != sorted(TABLES):
        raise UsageError(
            f"shard {shard.shard_id} holds {found} and the tables {tables}, expected {expected} and {list(TABLES)}"
        )


def _parsed(parse: Callable[[Any], Any], data: Any, where: str) -> Any:
    try:
        return parse(data)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{where}: {type(error).__name__}: {error}. {_WHAT_TO_DO}") from None


class ManifestWriter:
    """The single committer's hand on the manifest; a context manager, or `close()` it.

    `epoch` is the fencing epoch of the caller's lease: UsageError when the manifest has seen a higher one. It holds a
    kernel lock on the manifest, so that a second writer on the same machine is refused at once.
    """

    def __init__(self, root: Path, *, epoch: int) -> None:
        self.root = Path(root)
        self.path = self.root / MANIFEST_NAME
        self.epoch = epoch
        self.manifest = load_manifest(self.root)
        if epoch < self.manifest.epoch:
            raise UsageError(
                f"{self.path}: written to by a later controller (epoch {self.manifest.epoch}, this one has {epoch})"
            )
        with disk_full_means_interrupted(self.path):
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            self._lock()
            self.manifest = load_manifest(self.root)
            self._size = self._cut_torn_tail()
            self._next_seq = self.manifest.next_seq
            self._learn(self.manifest)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path}: another process is writing to this data set") from None
        except OSError:
            pass  # a file system without locks: the lease alone guards it

    def _cut_torn_tail(self) -> int:
        data = read_plain(self.path)
        size = data.rfind(b"\n") + 1
        if size != len(data):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
        return size

    def _learn(self, manifest: Manifest) -> None:
        """What is committed, of which little is kept: the shards' ids and the samples', whose number is the limit."""
        self._live = {shard.shard_id for shard in manifest.shards}
        self._params = next((shard.extent("params").numpy_dtype for shard in manifest.shards), None)
        # A damaged shard must not keep the writer from opening: writing its tombstone is the way out.
        found = [self._read_uids(shard, strict=False) for shard in manifest.shards]
        self._uids = np.sort(np.concatenate([np.empty(0, "<u8"), *found]))
        self._new_uids: set[int] = set()  # since then; they join the others when they are many
        self._forgotten = False  # whether a tombstone has taken uids away since

    def _read_uids(self, shard: PublishedShard, *, strict: bool = True) -> np.ndarray[Any, Any]:
        extent, path = shard.extent("uid"), self.root / shard.path
        try:
            with os.fdopen(open_to_read(path), "rb") as file:
                data = os.pread(file.fileno(), extent.nbytes, extent.offset)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            if not strict:
                return np.empty(0, "<u8")
            raise DamagedDataError(f"shard {shard.shard_id}: {path} cannot be read ({error.strerror})") from error
        if strict and size != shard.nbytes:
            raise DamagedDataError(f"shard {shard.shard_id}: {path} has {size} bytes, expected {shard.nbytes}")
        return np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")

    def commit(
        self, published: PublishedShard, *, split: str, producer: Mapping[str, str], generation: int = 0
    ) -> ShardRecord:
        """Commits a published shard: one line, on disk when this returns.

        UsageError: the shard is committed already, or one of its uids is (nothing is written then).
        """
        if self._forgotten:
            self._learn(load_manifest(self.root))
        if published.shard_id in self._live:
            raise UsageError(f"{self.path}: shard {published.shard_id} is committed already")
        _check_fields(published, self.manifest.header)
        self._check_params(published)
        uids = self._read_uids(published)
        if (known := self._known(uids)) is not None:
            raise UsageError(
                f"{self.path}: shard {published.shard_id} holds uid {known:#018x}, which another committed shard holds "
                "already"
            )
        fields = {name: getattr(published, name) for name in PublishedShard.__dataclass_fields__}
        record = ShardRecord(
            **fields,
            seq=self._next_seq,
            generation=generation,
            split=split,
            producer=dict(producer),
            epoch=self.epoch,
        )
        self._append(record)
        self._live.add(record.shard_id)
        self._params = self._params or record.extent("params").numpy_dtype
        self._new_uids.update(uids.tolist())
        if len(self._new_uids) > _MANY_UIDS:
            more = np.fromiter(self._new_uids, "<u8", len(self._new_uids))
            self._uids = np.sort(np.concatenate([self._uids, more]))
            self._new_uids.clear()
        return record

    def _known(self, uids: np.ndarray[Any, Any]) -> int | None:
        """One of `uids` that is committed already."""
        if not self._new_uids.isdisjoint(found := uids.tolist()):
            return next(uid for uid in found if uid in self._new_uids)
        if self._uids.size and uids.size:
            at = np.minimum(np.searchsorted(self._uids, uids), self._uids.size - 1)
            if (known := uids[self._uids[at] == uids]).size:
                return int(known[0])
        return None

    def _check_params(self, published: PublishedShard) -> None:
        """UsageError where the shard has other parameters than those that are committed: nobody could read both."""
        mine = published.extent("params").numpy_dtype
        theirs = mine if self._params is None else self._params
        if mine != theirs:
            apart = sorted(set(mine.names or ()) ^ set(theirs.names or ())) or ["types"]
            raise UsageError(
                f"{self.path}: shard {published.shard_id} has other parameters than the shards before it "
                f"({', '.join(apart[:6])}). If the data set is of an older version, `exitwave migrate {self.root}` "
                "brings it to the present one."
            )

    def tombstone(self, shard_id: str, why: str) -> Tombstone:
        """Takes a committed shard out of the data set; its file stays. UsageError when it is not committed."""
        if shard_id not in self._live:
            raise UsageError(f"{self.path}: shard {shard_id} is not committed")
        tombstone = Tombstone(seq=self._next_seq, shard_id=shard_id, why=why, epoch=self.epoch)
        self._append(tombstone)
        self._live.discard(shard_id)
        self._forgotten = True
        return tombstone

    def _append(self, record: ShardRecord | Tombstone) -> None:
        line = encode_line(record.to_json())
        if os.fstat(self._fd).st_size != self._size:
            raise InterruptedRunError(
                f"{self.path}: another controller has written to this data set; this one (epoch {self.epoch}) stops. "
                "Nothing is lost: run the command again when the other is done."
            )
        try:
            with disk_full_means_interrupted(self.path, len(line)):
                data = line
                while data:
                    data = data[os.write(self._fd, data) :]
                os.fsync(self._fd)
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)
        self._next_seq += 1

    def reload(self) -> Manifest:
        """The manifest as it stands on disk now."""
        self.manifest = load_manifest(self.root)
        return self.manifest

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ManifestWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
