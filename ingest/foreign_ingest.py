"""Other people's arrays into a data set of ours.

1. Every file is opened once and looked at, not read: shapes against the map, how many samples, which split. Whatever
   does not fit is refused here, before anything is written.
2. The samples are laid out over shards, in the order of the files: one split a shard, about `shard_bytes` each. The
   layout is a function of files and map alone.
3. Shards are written one sample at a time (the most that is in memory) into a folder beside the target, and
   committed one by one; the same command after a kill goes on with the next one. At the end the folder gets its name.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.building import build_beside, refuse_existing, refuse_inside
from exitwave.ingest.compress import shard_writer
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import byte_view
from exitwave.ingest.foreign import open_foreign
from exitwave.ingest.foreign_layout import FieldLayout, Piece, field_layout, read_piece, tile_counts
from exitwave.ingest.foreign_map import MapSpec
from exitwave.ingest.foreign_values import (
    FileStructure,
    params_of_file,
    splits_of_file,
    structure_of_file,
    tiled_params,
)
from exitwave.ingest.manifest import MANIFEST_NAME, ManifestWriter, create_dataset, load_manifest
from exitwave.ingest.records import Header, PublishedShard
from exitwave.ingest.schema import STANDARD_FIELDS, FieldSpec
from exitwave.ingest.shard import ShardWriter, exitwave_version
from exitwave.ingest.shard_check import find_published

__all__ = ["IngestReport", "ingest_files"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What one file holds. `splits` (n,), `params` (n,), `scan`: axis -> positions of the whole scan."""

    path: Path
    layouts: dict[str, FieldLayout]
    n: int
    scan: dict[str, int]
    tiles: tuple[int, int]
    splits: list[str]
    params: Array
    structure: FileStructure | None


@dataclass(frozen=True, kw_only=True)
class _ShardPlan:
    task: int
    shard_id: str
    split: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """What came in. `unmapped`: parameters of importance that the map gives no value (they are zero)."""

    out: str
    files: int
    samples: int
    shards: int
    bytes: int
    splits: dict[str, int]
    unmapped: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "unmapped": list(self.unmapped)}


_IMPORTANT = {
    "cbed": (
        "energy_keV", "semiangle_mrad",
        "Q_sampling_y_per_A", "Q_sampling_x_per_A", "R_sampling_y_A", "R_sampling_x_A",
    ),
    "potential": ("potential_sampling_A",),
}  # fmt: skip


def ingest_files(
    files: Sequence[Path],
    spec: MapSpec,
    out: Path,
    *,
    emit: Callable[..., Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Writes the samples of `files`, as `spec` describes them, to the new data set `out`.

    UsageError naming file and path inside it for whatever does not fit; DamagedDataError where a file cannot be read;
    InterruptedRunError (`stopped()`, disk full): nothing stands under `out` then, and the same call goes on.
    """
    if not files:
        raise UsageError("no files to ingest.")
    refuse_existing(out)
    for path in files:
        refuse_inside(out, {"a source": path})
    _refuse_twice(files)
    seen = [_look(path, spec, number) for number, path in enumerate(files)]
    fields = _fields(seen, spec)
    plans = _lay_out(seen, spec, fields)
    key = {"ingest": spec.model_dump(mode="json"), "files": [_identity(path) for path in files]}
    total, size = sum(len(plan.pieces) for plan in plans), sum(field.nbytes for field in fields)
    with build_beside(out, key) as folder:
        _open_dataset(folder, spec, fields, files)
        done = 0
        with ManifestWriter(folder, epoch=1) as writer:
            committed = {shard.shard_id for shard in writer.manifest.shards}
            for plan in plans:
                if plan.shard_id not in committed:
                    published = find_published(folder, plan.shard_id) or _write(
                        folder, plan, seen, spec, fields, _told(emit, done, total, size, stopped)
                    )
                    writer.commit(published, split=plan.split, producer={"verb": "ingest"})
                done += len(plan.pieces)
                _told(emit, done, total, size, stopped)(0)
    manifest = load_manifest(out)
    counts: dict[str, int] = {}
    for shard in manifest.shards:
        counts[shard.split] = counts.get(shard.split, 0) + shard.n
    important = [name for field in spec.fields for name in _IMPORTANT.get(field, ())]
    return IngestReport(
        out=str(out),
        files=len(files),
        samples=manifest.n_samples,
        shards=len(manifest.shards),
        bytes=manifest.nbytes,
        splits=counts,
        unmapped=tuple(name for name in important if name not in spec.parameters),
    )


def _refuse_twice(files: Sequence[Path]) -> None:
    """UsageError where two of the paths are one file: its samples would come in twice."""
    known: dict[tuple[int, int], Path] = {}
    for path in files:
        try:
            status = path.stat()
        except OSError:
            continue  # opening it says what is wrong
        file = (status.st_dev, status.st_ino)
        if file in known:
            raise UsageError(f"{path} and {known[file]} are the same file; give it once.")
        known[file] = path


def _told(
    emit: Callable[..., Any] | None, before: int, total: int, size: int, stopped: Callable[[], bool]
) -> Callable[[int], None]:
    def told(done: int) -> None:
        if emit is not None:
            emit("work_progress", label="ingest", unit="samples", done=before + done, total=total, bytes_a_unit=size)
        if before + done < total and stopped():
            raise InterruptedRunError(f"Interrupted after {before + done} of {total} samples.")

    return told


def _identity(path: Path) -> list[Any]:
    """What tells one version of a file from another without reading it."""
    status = path.stat()
    size = status.st_size if path.is_file() else sum(p.stat().st_size for p in sorted(path.rglob("*")) if p.is_file())
    return [path.name, str(path.resolve()), size, status.st_mtime_ns]


def _look(path: Path, spec: MapSpec, number: int) -> _Seen:
    with open_foreign(path) as file:
        scan: dict[str, int] = {}
        for field in spec.fields.values():
            shape = file.array(field.array).shape
            if len(shape) == len(field.axes):
                scan |= {a: s for a, s in zip(field.axes, shape, strict=True) if a in ("Ry", "Rx")}
        layouts = {name: field_layout(file, name, field, spec.tile, scan) for name, field in spec.fields.items()}
        counts = {name: layout.sizes["sample"] for name, layout in layouts.items() if "sample" in layout.sizes}
        if len(set(counts.values())) > 1:
            raise UsageError(f"{path}: another number of samples for each field: {counts}.")
        n = next(iter(counts.values()), 1)
        return _Seen(
            path=path,
            layouts=layouts,
            n=n,
            scan=scan,
            tiles=tile_counts(spec.tile, scan),
            splits=splits_of_file(file, spec.split, n),
            params=params_of_file(file, spec, n, number),
            structure=structure_of_file(file, spec, number),
        )


def _fields(seen: Sequence[_Seen], spec: MapSpec) -> tuple[FieldSpec, ...]:
    """The fields of the data set, those of the first file; UsageError where another file's samples differ."""
    first = seen[0]
    for other in seen[1:]:
        for name, layout in other.layouts.items():
            if layout.shape != first.layouts[name].shape:
                raise UsageError(
                    f"{other.path}: {layout.path} gives samples of {name} of shape {layout.shape}, those of "
                    f"{first.path} have {first.layouts[name].shape}. A data set holds samples of one shape; "
                    "`tile:` in the map cuts large scans into equal pieces."
                )
    made = []
    for name, field in spec.fields.items():
        layout = first.layouts[name]
        _, unit, _ = STANDARD_FIELDS.get(name, ((), "", ""))
        made.append(
            FieldSpec(
                name=name,
                dtype=field.dtype,
                shape=layout.shape,
                axes=layout.order,
                unit=unit if field.unit is None else field.unit,
                meaning=f"ingested from {field.array}" if field.meaning is None else field.meaning,
            )
        )
    return tuple(made)


def _lay_out(seen: Sequence[_Seen], spec: MapSpec, fields: Sequence[FieldSpec]) -> list[_ShardPlan]:
    size = sum(field.nbytes for field in fields)
    per_shard = max(1, spec.shard_bytes // max(size, 1))
    waiting: dict[str, list[Piece]] = {}
    plans: list[_ShardPlan] = []
    digest = hashlib.blake2b(digest_size=8)
    digest.update(spec.model_dump_json().encode())
    for one in seen:
        digest.update(f"\0{one.path.name}\0{one.n}".encode())

    def cut(split: str) -> None:
        pieces = tuple(waiting.pop(split))
        text = f"{digest.hexdigest()} {len(plans)} {split} {pieces[0]} {len(pieces)}"
        shard_id = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        plans.append(_ShardPlan(task=len(plans), shard_id=shard_id, split=split, pieces=pieces))

    for split, piece in _pieces(seen):
        waiting.setdefault(split, []).append(piece)
        if len(waiting[split]) == per_shard:
            cut(split)
    for split in list(waiting):
        cut(split)
    return plans


def _pieces(seen: Sequence[_Seen]) -> Iterator[tuple[str, Piece]]:
    for number, one in enumerate(seen):
        for index in range(one.n):
            for y in range(one.tiles[0]):
                for x in range(one.tiles[1]):
                    yield one.splits[index], Piece(file=number, index=index, tile=(y, x))


def _open_dataset(folder: Path, spec: MapSpec, fields: tuple[FieldSpec, ...], files: Sequence[Path]) -> None:
    if (folder / MANIFEST_NAME).exists():
        return
    digest = hashlib.blake2b(spec.model_dump_json().encode(), digest_size=8)
    for path in files:
        digest.update(repr(_identity(path)).encode())
    step = {
        "verb": "ingest",
        "files": [path.name for path in files[:100]],
        "n_files": len(files),
        "map": spec.model_dump(mode="json", exclude_defaults=True),
        "exitwave_version": exitwave_version(),
    }
    create_dataset(
        folder,
        Header(
            dataset_id=digest.hexdigest(),
            campaign_hash=digest.hexdigest(),
            fields=fields,
            name=spec.name,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            exitwave_version=exitwave_version(),
            provenance=(step,),
        ),
    )


def _write(
    folder: Path,
    plan: _ShardPlan,
    seen: Sequence[_Seen],
    spec: MapSpec,
    fields: tuple[FieldSpec, ...],
    told: Callable[[int], None],
) -> PublishedShard:
    with shard_writer(
        folder,
        compression=spec.compression,
        shard_id=plan.shard_id,
        task=plan.task,
        campaign_hash=load_manifest(folder).header.campaign_hash,
        simulator="ingest",
        n=len(plan.pieces),
        fields=fields,
        params_dtype=spec.params_dtype,
    ) as writer:
        opened: int | None = None
        file: Any = None
        rows: dict[int, Piece] = {}
        try:
            for row, piece in enumerate(plan.pieces):
                one = seen[piece.file]
                if opened != piece.file:
                    if file is not None:
                        file.close()
                    file, opened = open_foreign(one.path), piece.file
                    if one.structure is not None:
                        _add_structure(writer, one.structure)
                arrays = {
                    name: read_piece(file, spec.fields[name], layout, piece) for name, layout in one.layouts.items()
                }
                sizes = {axis: spec.tile.get(axis, 0) for axis in ("Ry", "Rx")}
                params = tiled_params(one.params[piece.index], piece.tile, sizes)
                params["split"] = plan.split.encode()
                uid = _uid(one, piece, arrays, params)
                if (twin := rows.setdefault(uid, piece)) is not piece:
                    raise UsageError(
                        f"{one.path} and {seen[twin.file].path}: sample {piece.index} of both is the same; give one."
                    )
                writer.write(row, uid=uid, params=params, arrays=arrays)
                told(row)
        finally:
            if file is not None:
                file.close()
        return writer.publish()


def _add_structure(writer: ShardWriter, structure: FileStructure) -> None:
    writer.add_structure(
        structure.info,
        numbers=structure.numbers,
        positions_A=structure.positions_A,
        cell_A=structure.cell_A,
        pbc=(True, True, True),
        wyckoff="",
    )


def _uid(one: _Seen, piece: Piece, arrays: dict[str, Array], params: np.void) -> int:
    """64 bits of the sample's place and content: the same on every run, whatever folder the file lies in, whatever
    files come beside it, and whatever it is used for."""
    content = np.array(params)
    for name in ("structure", "split"):
        content[name] = np.zeros((), content.dtype[name])
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{one.path.name}\0{piece.index}\0{piece.tile}".encode())
    for name in sorted(arrays):
        digest.update(byte_view(arrays[name], arrays[name].dtype).data)
    digest.update(content.tobytes())
    return int.from_bytes(digest.digest(), "little")
