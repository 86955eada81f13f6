"""A data set of an older format to the present one.

Between two versions of the shard format stands one pure function that turns records of parameters of version k into
those of version k + 1; a migration is the chain of them. Arrays keep their bytes, samples their uids and shards their
names, so that a campaign goes on and a checkpoint still knows its samples.

1. A whole new data set is built beside the old one (`building`): interrupted, the same command goes on.
2. It is compared with the old one: the same samples, in the same order, with the same checksums.
3. The two change places in one step of the kernel (renameat2, RENAME_EXCHANGE; where that is missing, in two renames),
   and the old one is kept as `<name>.version-<k>` for its owner to remove.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.building import build_beside, refuse_existing
from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import fsync_dir
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest
from exitwave.ingest.rebuild import ShardJob, build_dataset, new_header
from exitwave.ingest.schema import PARAMS_SINCE_2, SHARD_VERSION
from exitwave.ingest.shard import ShardReader

__all__ = ["CONVERTERS", "MigrateReport", "convert_params", "dataset_version", "migrate_dataset"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class MigrateReport:
    """`kept`: where the old data set is now; "" when nothing was to be done."""

    dataset: str
    version_before: int
    version: int
    samples: int
    shards: int
    kept: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _add_columns(params: Array, columns: list[Any]) -> Array:
    """The records with more columns, all zero: the thing was not there."""
    dtype = np.dtype([*params.dtype.descr, *columns])
    made = np.zeros(params.shape, dtype)
    for name in params.dtype.names or ():
        made[name] = params[name]
    return made


def _one_to_two(params: Array) -> Array:
    """Version 2 added source size, scan jitter, displacements by element, and the extra fields' calibrations; a split
    may have a longer name."""
    widened = [("split", "|S16") if field[0] == "split" else field for field in params.dtype.descr]
    params = params.astype(np.dtype(widened))
    return _add_columns(params, [c for c in PARAMS_SINCE_2 if c[0] not in (params.dtype.names or ())])


# version k -> records (n,) of version k to records (n,) of version k + 1
CONVERTERS: dict[int, Callable[[Array], Array]] = {1: _one_to_two}


def convert_params(params: Array, version: int, to: int = SHARD_VERSION) -> Array:
    """Records of `version` as records of version `to`. UsageError where no way leads there."""
    for step in range(version, to):
        if step not in CONVERTERS:
            raise UsageError(f"shards of version {version} cannot be brought to version {to}: no way from {step}.")
        params = CONVERTERS[step](params)
    return params


def dataset_version(root: Path) -> int:
    """The version of the shards of a data set (of an empty one: the present); UsageError where they are of several."""
    versions = set()
    for record in load_manifest(root).shards:
        with ShardReader(root / record.path) as reader:
            versions.add(int(reader.attrs["format_version"]))
    if len(versions) > 1:
        raise UsageError(f"{root}: shards of versions {sorted(versions)} in one data set; take one apart first.")
    return versions.pop() if versions else SHARD_VERSION


def migrate_dataset(
    dataset: Path,
    *,
    emit: Callable[..., Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> MigrateReport:
    """Brings the data set to the present version, in its place; the old one is kept beside it.

    UsageError: something writes to it just now, or no way leads from its version; DamagedDataError naming shard, uid
    and field; InterruptedRunError: the data set is as it was, and the same call goes on.
    """
    dataset = Path(os.path.abspath(dataset))  # noqa: PTH100  (a link to the data set stays one: it is what is swapped)
    new = dataset.with_name(f"{dataset.name}.migrated")
    _finish_swap(dataset, new)
    version = dataset_version(dataset)
    data = open_dataset(dataset)
    if version == SHARD_VERSION:
        return MigrateReport(
            dataset=str(dataset), version_before=version, version=version, samples=len(data),
            shards=len(data.shards), kept="",
        )  # fmt: skip
    kept = dataset.with_name(f"{dataset.name}.version-{version}")
    refuse_existing(kept)
    header = new_header([data.manifest.header], {"verb": "migrate", "from": version, "to": SHARD_VERSION}, keep_id=True)

    def convert(params: Array) -> Array:
        return convert_params(params, version)

    jobs = [
        ShardJob(root=dataset, record=r, shard_id=r.shard_id, rows=tuple(range(r.n)), convert=convert)
        for r in sorted(data.shards, key=lambda record: record.seq)  # in order of arrival, by which streams number
    ]
    with _nobody_writes(dataset):
        if not new.exists():
            key = {"migrate": data.dataset_id, "to": SHARD_VERSION, "shards": data.digest_until(data.generation)}
            with build_beside(new, key) as folder:
                build_dataset(folder, header, jobs, label="migrate", emit=emit, stopped=stopped)
                _bring_along(dataset, folder)
        _compare(dataset, new)
        _exchange(dataset, new)
        new.rename(kept)
        fsync_dir(dataset.parent)
    return MigrateReport(
        dataset=str(dataset), version_before=version, version=SHARD_VERSION, samples=len(data),
        shards=len(data.shards), kept=str(kept),
    )  # fmt: skip


def _finish_swap(dataset: Path, new: Path) -> None:
    """Where an earlier call died between its last two steps: gives the old data set its name, or the new one its."""
    between = dataset.with_name(f"{dataset.name}.being-swapped")
    if not (new / MANIFEST_NAME).exists() and not between.exists():
        return
    if not dataset.exists():  # of the two renames of a file system without exchange, the second is missing
        new.rename(dataset)
    if between.exists() and not new.exists():
        between.rename(new)
    if not new.exists():
        pass
    elif dataset_version(dataset) == SHARD_VERSION and (before := dataset_version(new)) != SHARD_VERSION:
        new.rename(dataset.with_name(f"{dataset.name}.version-{before}"))
    fsync_dir(dataset.parent)


@contextlib.contextmanager
def _nobody_writes(dataset: Path) -> Iterator[None]:
    """UsageError while a controller writes (it holds a kernel lock on the manifest); keeps others out meanwhile."""
    fd = os.open(dataset / MANIFEST_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{dataset}: another process is writing to this data set; migrate it when it is done."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


def _bring_along(dataset: Path, folder: Path) -> None:
    """Everything beside manifest and shards: plan, campaign, events, wisdom."""
    for path in sorted(dataset.iterdir()):
        if path.name in (MANIFEST_NAME, "shards") or path.name.endswith(".part"):
            continue
        target = folder / path.name
        if path.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(os.readlink(path))  # noqa: PTH115  (as it stands, also where it leads nowhere)
        elif path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True, symlinks=True)
        elif path.is_file():
            shutil.copy2(path, target)


def _compare(old: Path, new: Path) -> None:
    """DamagedDataError unless both hold the same samples in the same order, field by field."""
    before, after = load_manifest(old), load_manifest(new)
    sides = [
        [(s.shard_id, s.n, s.split, s.generation, s.stats["tables_crc32c"]["uid"], s.stats["tables_crc32c"]["crc32c"])
         for s in manifest.shards]
        for manifest in (before, after)
    ]  # fmt: skip
    if sides[0] != sides[1]:
        raise DamagedDataError(f"{new}: does not hold what {old} holds. Remove it and run the same command again.")


_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def _exchange(a: Path, b: Path) -> None:
    """Swaps the names of two folders, in one step where the kernel can (renameat2(2))."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
            return
    between = a.with_name(f"{a.name}.being-swapped")
    a.rename(between)
    b.rename(a)
    between.rename(b)
