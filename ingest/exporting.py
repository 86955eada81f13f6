"""Views of a data set that other programs open: which samples go where, and nothing half-written on the way.

EMD and hspy hold one sample a file: a single sample may be written to a file PATH, several go into a folder PATH as
`<uid>.h5` or `<uid>.hspy`. Zarr and WebDataset hold the whole selection in a folder PATH. A folder is built beside its
name (`building`): the same command after a kill goes on with the files that were whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.building import build_beside, build_file, refuse_existing, refuse_inside
from exitwave.ingest.dataset import Dataset
from exitwave.ingest.dose import counted
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.export import ExportedSample, write_emd, write_hspy
from exitwave.ingest.schema import FieldSpec

__all__ = ["FORMATS", "ExportReport", "ExportSpec", "export_samples"]

Array = np.ndarray[Any, Any]
FORMATS = ("emd", "py4dstem", "hspy", "zarr", "webdataset")
_COUNTS = ("electrons", "counts")
_SUFFIX = {"emd": ".h5", "py4dstem": ".h5", "hspy": ".hspy"}
_FILE_SUFFIXES = {"emd": (".h5", ".hdf5", ".emd"), "py4dstem": (".h5", ".hdf5", ".emd"), "hspy": (".hspy", ".hdf5")}


@dataclass(frozen=True, kw_only=True)
class ExportSpec:
    """`fields`: () for the format's own choice. `dose_e_per_pattern`: Poisson noise on `cbed`, keyed by (seed, uid)."""

    format: str
    fields: tuple[str, ...] = ()
    dose_e_per_pattern: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written."""

    format: str
    out: str
    samples: int
    fields: tuple[str, ...]
    files: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fields": list(self.fields)}


Emit = Callable[..., Any]


class Samples:
    """The selected samples, ready to be written: read, noise added, one at a time (the most that is in memory)."""

    def __init__(self, data: Dataset, numbers: Sequence[int], spec: ExportSpec) -> None:
        self.data = data
        self.numbers = list(numbers)
        self.spec = spec
        known = {field.name: field for field in data.fields}
        wanted = spec.fields or tuple(f for f in known if spec.format in ("zarr", "webdataset") or f == "cbed")
        wanted = tuple(dict.fromkeys(wanted))
        if missing := [name for name in wanted if name not in known]:
            raise UsageError(f"{data.root}: no field {missing[0]!r}; there are {', '.join(known)}.")
        if not wanted:
            raise UsageError(f"{data.root}: no field cbed; name others with --fields: {', '.join(known)}.")
        if spec.dose_e_per_pattern is not None and "cbed" not in wanted:
            raise UsageError(f"--dose: adds counting noise to cbed, which is not among the fields {', '.join(wanted)}.")
        if spec.dose_e_per_pattern is not None and (unit := known["cbed"].unit) in _COUNTS:
            raise UsageError(
                f"--dose: cbed of {data.root} is in {unit}: it is counted already, and gets no noise again."
            )
        if spec.format == "py4dstem" and not any(len(known[name].shape) == 4 for name in wanted):
            raise UsageError(
                f"--format py4dstem: wants a field of four axes, and {', '.join(wanted)} is none; use emd."
            )
        self.names = wanted
        self.fields = tuple(known[name] for name in wanted)

    def __len__(self) -> int:
        return len(self.numbers)

    def unit(self, field: FieldSpec) -> str:
        counts = field.name == "cbed" and self.spec.dose_e_per_pattern is not None
        return "electrons" if counts else field.unit

    def read(self, k: int) -> tuple[int, np.void, dict[str, Array]]:
        """uid, parameters and arrays of the k-th selected sample."""
        batch = self.data.read([self.numbers[k]], self.names)
        uid = int(batch["uid"][0])
        arrays = {name: batch[name][0] for name in self.names}
        if self.spec.dose_e_per_pattern is not None:
            arrays["cbed"] = counted(arrays["cbed"], self.spec.dose_e_per_pattern, uid=uid, seed=self.spec.seed)
        return uid, batch["params"][0], arrays

    def sample(self, k: int) -> ExportedSample:
        """The k-th sample with its structure and where it comes from."""
        uid, params, arrays = self.read(k)
        record, _ = self.data.record_of(self.numbers[k])
        structure = self.data.structure(self.numbers[k]) if record.structures else None
        return ExportedSample(
            uid=uid,
            params=params,
            arrays=arrays,
            fields=self.fields,
            units={field.name: self.unit(field) for field in self.fields},
            structure=structure,
            provenance={**self.provenance, "uid": f"{uid:016x}", "shard": record.shard_id, "split": record.split},
        )

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the samples come from, and the noise that was added."""
        header = self.data.manifest.header
        # no name here begins with "data": readers of EMD take such for arrays
        found: dict[str, Any] = {"source_id": header.dataset_id, "source_name": header.name}
        if self.spec.dose_e_per_pattern is not None:
            found |= {"dose_e_per_pattern": self.spec.dose_e_per_pattern, "noise_seed": self.spec.seed}
        return found


def export_samples(
    data: Dataset,
    numbers: Sequence[int],
    spec: ExportSpec,
    out: Path,
    *,
    emit: Emit | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> ExportReport:
    """Writes the samples `numbers` of `data` to `out`, which must not exist. `emit("work_progress", …)` after each.

    UsageError (unknown field or format, `out` exists or lies in the data set), DamagedDataError naming shard, uid and
    field, InterruptedRunError (`stopped()`, disk full): then nothing stands under `out`, and the same call goes on.
    """
    if spec.format not in FORMATS:
        raise UsageError(f"--format {spec.format!r}: expected one of {', '.join(FORMATS)}.")
    samples = Samples(data, numbers, spec)
    refuse_inside(out, {"the data set": data.root})
    refuse_existing(out)
    told = _telling(emit, samples, stopped)
    if spec.format in _SUFFIX and out.suffix in _FILE_SUFFIXES[spec.format]:
        if len(samples) > 1:
            raise UsageError(
                f"{out}: one file holds one sample of this format, and {len(samples)} are chosen. Choose one with "
                "--uid, or give a folder."
            )
        with build_file(out) as part:
            _write_one(part, samples.sample(0), spec)
            told(1)
    else:
        key = {
            "export": asdict(spec),
            "fields": samples.names,
            "dataset": [data.dataset_id, data.digest_until(data.generation)],
            "samples": _digest(samples.numbers),
        }
        with build_beside(out, key) as folder:
            _write_folder(folder, samples, told)
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    return ExportReport(
        format=spec.format,
        out=str(out),
        samples=len(samples),
        fields=samples.names,
        files=len(files),
        bytes=sum(path.stat().st_size for path in files),
    )


def _digest(numbers: Sequence[int]) -> str:
    from exitwave.ingest.files import crc32c

    return f"{len(numbers)}-{crc32c(np.asarray(numbers, dtype='<i8')):08x}"


def _telling(emit: Emit | None, samples: Samples, stopped: Callable[[], bool]) -> Callable[[int], None]:
    total, size = len(samples), sum(field.nbytes for field in samples.fields)

    def told(done: int) -> None:
        if emit is not None:
            emit("work_progress", label="export", unit="samples", done=done, total=total, bytes_a_unit=size)
        if done < total and stopped():
            raise InterruptedRunError(f"Interrupted after {done} of {total} samples.")

    told(0)
    return told


def _write_folder(folder: Path, samples: Samples, told: Callable[[int], None]) -> None:
    if samples.spec.format == "zarr":
        from exitwave.ingest.export_zarr import write_zarr

        write_zarr(folder, samples, told)
    elif samples.spec.format == "webdataset":
        from exitwave.ingest.export_webdataset import write_webdataset

        write_webdataset(folder, samples, told)
    else:
        uids = samples.data.uids
        for k, number in enumerate(samples.numbers):
            path = folder / f"{int(uids[number]):016x}{_SUFFIX[samples.spec.format]}"
            if not path.exists():
                with build_file(path) as part:
                    _write_one(part, samples.sample(k), samples.spec)
            told(k + 1)


def _write_one(path: Path, sample: ExportedSample, spec: ExportSpec) -> None:
    if spec.format == "hspy":
        write_hspy(path, sample)
    else:
        write_emd(path, sample, datacube=spec.format == "py4dstem")


def describe_fields(samples: Samples) -> Iterator[dict[str, Any]]:
    """Name, axes, unit and meaning of each exported field, for formats without a place for them."""
    for field in samples.fields:
        told = replace(field, unit=samples.unit(field))
        yield {"name": told.name, "shape": list(told.shape), "axes": list(told.axes), "unit": told.unit,
               "meaning": told.meaning}  # fmt: skip


def as_json(value: Any) -> bytes:
    """Plain values as JSON text in UTF-8; what is not finite becomes null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
