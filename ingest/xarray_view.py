"""A data set as xarray sees it: one lazy variable per field, the parameters as coordinates along `sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from exitwave.ingest.errors import UsageError

if TYPE_CHECKING:
    from exitwave.ingest.dataset import Dataset

__all__ = ["dataset_view"]


def dataset_view(data: Dataset) -> Any:
    """An `xarray.Dataset`: fields (sample, …) read when their values are asked for, `uid` and parameters eager."""
    try:
        import xarray
        from xarray.backends import BackendArray
        from xarray.core import indexing
    except ImportError as error:
        raise UsageError("to_xarray needs xarray: pip install 'exitwave[notebook]'") from error

    class Lazy(BackendArray):
        def __init__(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
            self.name, self.dtype, self.shape = name, dtype, (len(data), *shape)

        def __getitem__(self, key: Any) -> Any:
            return indexing.explicit_indexing_adapter(
                key, self.shape, indexing.IndexingSupport.OUTER_1VECTOR, self._read
            )

        def _read(self, key: tuple[Any, ...]) -> Any:
            samples = np.arange(self.shape[0])[key[0]]
            values = data.read(np.atleast_1d(samples).tolist(), [self.name])[self.name]
            inner = values[(slice(None), *key[1:])]
            return inner[0] if np.ndim(samples) == 0 else inner

    variables = {}
    for field in data.fields:
        axes = field.axes or tuple(f"{field.name}_{i}" for i in range(len(field.shape)))
        lazy = indexing.LazilyIndexedArray(Lazy(field.name, field.value_dtype, field.shape))
        attrs = {"units": field.unit, "long_name": field.meaning}
        variables[field.name] = xarray.Variable(("sample", *axes), lazy, attrs)
    params = data.params
    coordinates: dict[str, Any] = {"uid": ("sample", data.uids)}
    for name in params.dtype.names or ():
        column = params[name]
        if column.dtype.kind == "S":
            column = np.char.decode(column, "utf-8", "replace")
        coordinates[name] = (("sample", *(f"{name}_{i}" for i in range(column.ndim - 1))), column)
    return xarray.Dataset(variables, coords=coordinates, attrs={"dataset_id": data.dataset_id})
