"""The selection as one Zarr group that xarray opens: fields (sample, …), parameters and calibrations (sample).

Format 2, which every reader of Zarr knows; dimension names stand in `_ARRAY_DIMENSIONS`, as xarray wants them. A chunk
is one sample. Noise-free intensities hardly compress and stay as they are; counts are compressed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import read_plain_text, write_atomic

if TYPE_CHECKING:
    from exitwave.ingest.exporting import Samples

__all__ = ["write_zarr"]


def write_zarr(folder: Path, samples: Samples, told: Callable[[int], None]) -> None:
    """Writes the group into `folder`; what an earlier, killed call finished is kept."""
    try:
        import numcodecs
        import zarr
    except ImportError as error:
        raise UsageError("--format zarr needs the zarr package: pip install 'exitwave[formats]'") from error

    progress = folder.parent / "done"
    done = int(read_plain_text(progress)) if progress.exists() and (folder / ".zgroup").exists() else 0
    uids = samples.data.uids[samples.numbers]
    _, _, first = samples.read(0)
    counts = {name: array.dtype for name, array in first.items()}
    if samples.spec.dose_e_per_pattern is not None:
        counts["cbed"] = np.dtype("<u4")  # of one dtype for all samples
    group = zarr.open_group(str(folder), mode="a", zarr_format=2)
    arrays: dict[str, Any] = {}
    for field in samples.fields:
        dims = ["sample", *(field.axes or (f"{field.name}_{i}" for i in range(len(field.shape))))]
        packed = numcodecs.Blosc(cname="zstd", clevel=3, shuffle=numcodecs.Blosc.BITSHUFFLE)
        if field.name not in group:
            made = group.create_array(
                field.name,
                shape=(len(samples), *field.shape),
                chunks=(1, *field.shape),
                dtype=counts[field.name],
                compressors=packed if counts[field.name].kind in "ui" else None,
                fill_value=None,
            )
            made.attrs.update(_ARRAY_DIMENSIONS=dims, units=samples.unit(field), long_name=field.meaning)
        arrays[field.name] = group[field.name]
    for k in range(done, len(samples)):
        uid, _, values = samples.read(k)
        if uid != int(uids[k]):
            raise DamagedDataError(f"{samples.data.root}: sample {k} is {uid:016x}, expected {int(uids[k]):016x}")
        for name, array in arrays.items():
            array[k] = values[name]
        if k % 16 == 15:
            write_atomic(progress, str(k + 1).encode())
        told(k + 1)
    _write_tables(group, samples, uids)
    group.attrs.update(samples.provenance, conventions="exitwave; arrays are (y, x)")
    zarr.consolidate_metadata(str(folder), zarr_format=2)


def _write_tables(group: Any, samples: Samples, uids: np.ndarray[Any, Any]) -> None:
    """uid and every parameter as arrays along `sample`, coordinates to xarray."""
    params = samples.data.params[samples.numbers]
    tables: dict[str, np.ndarray[Any, Any]] = {"uid": uids}
    tables |= {name: np.ascontiguousarray(params[name]) for name in params.dtype.names or ()}
    for name, table in tables.items():
        if name in group:
            del group[name]
        made = group.create_array(
            name, shape=table.shape, chunks=table.shape, dtype=table.dtype, compressors=None, fill_value=None
        )
        made[...] = table
        unit = next((u for tail, u in _UNITS.items() if name.endswith(tail)), "")
        made.attrs.update(_ARRAY_DIMENSIONS=["sample", *(f"{name}_{i}" for i in range(table.ndim - 1))], units=unit)
    group.attrs["coordinates"] = " ".join(tables)


_UNITS = {"_per_A": "1/Å", "_keV": "keV", "_mrad": "mrad", "_deg": "degree", "_A": "Å"}
