"""A new data set out of shards of others: whole shards are linked or copied, of others the wanted rows written anew.

A source is read in full and every byte checked before it counts, so that damage never travels on. Sources stay as they
are; where target and source share a file system, a whole shard is one file under two names (shards are never written
to after their birth).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.compress import shard_writer
from exitwave.ingest.errors import DamagedDataError, InterruptedRunError
from exitwave.ingest.files import disk_full_means_interrupted, fsync_dir, hash_file, part_path, shard_path
from exitwave.ingest.manifest import MANIFEST_NAME, ManifestWriter, create_dataset
from exitwave.ingest.reading import ShardFiles
from exitwave.ingest.records import Header, PublishedShard, ShardRecord
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.shard import ShardReader, exitwave_version
from exitwave.ingest.shard_check import find_published
from exitwave.ingest.verify import check_shard

__all__ = ["ShardJob", "build_dataset", "new_header", "rows_id"]

Array = np.ndarray[Any, Any]
Emit = Callable[..., Any]
Convert = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """One shard to be: from shard `record` of the data set at `root`; `rows` None takes it whole, as it is.

    `split` is the one it is committed with; `convert` turns the records of parameters (n,) into those to be written.
    """

    root: Path
    record: ShardRecord
    shard_id: str
    rows: tuple[int, ...] | None = None
    convert: Convert | None = None

    @property
    def n(self) -> int:
        return self.record.n if self.rows is None else len(self.rows)


def rows_id(shard_id: str, rows: Sequence[int]) -> str:
    """The name of a shard that holds only `rows` of another: the same on every run."""
    text = f"{shard_id} {','.join(map(str, rows))}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def new_header(sources: Sequence[Header], step: Mapping[str, Any], *, keep_id: bool = False) -> Header:
    """The header of a data set made from others: fields of the first, one more step of provenance.

    It belongs to no campaign, lest one be resumed into it and bring back what was left out; `keep_id`: it is the same
    data set in another form, and its campaign may go on.
    """
    first = sources[0]
    text = repr([source.dataset_id for source in sources]) + repr(sorted(step.items()))
    before = tuple(s for source in sources for s in source.provenance)
    told = {
        **step,
        "sources": [{"id": s.dataset_id, "name": s.name, "campaign_hash": s.campaign_hash} for s in sources],
    }
    made = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Header(
        dataset_id=first.dataset_id if keep_id else made,
        campaign_hash=first.campaign_hash if keep_id else made,
        fields=first.fields,
        name=first.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        exitwave_version=exitwave_version(),
        provenance=(*before, {**told, "exitwave_version": exitwave_version()}),
    )


def build_dataset(
    folder: Path,
    header: Header,
    jobs: Sequence[ShardJob],
    *,
    label: str,
    emit: Emit | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Makes the data set of `jobs` in `folder`; what an earlier call committed there is kept.

    DamagedDataError naming shard, uid and field of a damaged source; InterruptedRunError when `stopped()`.
    """
    if not (folder / MANIFEST_NAME).exists():
        create_dataset(folder, header)
    total, done = sum(job.n for job in jobs), 0
    size = sum(field.nbytes for field in header.fields)
    readers: dict[Path, ShardFiles] = {}
    with ManifestWriter(folder, epoch=1) as writer, contextlib.ExitStack() as stack:
        committed = {shard.shard_id for shard in writer.manifest.shards}
        for job in jobs:
            if emit is not None:
                emit("work_progress", label=label, unit="samples", done=done, total=total, bytes_a_unit=size)
            if stopped():
                raise InterruptedRunError(f"Interrupted after {done} of {total} samples.")
            if job.shard_id not in committed:
                if job.root not in readers:
                    readers[job.root] = ShardFiles(job.root, staged=None, verify=True)
                    stack.callback(readers[job.root].close)
                published = (
                    _take_whole(job, folder) if job.rows is None else _rewrite(job, folder, header, readers[job.root])
                )
                producer = {**job.record.producer, "verb": label}
                writer.commit(published, split=job.record.split, producer=producer, generation=job.record.generation)
            done += job.n
    if emit is not None:
        emit("work_progress", label=label, unit="samples", done=total, total=total, bytes_a_unit=size)


def _take_whole(job: ShardJob, folder: Path) -> PublishedShard:
    """Links (or copies) the shard's file, after every byte of it was checked."""
    record = job.record
    if bad := check_shard(job.root, record):
        first = bad[0]
        sample = "" if first.uid is None else f", uid {first.uid:#018x}"
        field = "" if first.field is None else f", {first.field}"
        more = f" ({len(bad)} faults in all)" if len(bad) > 1 else ""
        raise DamagedDataError(
            f"{job.root}: shard {first.shard}{sample}{field}: {first.why}{more}. `exitwave verify` lists all that is "
            "damaged; take such shards out or simulate them again."
        )
    # the file itself, where the source holds links to it: a link to a link would end with the source
    source, target = (job.root / record.path).resolve(), folder / shard_path(record.shard_id)
    with disk_full_means_interrupted(target, record.nbytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
                    raise
                _copy(source, target)
        elif hash_file(target) != record.xxh3_128:
            target.unlink()
            _copy(source, target)
        fsync_dir(target.parent)
    values = {name: getattr(record, name) for name in PublishedShard.__dataclass_fields__}
    return PublishedShard(**{**values, "path": shard_path(record.shard_id)})


def _copy(source: Path, target: Path) -> None:
    part = part_path(target.parent, target.name)
    try:
        shutil.copyfile(source, part)
        fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        part.rename(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _rewrite(job: ShardJob, folder: Path, header: Header, files: ShardFiles) -> PublishedShard:
    """Writes the wanted rows into a shard of their own: stored bytes as they were, parameters converted."""
    known = find_published(folder, job.shard_id)
    if known is not None:
        return known
    rows = job.rows or ()
    old = files.read_table(job.record, "params")[list(rows)]
    params = job.convert(old) if job.convert is not None else old
    fields = header.fields
    with ShardReader(job.root / job.record.path) as reader:
        simulator = str(reader.attrs.get("simulator", ""))
        campaign = str(reader.attrs.get("campaign_hash", ""))
        wanted = {int(s) for s in params["structure"]} if "structure" in (params.dtype.names or ()) else set()
        with shard_writer(
            folder,
            compression=next((e.compression for e in job.record.extents if e.compression), ""),
            shard_id=job.shard_id,
            task=job.record.task,
            campaign_hash=campaign,
            simulator=simulator,
            n=len(rows),
            fields=fields,
            params_dtype=params.dtype,
        ) as writer:
            for info in job.record.structures:
                if info.index in wanted:
                    atoms = reader.structure(info.index)
                    writer.add_structure(
                        info,
                        numbers=atoms.numbers,
                        positions_A=atoms.positions_A,
                        cell_A=atoms.cell_A,
                        pbc=atoms.pbc,
                        wyckoff=atoms.wyckoff,
                    )
            for new, row in enumerate(rows):
                arrays, buffers = _buffers(fields)
                # the bytes of params are read for their checksum; the converted record is written
                buffers["params"] = np.empty((1, job.record.extent("params").stride), np.uint8)
                uid = np.empty(1, "<u8")
                files.read_rows([(job.record, row, 0)], buffers, uid)
                writer.write(new, uid=int(uid[0]), params=params[new], arrays=arrays)
            return writer.publish()


def _buffers(fields: Sequence[FieldSpec]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Arrays for the stored numbers of one sample, and views of their bytes to be read into."""
    arrays = {field.name: np.empty(field.shape, field.stored_dtype) for field in fields}
    # (…) -> (1, bytes of a sample)
    return arrays, {name: array.reshape(1, -1).view(np.uint8) for name, array in arrays.items()}
