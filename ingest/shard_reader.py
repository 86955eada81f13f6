"""Reading a shard through HDF5, without the manifest: for people and checks. Training reads by extents instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from exitwave.ingest.codecs import decode
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.extents import Extent, dtype_to_json
from exitwave.ingest.files import crc32c
from exitwave.ingest.records import StructureInfo
from exitwave.ingest.schema import SHARD_FORMAT, SHARD_VERSIONS_READ, TABLES, FieldSpec

__all__ = ["ShardReader", "Structure", "read_extents"]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A structure as simulated: numbers (N,), positions_A (N, 3) and cell_A (3, 3) in Å, pbc (3,)."""

    info: StructureInfo
    numbers: np.ndarray[Any, Any]
    positions_A: np.ndarray[Any, Any]
    cell_A: np.ndarray[Any, Any]
    pbc: np.ndarray[Any, Any]
    wyckoff: str


class ShardReader:
    """Reads a shard through HDF5, without the manifest: for people and checks. Training reads by extents instead."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file = h5py.File(self.path, "r")
        except FileNotFoundError:
            raise UsageError(f"{self.path}: there is no such shard") from None
        except OSError as error:
            raise DamagedDataError(f"{self.path}: cannot be opened as HDF5 ({error})") from error
        self.attrs: dict[str, Any] = {
            key: value.item() if isinstance(value, np.generic) else value for key, value in self._file.attrs.items()
        }
        found = (self.attrs.get("format"), self.attrs.get("format_version"))
        if found[0] != SHARD_FORMAT or found[1] not in SHARD_VERSIONS_READ:
            self._file.close()
            raise UsageError(
                f"{self.path}: found format {found[0]!r} version {found[1]}, expected {SHARD_FORMAT!r} version "
                f"{' or '.join(map(str, SHARD_VERSIONS_READ))}. Read it with the exitwave that wrote it "
                f"({self.attrs.get('exitwave_version', 'unknown')})."
            )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def n(self) -> int:
        return int(self._file["uid"].shape[0])

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        names = str(self._file["crc32c"].attrs["fields"]).split(",")
        return tuple(
            FieldSpec(
                name=name,
                dtype=self._file[name].dtype.str,
                shape=tuple(self._file[name].shape[1:]),
                axes=tuple(a for a in str(self._file[name].attrs["axes"]).split(",") if a),
                unit=str(self._file[name].attrs["unit"]),
                meaning=str(self._file[name].attrs["meaning"]),
                **_encoding(self._file[name]),
            )
            for name in names
            if name
        )

    @property
    def uids(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._file["uid"][:])

    @property
    def params(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._file["params"][:])

    @property
    def crc32c(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._file["crc32c"][:])

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(_extents(self._file))

    def read(self, field: str, row: int) -> np.ndarray[Any, Any]:
        """The values of one sample of one field, in the shape of the field."""
        spec = next(spec for spec in self.fields if spec.name == field)
        if self._file[field].chunks is not None:
            with contextlib.suppress(ImportError):
                import hdf5plugin  # noqa: F401  (registers the filters of compressed shards)
        return decode(spec, np.asarray(self._file[field][row]))

    @property
    def structures(self) -> tuple[StructureInfo, ...]:
        return tuple(self.structure(int(i)).info for i in sorted(self._file["structures"], key=int))

    @property
    def params_crc32c(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._file["params_crc32c"][:])

    def structure(self, index: int) -> Structure:
        """Structure `index` of this shard, as `/params` names it."""
        group = self._file["structures"].get(str(index))
        if group is None:
            raise UsageError(
                f"{self.path}: no structure {index}; there are {sorted(self._file['structures'], key=int)}"
            )
        attrs = dict(group.attrs)
        wyckoff = str(attrs.pop("wyckoff"))
        arrays = {name: np.asarray(group[name][:]) for name in ("numbers", "positions_A", "cell_A", "pbc")}
        arrays["pbc"] = arrays["pbc"].astype(bool)
        return Structure(info=StructureInfo.from_json(attrs), wyckoff=wyckoff, **arrays)


def _encoding(data: Any) -> dict[str, Any]:
    """`encoding` and `scale` of a dataset that has them; nothing for plain numbers."""
    if "encoding" not in data.attrs:
        return {}
    return {"encoding": str(data.attrs["encoding"]), "scale": float(data.attrs["scale"])}


_FILTERS = {32008: "bitshuffle-lz4", 32026: "blosc2-zstd"}  # by the numbers that HDF5 registers


def _chunks(data: Any) -> dict[str, Any]:
    """`compression`, `chunks` and their checksums of a dataset whose samples are one compressed chunk each; nothing
    for others."""
    if data.chunks != (1, *data.shape[1:]) and data.chunks != (1,):
        return {}
    filters = data.id.get_create_plist()
    name = _FILTERS.get(filters.get_filter(0)[0]) if filters.get_nfilters() == 1 else None
    if name is None or data.id.get_num_chunks() != data.shape[0]:
        return {}
    rest = (0,) * (data.ndim - 1)
    found = [data.id.get_chunk_info_by_coord((row, *rest)) for row in range(data.shape[0])]
    if any(info.filter_mask for info in found):
        return {}
    chunks = (data.id.read_direct_chunk((row, *rest))[1] for row in range(data.shape[0]))
    return {
        "compression": name,
        "chunks": [(info.byte_offset, info.size) for info in found],
        "chunk_crc32c": [crc32c(np.frombuffer(chunk, np.uint8)) for chunk in chunks],
    }


def _extents(file: Any) -> Iterator[Extent]:
    names = [name for name in str(file["crc32c"].attrs["fields"]).split(",") if name]
    for name in (*names, *TABLES):
        data = file[name]
        places = _chunks(data)
        offset = 0 if places else data.id.get_offset()
        if (data.chunks is not None and not places) or offset is None:
            raise DamagedDataError(f"{file.filename}: /{name} is not contiguous, or was never allocated")
        stride = data.dtype.itemsize * int(np.prod(data.shape[1:], dtype=np.int64))
        yield Extent.from_json(
            {
                "field": name,
                "dtype": dtype_to_json(data.dtype),
                "shape": data.shape,
                "offset": offset,
                "stride": stride,
                **_encoding(data),
                **places,
            }
        )


def read_extents(path: Path) -> tuple[Extent, ...]:
    """Where each field's bytes lie, as HDF5 tells after opening the file anew."""
    with h5py.File(path, "r") as file:
        return tuple(_extents(file))
