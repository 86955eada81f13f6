"""Small data sets with calibrations, for views, subsets and other formats: real shards by the real writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.compress import shard_writer
from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header, StructureInfo
from exitwave.ingest.schema import PARAMS_DTYPE, STANDARD_FIELDS, FieldSpec

SCAN, DETECTOR, LABEL = (3, 4), (8, 6), (9, 12)
DQ, DR = (0.05, 0.06), (0.4, 0.5)  # 1/Å and Å along y and x
_SHAPES = {"cbed": (*SCAN, *DETECTOR), "potential": LABEL}
FIELDS = tuple(
    FieldSpec(name=name, dtype="float32", shape=_SHAPES[name], axes=axes, unit=unit, meaning=meaning)
    for name, (axes, unit, meaning) in STANDARD_FIELDS.items()
    if name in _SHAPES
)
NAMES = {"t": "train", "v": "val", "e": "test"}
FORMULAS = ("Au", "GaAs", "SrTiO3", "Cu", "NaCl")


def structure_info(task: int) -> StructureInfo:
    return StructureInfo(
        index=task,
        formula=FORMULAS[task % 5],
        space_group=(225, 216, 221)[task % 3],
        prototype_group=2**63 + task,
        source=f"made up {task}",
        licence="CC0-1.0",
        sha256=f"{task:064x}",
        zone_axis=(0, 0, 1),
    )


def params_of(task: int, row: int, dtype: np.dtype[Any] = PARAMS_DTYPE) -> np.void:
    params = np.zeros((), dtype)
    values = {
        "energy_keV": 100.0 + 50 * task,
        "semiangle_mrad": 20.0 + row,
        "defocus_A": 10.0 * row,
        "thickness_A": 30.0,
        "Q_sampling_y_per_A": DQ[0],
        "Q_sampling_x_per_A": DQ[1],
        "R_sampling_y_A": DR[0],
        "R_sampling_x_A": DR[1],
        "potential_sampling_A": 0.125,
        "scan_rotation_deg": 7.0,
        "zone_axis": (0, 0, 1),
        "structure": task,
        "prototype_group": 2**63 + task,
        "sample_index": row,
        "split": b"train",
    }
    for name, value in values.items():
        params[name] = value
    return params[()]


def arrays_of(task: int, row: int, fields: tuple[FieldSpec, ...] = FIELDS) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng([task, row, 7])
    return {f.name: (rng.random(f.shape) / 50).astype(f.dtype) for f in fields}


def uid_of(task: int, row: int) -> int:
    return (1 << 63) + (task << 32) + row


def write_task(root: Path, task: int, *, n: int = 3, fields: tuple[FieldSpec, ...] = FIELDS, **options: Any) -> Any:
    with shard_writer(
        root,
        shard_id=f"{task % 256:02x}{task:014x}",
        task=task,
        campaign_hash="c0ffee",
        simulator="random",
        n=n,
        fields=fields,
        params_dtype=PARAMS_DTYPE,
        **options,
    ) as writer:
        writer.add_structure(
            structure_info(task),
            numbers=[79, 79],
            positions_A=[[0, 0, 0], [1, 2, 3]],
            cell_A=np.eye(3) * 4.08,
            pbc=[1, 1, 0],
            wyckoff="a",
        )
        for row in range(n):
            writer.write(row, uid=uid_of(task, row), params=params_of(task, row), arrays=arrays_of(task, row, fields))
        return writer.publish()


def make_views_dataset(
    root: Path,
    splits: str = "ttve",
    *,
    n: int = 3,
    first: int = 0,
    name: str = "views",
    fields: tuple[FieldSpec, ...] = FIELDS,
    **options: Any,
) -> Path:
    """One shard of `n` samples per letter, tasks from `first` on; energy 100 + 50·task keV."""
    create_dataset(root, Header(dataset_id=name, campaign_hash="c0ffee", fields=fields, name=name))
    with ManifestWriter(root, epoch=1) as writer:
        for task, letter in enumerate(splits, start=first):
            published = write_task(root, task, n=n, fields=fields, **options)
            writer.commit(published, split=NAMES[letter], producer={"host": "here"})
    return root


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` and its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def encoded(fields: tuple[FieldSpec, ...] = FIELDS) -> tuple[FieldSpec, ...]:
    """The same fields, `cbed` stored as float16 square roots."""
    return tuple(replace(f, dtype="float16", encoding="sqrt-f2", scale=0.5) if f.name == "cbed" else f for f in fields)
