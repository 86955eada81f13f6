"""A data set to look at and to index: samples in the manifest's order, read lazily.

>>> data = open_dataset("runs/demo/dataset").split("train")      # doctest: +SKIP
>>> data[0]["cbed"].shape, data.params["thickness_A"].mean()     # doctest: +SKIP
"""

from __future__ import annotations

import html
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from exitwave.ingest.buffers import BufferPool
from exitwave.ingest.codecs import decode
from exitwave.ingest.errors import UsageError
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.reading import ShardFiles
from exitwave.ingest.records import Manifest, ShardRecord
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.staging_home import CacheHome
from exitwave.ingest.tiles import plan_tile
from exitwave.ingest.windows import ShardLayout

if TYPE_CHECKING:
    from exitwave.ingest.shard import Structure

__all__ = ["Dataset", "open_dataset"]

Array = np.ndarray[Any, Any]


def open_dataset(
    path: str | Path,
    *,
    cache: str | Path | None = None,
    verify: bool = True,
    threads: int | None = None,
    cache_wait_s: float = 0.0,
) -> Dataset:
    """Opens what is committed now in the data set at `path`.

    `cache`: a folder that `stage` filled; shards ready there are read there. `verify`: check the checksum of every
    sample read. `threads`: how many threads read a large batch, by default up to four, as there are processors.
    `cache_wait_s`: how long a shard that is not in the cache yet is waited for before the data set itself is read.
    UsageError when it is no data set or its manifest cannot be read.
    """
    root = Path(path)
    manifest = load_manifest(root)
    staged = None
    if cache is not None:
        home = CacheHome(Path(cache), manifest.header)
        home.check()
        staged = home.ready
    return Dataset(
        root,
        manifest,
        manifest.shards,
        ShardFiles(root, staged=staged, verify=verify, threads=threads, wait_s=cache_wait_s),
    )


class Dataset:
    """Samples by number, 0..len-1, ordered by (generation, task, row). A view on a split shares the open files."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        shards: Sequence[ShardRecord],
        files: ShardFiles,
        *,
        split_name: str | None = None,
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.shards = tuple(shards)
        self.split_name = split_name
        self._files = files
        # starts[s] is the number of the first sample of shard s; starts[-1] the number of samples.
        self._starts = np.concatenate([[0], np.cumsum([shard.n for shard in self.shards], dtype=np.int64)])
        self._split_names = np.array([shard.split.encode() for shard in self.shards], dtype="S16")
        self._specs = {spec.name: spec for spec in self.fields}
        # looked up for each batch: making them anew costs as much as reading a sample
        self._stored_forms = {spec.name: (spec.shape, spec.stored_dtype) for spec in self.fields}
        self._params_dtype = self.shards[0].extent("params").numpy_dtype if self.shards else np.dtype([])
        self._says_split = "split" in (self._params_dtype.names or ())
        self._buffers = BufferPool()

    @property
    def dataset_id(self) -> str:
        return self.manifest.header.dataset_id

    @property
    def generation(self) -> int:
        return max((shard.generation for shard in self.shards), default=0)

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return self.manifest.header.fields

    @property
    def splits(self) -> tuple[str, ...]:
        return self.manifest.splits

    def split(self, name: str) -> Dataset:
        """The samples of one split, as a data set of its own; UsageError naming the splits there are."""
        if name not in self.splits:
            raise UsageError(f"{self.root}: no split {name!r}; there are {', '.join(self.splits) or 'none'}")
        shards = [shard for shard in self.shards if shard.split == name]
        return Dataset(self.root, self.manifest, shards, self._files, split_name=name)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def n_samples_until(self, generation: int) -> int:
        """How many samples, from the first on, belong to `generation` or an older one."""
        return sum(shard.n for shard in self.shards if shard.generation <= generation)

    def digest_until(self, generation: int) -> str:
        """A hash of which shards those are, in order: two data sets of equal digest have the same sample numbers."""
        ids = "\n".join(f"{shard.shard_id} {shard.n}" for shard in self.shards if shard.generation <= generation)
        return xxhash.xxh3_64_hexdigest(ids.encode())

    def layout_until(self, generation: int) -> ShardLayout:
        """Those shards for an order of samples: ids, samples in each, and its structures by number."""
        shards = [shard for shard in self.shards if shard.generation <= generation]
        numbers: dict[str, int] = {}
        structures = [
            tuple(numbers.setdefault(f"{s.sha256} {s.zone_axis}", len(numbers)) for s in shard.structures)
            for shard in shards
        ]
        return ShardLayout(
            ids=[shard.shard_id for shard in shards],
            counts=np.array([shard.n for shard in shards], dtype=np.int64),
            structures=structures,
        )

    def record_of(self, i: int) -> tuple[ShardRecord, int]:
        """The shard of sample `i` and the sample's row in it. IndexError outside -len..len-1."""
        index = operator.index(i)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        at = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.shards[at], index - int(self._starts[at])

    def __getitem__(self, i: int) -> dict[str, Array]:
        """Sample `i`: every field in its own shape, `uid` (uint64) and `params` (one record)."""
        batch = self.read([operator.index(i)], [field.name for field in self.fields])
        return {name: array[0] for name, array in batch.items()}

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return (self[i] for i in range(len(self)))

    def read(self, indices: Sequence[int], fields: Sequence[str]) -> dict[str, Array]:
        """Samples `indices` stacked: field -> (len(indices), …), `uid` (len,) uint64, `params` (len,) compound.

        The memory of large arrays is used again for a later batch, once nothing refers to them any more.
        UsageError for a field that is not there, DamagedDataError naming shard, uid and field; IndexError, TypeError.
        """
        if missing := [name for name in fields if name not in self._specs]:
            raise UsageError(f"{self.root}: no field {missing[0]!r}; there are {', '.join(self._specs)}")
        index = _numbers(indices)
        n = len(index)
        by_place = index.argsort()
        index = index[by_place]
        if n and not (-len(self) <= index[0] and index[-1] < len(self)):
            raise IndexError(f"samples {index[0]}..{index[-1]} of {len(self)}")
        if n and index[0] < 0:
            index = np.where(index < 0, index + len(self), index)
        at = self._starts.searchsorted(index, "right") - 1
        rows = index - self._starts[at]
        items = [
            (self.shards[s], row, k) for s, row, k in zip(at.tolist(), rows.tolist(), by_place.tolist(), strict=True)
        ]
        uids = np.empty(n, dtype="<u8")
        params = np.empty(n, dtype=self._params_dtype)
        # last of all: a batch that is being let go meanwhile gives its memory to this one
        stored = {}
        for name in fields:
            shape, kind = self._stored_forms[name]
            stored[name] = self._buffers.empty((n, *shape), kind)
        if n:
            # (n, …) -> (n, bytes of a sample): what is read goes straight to its place
            places = {name: array.reshape(n, -1).view(np.uint8) for name, array in stored.items()}
            places["params"] = params.view(np.uint8).reshape(n, -1)
            self._files.read_rows(items, places, uids)
            if self._says_split:
                params["split"][by_place] = self._split_names[at]  # the manifest's word on the split is the last
        values = {name: self._decoded(self._specs[name], array) for name, array in stored.items()}
        return {**values, "uid": uids, "params": params}

    def _decoded(self, spec: FieldSpec, stored: Array) -> Array:
        return decode(spec, stored, self._buffers.empty(stored.shape, spec.value_dtype) if spec.encoding else None)

    def read_tile(self, index: int, field: str, slices: Sequence[slice]) -> Array:
        """A part of one field of sample `index`, as `array[slices]` of its value (…); only the bytes of it are read.

        `slices`: one for each axis of the field, with step 1; missing ones take the whole axis. For training where
        the ranks of a group share a sample. The bytes are covered by the hash of the whole shard, which staging and
        `verify` check, not by the sample's checksum, which needs all of them (a compressed field is read and checked
        whole). UsageError for a field that is not there or slices that do not fit it.
        """
        if field not in self._specs:
            raise UsageError(f"{self.root}: no field {field!r}; there are {', '.join(self._specs)}")
        spec = self._specs[field]
        tile = plan_tile(spec.shape, spec.stored_dtype.itemsize, slices)
        record, row = self.record_of(index)
        if record.extent(field).compression:
            return self.read([index], [field])[field][0][tile.slices]
        stored = np.empty(tile.shape, spec.stored_dtype)
        self._files.read_part(record, row, field, tile.pieces, stored.reshape(-1).view(np.uint8))
        return decode(spec, stored)

    @property
    def uids(self) -> Array:
        """All uids (len,), uint64."""
        return np.concatenate([np.empty(0, "<u8"), *(self._files.read_table(shard, "uid") for shard in self.shards)])

    def checksums(self, field: str) -> Array:
        """The CRC-32C of each sample's stored bytes of one field, (len,) uint32, as the shards have them."""
        if field not in self._specs:
            raise UsageError(f"{self.root}: no field {field!r}; there are {', '.join(self._specs)}")
        column = list(self._specs).index(field)
        tables = [self._files.read_table(shard, "crc32c")[:, column] for shard in self.shards]
        return np.concatenate([np.empty(0, "<u4"), *tables])

    @property
    def params(self) -> Array:
        """All parameters (len,) as a structured array; units stand in the names."""
        tables = [self._files.read_table(shard, "params") for shard in self.shards]
        for shard, table in zip(self.shards, tables, strict=True):
            if "split" in (table.dtype.names or ()):
                table["split"] = shard.split.encode()
        return np.concatenate(tables) if tables else np.empty(0, dtype=self._params_dtype)

    def structure(self, i: int) -> Structure:
        """The structure of sample `i`: its atoms as simulated, and what is known of it."""
        from exitwave.ingest.shard import ShardReader  # the only use of libhdf5 here

        record, row = self.record_of(i)
        index = int(self._files.read_table(record, "params")[row]["structure"])
        with ShardReader(self.root / record.path) as reader:
            return reader.structure(index)

    def to_xarray(self) -> Any:
        """An `xarray.Dataset` with dimension `sample` that reads lazily; needs the extra `exitwave[notebook]`."""
        from exitwave.ingest.xarray_view import dataset_view

        return dataset_view(self)

    def cache_counts(self) -> dict[str, int]:
        """How often this process turned to a shard that was in the cache, or not, or waited for one."""
        return {"hits": self._files.hits, "misses": self._files.misses, "waits": self._files.waits}

    def close(self) -> None:
        self._files.close()

    def __repr__(self) -> str:
        split = "" if self.split_name is None else f", split {self.split_name}"
        return f"<exitwave.Dataset {self.root}: {len(self)} samples in {len(self.shards)} shards{split}>"

    def _repr_html_(self) -> str:
        rows = "".join(_html_row(field) for field in self.fields)
        counts = ", ".join(
            f"{name} {sum(s.n for s in self.shards if s.split == name)}"
            for name in self.splits
            if self.split_name in (None, name)
        )
        nbytes = sum(shard.nbytes for shard in self.shards)
        return (
            f"<p><b>{html.escape(self.manifest.header.name or self.dataset_id)}</b>: {len(self)} samples "
            f"({html.escape(counts)}) in {len(self.shards)} shards, {nbytes / 1e6:.1f} MB</p>"
            f"<table><tr><th>field</th><th>dtype</th><th>axes</th><th>unit</th><th>meaning</th></tr>{rows}</table>"
        )


def _numbers(indices: Sequence[int]) -> Array:
    """Numbers of samples (n,) int64. TypeError for what is none: a mask or fractions would pick the wrong ones."""
    index = np.asarray(indices)
    if index.size and (index.dtype.kind not in "iu" or index.ndim != 1):
        raise TypeError(
            f"numbers of samples expected, got {index.dtype} {index.shape}; of a mask, np.flatnonzero(mask)"
        )
    return index.reshape(-1).astype(np.int64)


def _html_row(field: FieldSpec) -> str:
    axes = field.axes or ("",) * len(field.shape)
    shape = " × ".join(f"{axis} {size}" for axis, size in zip(axes, field.shape, strict=False))
    cells = (field.name, field.dtype, shape, field.unit, field.meaning)
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
