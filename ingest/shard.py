"""One shard: an HDF5 file whose arrays are contiguous and start 4 KiB-aligned, so that a sample is one `preadv`.

Writing goes in three steps. (1) HDF5 lays the file out: every dataset is allocated at once, nothing is filled, no time
is recorded. (2) The layout is read back, the whole size is reserved (a full disk shows here, before hours of work, not
after), and samples are written in place at their offsets. (3) `publish` adds the structures, reopens the file, checks
every sample against its checksum, hashes the file, and only then gives it its final name.
The same task run twice makes the same bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from exitwave.ingest.codecs import check_codec
from exitwave.ingest.errors import UsageError
from exitwave.ingest.extents import Extent
from exitwave.ingest.files import byte_view, crc32c, disk_full_means_interrupted, part_path, publish, shard_path
from exitwave.ingest.records import PublishedShard, StructureInfo, check_name
from exitwave.ingest.schema import SHARD_FORMAT, SHARD_VERSION, TABLES, FieldSpec
from exitwave.ingest.shard_check import describe_shard
from exitwave.ingest.shard_reader import ShardReader, Structure, read_extents

__all__ = ["ALIGNMENT", "LIBVER", "ShardReader", "ShardWriter", "Structure", "exitwave_version", "read_extents"]

# Threshold 1 would align every small table too and bloat small shards 3.6 times.
ALIGNMENT = {"alignment_threshold": 65536, "alignment_interval": 4096}
_METADATA = 65536  # bytes: more than HDF5's own records take for a file or for a structure
LIBVER = ("earliest", "v110")


def _little(dtype: Any) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _contiguous() -> Any:
    """Where bytes lie is decided at once, nothing is filled, no time is recorded."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    return layout


def exitwave_version() -> str:
    try:
        return version("exitwave")
    except PackageNotFoundError:
        return "unknown"


class ShardWriter:
    """Writes one shard of `n` samples into the data set folder `dataset`; a context manager.

    Leaving without `publish()` (also by an exception) removes the temporary file. UsageError for samples that do not
    fit the fields, InterruptedRunError when the disk is full (nothing half-written stays).
    """

    def __init__(
        self,
        dataset: Path,
        *,
        shard_id: str,
        task: int,
        campaign_hash: str,
        simulator: str,
        n: int,
        fields: Sequence[FieldSpec],
        params_dtype: np.dtype[Any],
    ) -> None:
        if n < 1:
            raise UsageError(f"shard {shard_id}: n = {n}, expected at least one sample")
        self.dataset = Path(dataset)
        self.shard_id = check_name(shard_id, "shard_id")
        self.task = task
        self.n = n
        self.fields = tuple(fields)
        for field in self.fields:
            check_codec(field.name, field.dtype, field.encoding)
            if field.name in (*TABLES, "structures"):
                raise UsageError(f"field {field.name!r}: a shard has something else of that name; choose another.")
        self._attrs: dict[str, Any] = {
            "format": SHARD_FORMAT,
            "format_version": SHARD_VERSION,
            "exitwave_version": exitwave_version(),
            "shard_id": shard_id,
            "task": task,
            "campaign_hash": campaign_hash,
            "simulator": simulator,
        }
        self._dtypes = {field.name: _little(field.dtype) for field in self.fields}
        self._params_dtype = np.dtype(params_dtype)
        self._structures: dict[int, Structure] = {}
        self._uids = np.zeros(n, dtype="<u8")
        self._params = np.zeros(n, dtype=self._params_dtype)
        self._crc = np.zeros((n, len(self.fields)), dtype="<u4")
        self._written = np.zeros(n, dtype=bool)
        self._fd: int | None = None
        self._part: Path | None = None
        self._needed = sum(n * self._dtypes[f.name].itemsize * int(np.prod(f.shape)) for f in self.fields)

    def __enter__(self) -> ShardWriter:
        folder = self.dataset / "shards" / ".part"
        with disk_full_means_interrupted(self.dataset, self._needed):
            folder.mkdir(parents=True, exist_ok=True)
            self._part = part_path(folder, self.shard_id)
            try:
                self._begin(folder)
            except BaseException:
                self._discard()
                raise
        return self

    def _begin(self, folder: Path) -> None:
        """Makes the file, in its whole size."""
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < self._needed + _METADATA:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._part is not None:
            self._lay_out(self._part)
            self._open_laid_out(self._part)

    def _open_laid_out(self, part: Path) -> None:
        self._extents = {extent.field: extent for extent in read_extents(part)}
        self._fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        os.posix_fallocate(self._fd, 0, os.fstat(self._fd).st_size)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._part is not None:
            self._part.unlink(missing_ok=True)
            self._part = None

    def _lay_out(self, path: Path) -> None:
        with h5py.File(path, "w", libver=LIBVER, **ALIGNMENT) as file:

            def add(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
                kind = h5py.h5t.py_create(dtype, logical=True)
                h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), _contiguous())
                for key, value in attrs.items():
                    file[name].attrs[key] = value

            for key, value in self._attrs.items():
                file.attrs[key] = value
            add("uid", np.dtype("<u8"), (self.n,), {})
            add("params", self._params_dtype, (self.n,), {})
            names = [field.name for field in self.fields]
            add("crc32c", np.dtype("<u4"), (self.n, len(names)), {"fields": ",".join(names)})
            add("params_crc32c", np.dtype("<u4"), (self.n,), {})
            for field in self.fields:
                attrs: dict[str, Any] = {
                    "axes": ",".join(field.axes),
                    "unit": field.unit,
                    "meaning": field.meaning,
                }
                if field.encoding:
                    attrs |= {"encoding": field.encoding, "scale": field.scale}
                self._create_field(file, field)
                for key, value in attrs.items():
                    file[field.name].attrs[key] = value

    def _create_field(self, file: Any, field: FieldSpec) -> None:
        kind = h5py.h5t.py_create(self._dtypes[field.name], logical=True)
        shape = h5py.h5s.create_simple((self.n, *field.shape))
        h5py.h5d.create(file.id, field.name.encode(), kind, shape, _contiguous())

    def write(self, row: int, *, uid: int, params: np.void, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Writes sample `row` (0 <= row < n): its 64-bit `uid`, its record of `params_dtype`, one array per field."""
        where = f"shard {self.shard_id}, sample {row} (uid {uid:#018x})"
        if not 0 <= row < self.n or self._written[row]:
            raise UsageError(f"{where}: expected each row of 0..{self.n - 1} once")
        if set(arrays) != set(self._dtypes):
            raise UsageError(f"{where}: fields {sorted(arrays)}, expected {sorted(self._dtypes)}")
        if params.dtype != self._params_dtype:
            raise UsageError(f"{where}: params of dtype {params.dtype}, expected {self._params_dtype}")
        for column, field in enumerate(self.fields):
            array, dtype = np.asarray(arrays[field.name]), self._dtypes[field.name]
            if array.shape != field.shape or array.dtype.newbyteorder("<") != dtype:
                raise UsageError(
                    f"{where}: {field.name} is {array.dtype} {array.shape}, expected {dtype} {field.shape}"
                )
            if dtype.kind in "fc" and not np.isfinite(array).all():
                raise UsageError(f"{where}: {field.name} holds values that are not finite")
            data = byte_view(array, dtype)
            self._crc[row, column] = crc32c(data)
            self._put_sample(field, row, data)
        self._uids[row] = uid
        self._params[row] = params
        self._written[row] = True

    def _put_sample(self, field: FieldSpec, row: int, data: np.ndarray[Any, Any]) -> None:
        """Keeps the stored bytes of one sample of one field."""
        self._put(self._extents[field.name], row, data)

    def _finish_samples(self) -> None:
        """After the last sample, before the tables: nothing is left to do where samples lie in place."""

    def _put(self, extent: Extent, row: int, data: np.ndarray[Any, Any]) -> None:
        if self._fd is None:
            raise RuntimeError("the shard is not open: use ShardWriter as a context manager, and publish once")
        view, offset = data.data, extent.offset + row * extent.stride
        with disk_full_means_interrupted(self.dataset, self._needed):
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count

    def add_structure(
        self, info: StructureInfo, *, numbers: Any, positions_A: Any, cell_A: Any, pbc: Any, wyckoff: str
    ) -> None:
        """Adds the atoms as simulated: numbers (N,), positions_A (N, 3) Å, cell_A (3, 3) Å, pbc (3,)."""
        structure = Structure(
            info=info,
            numbers=np.asarray(numbers, dtype="<i4"),
            positions_A=np.asarray(positions_A, dtype="<f8"),
            cell_A=np.asarray(cell_A, dtype="<f8"),
            pbc=np.asarray(pbc, dtype="u1"),
            wyckoff=wyckoff,
        )
        n = structure.numbers.size
        shapes = (structure.numbers.shape, structure.positions_A.shape, structure.cell_A.shape, structure.pbc.shape)
        if info.index in self._structures or shapes != ((n,), (n, 3), (3, 3), (3,)):
            raise UsageError(
                f"shard {self.shard_id}: structure {info.index} with shapes {shapes}, expected each index once and "
                f"{((n,), (n, 3), (3, 3), (3,))}"
            )
        self._structures[info.index] = structure

    def publish(self) -> PublishedShard:
        """Finishes, verifies and names the shard. All rows must be written, with different uids."""
        if not self._written.all():
            missing = np.flatnonzero(~self._written).tolist()
            raise UsageError(f"shard {self.shard_id}: rows {missing[:10]} of {self.n} were never written")
        values, counts = np.unique(self._uids, return_counts=True)
        if counts.max() > 1:
            raise UsageError(f"shard {self.shard_id}: uid {int(values[counts.argmax()]):#018x} stands twice")
        self._finish_samples()
        params_crc = np.array([crc32c(byte_view(p, self._params_dtype)) for p in self._params], dtype="<u4")
        tables = {"uid": self._uids, "params": self._params, "crc32c": self._crc, "params_crc32c": params_crc}
        for name, table in tables.items():
            self._put(self._extents[name], 0, byte_view(table, table.dtype))
        if self._fd is None or self._part is None:
            raise RuntimeError("the shard is not open")
        os.close(self._fd)
        self._fd = None
        final = self.dataset / shard_path(self.shard_id)
        with disk_full_means_interrupted(self.dataset, self._needed):
            self._reserve_for_structures(self._part)
            self._add_structures(self._part)
            published = describe_shard(self._part, shard_path(self.shard_id))
            if published.extents != tuple(self._extents.values()):
                raise RuntimeError(f"shard {self.shard_id}: the layout changed while structures were added")
            final.parent.mkdir(parents=True, exist_ok=True)
            publish(self._part, final)
        self._part = None
        return published

    def _reserve_for_structures(self, path: Path) -> None:
        # HDF5 cannot close a file whose last blocks it could not write, so it must never meet a full disk: reserve
        # more than the structures take; closing cuts the file to its true length.
        need = _METADATA
        for structure in self._structures.values():
            need += _METADATA + structure.numbers.nbytes + structure.positions_A.nbytes + 4 * len(str(structure.info))
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, os.fstat(fd).st_size, need)
        finally:
            os.close(fd)

    def _add_structures(self, path: Path) -> None:
        with h5py.File(path, "r+", libver=LIBVER, **ALIGNMENT) as file:
            top = file.create_group("structures")
            for index, structure in sorted(self._structures.items()):
                group = top.create_group(str(index))
                for name in ("numbers", "positions_A", "cell_A", "pbc"):
                    group.create_dataset(name, data=getattr(structure, name), track_times=False)
                for key, value in {**asdict(structure.info), "wyckoff": structure.wyckoff}.items():
                    group.attrs[key] = np.uint64(value) if key == "prototype_group" else value
