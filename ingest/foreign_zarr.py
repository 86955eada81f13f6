"""Zarr stores of others (folders and zips, format 2 and 3) behind the face of `ForeignFile`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.foreign import ForeignFile

__all__ = ["ZarrFile"]


class ZarrFile(ForeignFile):
    """A store whose root is a group or an array."""

    kind = "Zarr"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            import zarr
        except ImportError as error:
            raise UsageError(f"{path}: needs the zarr package: pip install 'exitwave[formats]'") from error
        try:
            store: Any = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
            self._root: Any = zarr.open(store, mode="r")
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zarr.errors.BaseZarrError) as error:
            raise DamagedDataError(f"{path}: cannot be opened as Zarr ({error}).") from error

    def _node(self, path: str) -> Any:
        name = path.strip("/")
        return self._root[name] if name else self._root

    def groups(self) -> list[str]:
        if hasattr(self._root, "shape"):
            return ["/"]
        return ["/", *sorted(f"/{name}" for name, _ in self._root.members(max_depth=None))]

    def _paths(self) -> Iterator[str]:
        if hasattr(self._root, "shape"):
            return iter(("/",))
        return iter(sorted(f"/{name}" for name, node in self._root.members(max_depth=None) if hasattr(node, "shape")))
