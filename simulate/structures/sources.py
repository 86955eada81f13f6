"""Where crystals come from: shipped CIFs, files and folders of CIFs, ASE databases, ASE builders, prototypes.

Reading decides nothing about whether a crystal is fit to be simulated: that is `preflight`'s part. What says one
crystal becomes a `Crystal`, what does not becomes a `Rejected` row with the reason; a source that does not exist at all
is the person's slip and raises UsageError.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain
from exitwave.simulate.spec import StrongestAxes, StructureSource
from exitwave.simulate.structures.cif import CifError, read_average
from exitwave.simulate.structures.occupancy import sample_supercell
from exitwave.simulate.structures.prototypes import build_prototype

_MAX_CIF_BYTES = 50_000_000

__all__ = ["Crystal", "Rejected", "library_names", "read_sources"]


@dataclass(frozen=True, kw_only=True)
class Crystal:
    """A crystal as its source gives it. `key` is the sha256 (hex) of the source's content, independent of its place.

    A crystal drawn from an average with partial occupancies has that as its `parent`, which decides on its symmetry and
    whose cell the zone axes refer to; its key is that of the draw.
    """

    atoms: Any
    source: str
    licence: str
    key: str
    zone_axes: tuple[tuple[int, int, int], ...] | StrongestAxes
    split: str | None
    parent: Any = None


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A structure that will not be simulated, and why."""

    source: str
    why: str


def library_names() -> tuple[str, ...]:
    """Names of the CIFs that exitwave ships."""
    folder = resources.files("exitwave.simulate.structures") / "library"
    return tuple(sorted(item.name[:-4] for item in folder.iterdir() if item.name.endswith(".cif")))


def read_sources(
    sources: tuple[StructureSource, ...], *, base_dir: Path, seed: int = 0
) -> Iterator[Crystal | Rejected]:
    """Every crystal of a campaign, in the order of the YAML; relative paths start at `base_dir`. `seed` decides on what
    is drawn from averages.

    Raises UsageError, beginning with the position `structures[i].key`, for a source that does not exist.
    """
    for number, source in enumerate(sources):
        where = f"structures[{number}]"
        try:
            yield from _read_source(source, base_dir, seed, where)
        except UsageError as error:
            text = str(error)
            raise UsageError(text if text.startswith(where) else f"{where}: {text}") from None
        except OSError as error:
            raise UsageError(f"{where}: {error.filename}: cannot be read: {error.strerror}") from None


def _read_source(source: StructureSource, base_dir: Path, seed: int, where: str) -> Iterator[Crystal | Rejected]:
    if source.library is not None:
        yield from _read_library(source, seed, where)
    elif source.cif is not None:
        yield from _read_cif_patterns(source, base_dir, seed, where)
    elif source.prototype is not None:
        assert source.a_A is not None
        atoms = build_prototype(source.prototype, source.elements, source.a_A, source.c_A)
        sizes = f"a={source.a_A:g}" + (f", c={source.c_A:g}" if source.c_A is not None else "")
        label = f"prototype:{source.prototype}({','.join(source.elements)}; {sizes} Å)"
        yield _computed(source, atoms, label)
    elif source.ase_db is not None:
        yield from _read_database(source, base_dir, where)
    elif source.index is not None:
        yield from _read_index(source, base_dir, where)
    elif source.builder is not None:
        yield _computed(source, _call_builder(source, where), f"builder:{_canonical(source.builder.model_dump())}")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _crystal(source: StructureSource, atoms: Any, label: str, licence: str, key: str) -> Crystal:
    return Crystal(
        atoms=atoms,
        source=label,
        licence=licence,
        key=key,
        zone_axes=source.zone_axes,
        split=source.split,
    )


def _computed(source: StructureSource, atoms: Any, label: str) -> Crystal:
    """A crystal that is computed, not read: its key is the request that makes it."""
    return _crystal(source, atoms, label, "computed", hashlib.sha256(label.encode()).hexdigest())


def _read_library(source: StructureSource, seed: int, where: str) -> Iterator[Crystal | Rejected]:
    folder = resources.files("exitwave.simulate.structures") / "library"
    for name in source.library or ():
        file = folder / f"{name}.cif"
        if not file.is_file():
            raise UsageError(f"{where}.library: {name!r} is not shipped; there are {', '.join(library_names())}")
        licence = "COD, public domain; cite the publication in SOURCES.md"
        yield _parse_cif(source, file.read_bytes(), f"library:{name}.cif", licence, seed)


def _path(base_dir: Path, written: str, where: str) -> Path:
    """A path as a campaign gives it. Raises UsageError for a `~user` without a home."""
    try:
        return base_dir / Path(written).expanduser()
    except RuntimeError:
        raise UsageError(f"{where}: {written}: no user of that name has a home folder; give the whole path") from None


def _read_cif_patterns(source: StructureSource, base_dir: Path, seed: int, where: str) -> Iterator[Crystal | Rejected]:
    patterns = (source.cif,) if isinstance(source.cif, str) else source.cif or ()
    for pattern in patterns:
        path = _path(base_dir, pattern, f"{where}.cif")
        if path.is_file():  # first, since a name may hold brackets
            files, missing = [path], ""
        elif path.is_dir():
            files = sorted(path.rglob("*.cif"))
            missing = f"the folder {path} holds no .cif file"
        elif any(mark in pattern for mark in "*?["):
            files = sorted(Path(found) for found in glob.glob(str(path), recursive=True))  # noqa: PTH207
            missing = f"no file matches {path}"
        else:
            files = []
            missing = f"{path} does not exist"
        if not files:
            raise UsageError(f"{where}.cif: {missing}")
        for file in files:
            try:
                size = file.stat().st_size
                data = read_plain(file) if size <= _MAX_CIF_BYTES else b""
            except OSError as error:
                yield Rejected(source=file.name, why=f"cannot be read: {error.strerror}")
                continue
            if size > _MAX_CIF_BYTES:
                yield Rejected(source=f"cif:{file.name}", why=f"{size} bytes: no CIF of one crystal is so large")
                continue
            yield _parse_cif(source, data, f"cif:{file.name}", "as stated in the file", seed)


def _parse_cif(source: StructureSource, data: bytes, label: str, licence: str, seed: int) -> Crystal | Rejected:
    try:
        average = read_average(data.decode("utf-8-sig", errors="replace"), partial=source.partial_occupancy == "sample")
    except CifError as error:
        return Rejected(source=label, why=str(error))
    key = hashlib.sha256(data).hexdigest()
    if average.is_ordered:
        return _crystal(source, average.ordered(), label, licence, key)
    atoms, repeats = sample_supercell(average, extent_A=source.occupancy_extent_A, seed=seed, key=key)
    drawn = _crystal(
        source,
        atoms,
        f"{label} (occupancies drawn in {' x '.join(map(str, repeats))} cells)",
        licence,
        hashlib.sha256(f"{key}|occupancies|{seed}|{repeats}".encode()).hexdigest(),
    )
    return replace(drawn, parent=average.parent())


def _read_database(source: StructureSource, base_dir: Path, where: str) -> Iterator[Crystal | Rejected]:
    from ase.db import connect

    path = _path(base_dir, source.ase_db or "", f"{where}.ase_db")
    if not path.is_file():
        raise UsageError(f"{where}.ase_db: {path} does not exist")
    try:
        rows = list(connect(str(path)).select(source.select or None, sort="id"))
    except Exception as error:
        raise UsageError(f"{where}.ase_db: {path}: {type(error).__name__}: {error}") from None
    if not rows:
        raise UsageError(f"{where}.select: no row of {path} fits {source.select!r}")
    for row in rows:
        atoms = row.toatoms()
        content = [atoms.numbers.tolist(), atoms.cell.tolist(), atoms.positions.tolist(), atoms.pbc.tolist()]
        key = hashlib.sha256(_canonical(content).encode()).hexdigest()
        yield _crystal(source, atoms, f"ase_db:{path.name}#{row.id}", "as stated by the database", key)


def _read_index(source: StructureSource, base_dir: Path, where: str) -> Iterator[Crystal | Rejected]:
    from exitwave.simulate.structures.index import read_index

    path = _path(base_dir, source.index or "", f"{where}.index")
    for line in read_index(path, where=f"{where}.index"):
        yield _crystal(source, line.atoms(), line.source, line.licence, line.key)


def _call_builder(source: StructureSource, where: str) -> Any:
    import ase
    import ase.build

    call = source.builder
    assert call is not None
    if call.name not in getattr(ase.build, "__all__", ()):
        raise UsageError(f"{where}.builder.name: ase.build has no {call.name!r}")
    try:
        atoms = getattr(ase.build, call.name)(*call.args, **call.kwargs)
    except Exception as error:
        raise UsageError(
            f"{where}.builder: ase.build.{call.name} refused it: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(atoms, ase.Atoms):
        raise UsageError(f"{where}.builder: ase.build.{call.name} gave {type(atoms).__name__}, Atoms expected")
    return atoms
