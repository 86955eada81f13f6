"""Other people's files as named arrays and attributes: HDF5 (also EMD, hspy, NeXus), Zarr folders and zips, `.npy`.

A `ForeignFile` is read by pieces: nothing here loads a whole array. A path is that inside the file (`*` stands for any
one name in it), `/` for the array of a `.npy` file; an attribute is named `PATH@NAME`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import open_to_read

__all__ = ["ForeignArray", "ForeignFile", "open_foreign", "plain_value"]

Array = np.ndarray[Any, Any]
_MAGIC = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True)
class ForeignArray:
    """An array in a file: where, how large, of what numbers, and the attributes beside it."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class ForeignFile:
    """A file opened for reading; a context manager. Subclasses know one format each."""

    kind = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, str] = {}  # patterns that were resolved

    def __enter__(self) -> ForeignFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None: ...

    def _node(self, path: str) -> Any:
        """The array or group at `path`; KeyError when there is none."""
        raise NotImplementedError

    def _paths(self) -> Iterator[str]:
        """The paths of all arrays."""
        raise NotImplementedError

    def groups(self) -> list[str]:
        """The paths of all groups and arrays, the root first."""
        inside = {"/"}
        for path in self._paths():
            parts = path.strip("/").split("/")
            inside |= {"/" + "/".join(parts[:i]) for i in range(1, len(parts) + 1)}
        return sorted(inside)

    def arrays(self) -> list[ForeignArray]:
        """All arrays, in the order of the file."""
        return [self.array(path) for path in self._paths()]

    def array(self, path: str) -> ForeignArray:
        """The array at `path`; UsageError naming what there is when it is no array."""
        node = self._at(path)
        if getattr(node, "shape", ()) is None:
            raise UsageError(f"{self.path}: {path} is an array without any elements.")
        if not hasattr(node, "shape"):
            inside = ", ".join(f"{path.rstrip('/')}/{name}" for name in list(node)[:8]) or "nothing"
            raise UsageError(f"{self.path}: {path} is a group, expected an array; in it: {inside}.")
        return ForeignArray(
            path=path, shape=tuple(node.shape), dtype=np.dtype(node.dtype), attributes=self.attributes(path)
        )

    def attributes(self, path: str) -> dict[str, Any]:
        """The attributes at `path` as plain values, as far as they are any."""
        found: dict[str, Any] = {}
        node = self._at(path)
        for name in getattr(node, "attrs", {}):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[name] = plain_value(node.attrs[name])
        return found

    def read(self, path: str, selection: tuple[Any, ...] = ()) -> Array:
        """The piece `selection` of an array. DamagedDataError naming file and path when it cannot be read."""
        node = self._at(path)
        try:
            return np.asarray(node[selection])
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            raise DamagedDataError(
                f"{self.path}: {path} cannot be read at {_said(selection)} ({error}). The file is damaged, or "
                "compressed by a filter that is not installed (pip install hdf5plugin)."
            ) from error

    def value(self, place: str) -> Any:
        """What stands at `PATH@NAME` (an attribute) or `PATH` (an array, whole: meant for small ones)."""
        path, at, name = place.rpartition("@")
        if not at:
            return self.read(place)
        attributes = self.attributes(path or "/")
        if name not in attributes:
            there = ", ".join(sorted(attributes)) or "none"
            raise UsageError(f"{self.path}: {path or '/'} has no attribute {name!r}; there are: {there}.")
        return attributes[name]

    def _one_of(self, pattern: str) -> str:
        """The only path that fits a pattern such as `/Experiments/*/data`, where `*` stands for one name."""
        if pattern not in self._known:
            parts = pattern.split("/")
            fitting = [
                path
                for path in self.groups()
                if path.count("/") == len(parts) - 1
                and all(fnmatch.fnmatchcase(p, w) for p, w in zip(path.split("/"), parts, strict=True))
            ]
            if len(fitting) != 1:
                found = f"{len(fitting)} paths fit: {', '.join(fitting[:6])}" if fitting else "nothing fits"
                raise UsageError(f"{self.path}: {pattern}: expected one path to fit, {found}.")
            self._known[pattern] = fitting[0]
        return self._known[pattern]

    def _at(self, path: str) -> Any:
        path = self._one_of(path) if "*" in path else path
        try:
            return self._node(path)
        except (KeyError, RuntimeError):  # RuntimeError: links that lead in a circle
            paths = list(self._paths())
            near = [p for p in paths if p.rpartition("/")[2] == path.rpartition("/")[2]] or paths
            more = f" and {len(near) - 12} more" if len(near) > 12 else ""
            raise UsageError(
                f"{self.path}: there is no {path} in it; the arrays are: {', '.join(near[:12]) or 'none'}{more}."
            ) from None


def _said(selection: tuple[Any, ...]) -> str:
    def one(s: Any) -> str:
        if isinstance(s, slice):
            return f"{s.start if s.start is not None else ''}:{s.stop if s.stop is not None else ''}"
        return str(s)

    return "[" + ", ".join(map(one, selection)) + "]"


def plain_value(value: Any) -> Any:
    """Texts for bytes, Python numbers for NumPy's, lists for arrays of at most 64 elements."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, str):  # bytes that are no UTF-8 come as surrogates
        return value.encode(errors="surrogateescape").decode(errors="replace")
    if isinstance(value, np.ndarray) and value.dtype.kind in "SO":
        value = np.array([v.decode(errors="replace") if isinstance(v, bytes) else v for v in value.ravel()], object)
        return value[0] if value.size == 1 else value.tolist()
    if isinstance(value, np.ndarray) and value.size > 64:
        return value
    return value.tolist() if hasattr(value, "tolist") else value


class _Hdf5File(ForeignFile):
    kind = "HDF5"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with contextlib.suppress(ImportError):
            import hdf5plugin  # noqa: F401  (registers the filters of the field: bitshuffle, Blosc, Zstandard)
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise DamagedDataError(f"{path}: cannot be opened as HDF5 ({error}). Copy it again.") from error
        if "file_format" in self._file.attrs:
            self.kind = "hspy"
        elif "emd_group_type" in self._file.attrs or {"version_major", "version_minor"} <= set(self._file.attrs):
            self.kind = "EMD"

    def close(self) -> None:
        self._file.close()

    def _node(self, path: str) -> Any:
        return self._file[path]

    def _paths(self) -> Iterator[str]:
        found: list[str] = []

        def visit(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset) and node.shape is not None:
                found.append(f"/{name}")

        self._file.visititems(visit)
        return iter(found)

    def groups(self) -> list[str]:
        found = ["/"]
        self._file.visit(lambda name: found.append(f"/{name}"))
        return found


class _NpyFile(ForeignFile):
    kind = "NumPy"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DamagedDataError(f"{path}: cannot be opened as a NumPy array ({error}).") from error

    def _node(self, path: str) -> Any:
        if path != "/":
            raise KeyError(path)
        return self._array

    def _paths(self) -> Iterator[str]:
        return iter(("/",))


def open_foreign(path: Path) -> ForeignFile:
    """Opens any of the formats, told by content. UsageError when it is none of them, DamagedDataError when torn."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder.")
    if path.is_dir():
        if not any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray", ".zmetadata")):
            raise UsageError(f"{path}: a folder, and no Zarr store: there is no zarr.json, .zgroup or .zarray in it.")
        return _open_zarr(path)
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            first = file.read(8)
            magics = [first]
            for offset in (512, 1024, 2048):  # HDF5 may stand behind a user block
                file.seek(offset)
                magics.append(file.read(8))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from None
    if _MAGIC in magics:
        return _Hdf5File(path)
    if first[:6] == b"\x93NUMPY":
        return _NpyFile(path)
    if first[:4] == b"PK\x03\x04":
        return _open_zarr(path)
    raise UsageError(
        f"{path}: neither HDF5 (also EMD, hspy, NeXus), nor Zarr, nor .npy: it begins with {first!r}. "
        "Convert it first, for instance with RosettaSciIO."
    )


def _open_zarr(path: Path) -> ForeignFile:
    from exitwave.ingest.foreign_zarr import ZarrFile

    return ZarrFile(path)
