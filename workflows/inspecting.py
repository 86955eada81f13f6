"""`exitwave inspect` and `show`: what a shard, a data set, somebody's file or one sample holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.ingest.records import Manifest
from exitwave.ingest.schema import FieldSpec
from exitwave.workflows.datasets import find_dataset
from exitwave.workflows.progress import human_bytes

__all__ = ["draft_text", "inspect_path", "show_sample", "structure_rows"]


def inspect_path(path: Path) -> dict[str, Any]:
    """Facts, fields, structures and the first uids of a data set or shard; the arrays of anybody else's file.

    UsageError when it is none of them.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder.")
    if path.is_dir() and not _is_zarr(path):
        return _dataset(path)
    if path.is_file() and _is_shard(path):
        return _shard(path)
    return _foreign(path)


def _is_zarr(path: Path) -> bool:
    return any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray"))


def _is_shard(path: Path) -> bool:
    """Whether it is, or once was, a shard of ours: a damaged one keeps its own message."""
    from exitwave.ingest.errors import ExitwaveError
    from exitwave.ingest.foreign import open_foreign
    from exitwave.ingest.schema import SHARD_FORMAT

    try:
        with open_foreign(path) as file:
            return file.attributes("/").get("format") == SHARD_FORMAT
    except ExitwaveError:
        return False


def _foreign(path: Path) -> dict[str, Any]:
    from exitwave.ingest.foreign_draft import describe_foreign

    report = describe_foreign(path)
    size = sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())
    return {
        "facts": {"file": str(path), "format": report.kind, "arrays": len(report.arrays), "size": human_bytes(size)},
        "arrays": [
            {"path": a.path, "shape": list(a.shape), "dtype": str(a.dtype), "attributes": dict(a.attributes)}
            for a in report.arrays
        ],
        "draft_map": dict(report.draft),
        "notes": list(report.notes),
    }


def draft_text(path: Path) -> str:
    """A first mapping file for `exitwave ingest`, as YAML. UsageError where none can be guessed."""
    from exitwave.ingest.foreign_draft import describe_foreign
    from exitwave.workflows.resolved import dump_yaml

    report = describe_foreign(path)
    if not report.draft:
        raise UsageError(f"{path}: {' '.join(report.notes)}")
    comment = [f"Drafted from {path.name} ({report.kind}): a guess, to be checked.", *report.notes]
    return dump_yaml(report.draft, comment=comment)


def _fields(fields: tuple[FieldSpec, ...]) -> list[dict[str, Any]]:
    return [
        {
            "name": f.name,
            "shape": list(f.shape),
            "dtype": f.dtype,
            "unit": f.unit,
            "axes": list(f.axes),
            "meaning": f.meaning,
        }
        for f in fields
    ]


def _dataset(path: Path) -> dict[str, Any]:
    from exitwave.ingest.dataset import open_dataset

    path = find_dataset(path)
    data = open_dataset(path)
    manifest = data.manifest
    counts = Counter[str]()
    for shard in manifest.shards:
        counts[shard.split] += shard.n
    return {
        "facts": {
            "data set": str(path),
            "name": manifest.header.name,
            "id": manifest.header.dataset_id,
            "samples": f"{len(data)} (" + ", ".join(f"{k} {v}" for k, v in sorted(counts.items())) + ")",
            "shards": len(manifest.shards),
            "size": human_bytes(manifest.nbytes),
            "made by": f"exitwave {manifest.header.exitwave_version}, {manifest.header.created}",
        },
        "fields": _fields(data.fields),
        "structures": structure_rows(manifest),
        "parameters": _ranges(data.params),
        "uids": [f"{int(u):016x}" for u in data.uids[:4]],
    }


def _shard(path: Path) -> dict[str, Any]:
    from exitwave.ingest.shard import ShardReader

    with ShardReader(path) as reader:
        infos = reader.structures
        rows = [
            {"formula": s.formula, "space_group": s.space_group, "zone_axis": _axis(s.zone_axis), "split": "",
             "samples": reader.n, "source": s.source}
            for s in infos
        ]  # fmt: skip
        return {
            "facts": {"shard": str(path), "samples": reader.n, "size": human_bytes(path.stat().st_size)},
            "fields": _fields(reader.fields),
            "structures": rows,
            "parameters": _ranges(reader.params),
            "uids": [f"{int(u):016x}" for u in reader.uids[:4]],
        }


def _axis(axis: tuple[int, int, int]) -> str:
    return "[" + " ".join(map(str, axis)) + "]"


def structure_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """One row for each structure and split: formula, split, space group, zone axis, samples, source, licence."""
    # In a merged data set, two campaigns have a structure of the same number: what it is belongs to it.
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    order = {"train": 0, "val": 1, "test": 2}
    for shard in manifest.shards:
        for s in shard.structures:
            row = rows.setdefault(
                (s.index, shard.split, s.formula, s.sha256, s.zone_axis, s.source),
                {
                    "formula": s.formula,
                    "split": shard.split,
                    "space_group": s.space_group,
                    "zone_axis": _axis(s.zone_axis),
                    "samples": 0,
                    "source": s.source,
                    "licence": s.licence,
                },
            )
            row["samples"] += shard.n if len(shard.structures) == 1 else 0
    return [rows[key] for key in sorted(rows, key=lambda k: (order.get(k[1], 3), k[0]))]


def _ranges(params: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Smallest and largest value of each scalar parameter that is a number."""
    found: dict[str, Any] = {}
    for name in params.dtype.names or ():
        column = params[name]
        if column.ndim == 1 and column.dtype.kind in "fiu" and column.size:
            found[name] = [column.min().item(), column.max().item()]
    return found


def show_sample(dataset: Path, uid: str, out: Path | None) -> dict[str, Any]:
    """One sample's parameters and a picture of it. UsageError when there is no such sample."""
    from exitwave.ingest.dataset import open_dataset
    from exitwave.ingest.selection import parse_uid
    from exitwave.workflows.pictures import save_sample

    data = open_dataset(find_dataset(dataset))
    index = parse_uid(uid, data, data.uids)
    sample = data[index]
    record, _ = data.record_of(index)
    params = sample["params"]
    number = int(params["structure"]) if "structure" in (params.dtype.names or ()) else -1
    formula = next((s.formula for s in record.structures if s.index == number), "?")
    text = f"{int(sample['uid']):016x}"
    picture = out or Path(f"sample-{text}.png")
    names = params.dtype.names or ()
    values = {name: _value(params[name]) for name in names}
    save_sample(sample, _heading(formula, values), {"uid": text, "shard": record.shard_id, **values}, picture)
    return {
        "uid": text,
        "index": index,
        "formula": formula,
        "shard": record.shard_id,
        "params": values,
        "picture": str(picture),
    }


def _heading(formula: str, values: dict[str, Any]) -> str:
    parts = [formula]
    for name, unit in (("energy_keV", "keV"), ("semiangle_mrad", "mrad"), ("thickness_A", "Å thick")):
        if values.get(name):
            parts.append(f"{round(values[name], 1):g} {unit}")
    return ", ".join(parts)


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.tolist() if hasattr(value, "tolist") else value
