"""What views and ingest refuse, and what must not pass from one command to another."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from pydantic import ValidationError
from views_data import FIELDS, make_views_dataset, tree, write_task

from exitwave.ingest import building, load_manifest, open_dataset, verify_dataset
from exitwave.ingest.building import build_beside, refuse_existing
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.exporting import ExportSpec, export_samples
from exitwave.ingest.foreign import open_foreign
from exitwave.ingest.foreign_ingest import ingest_files
from exitwave.ingest.foreign_map import MapSpec
from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.merge import merge_datasets
from exitwave.ingest.migrate import migrate_dataset
from exitwave.ingest.schema import PARAMS_DTYPE, STANDARD_FIELDS
from exitwave.ingest.subset import subset_dataset
from exitwave.workflows.inspecting import structure_rows

OLD = Path(__file__).resolve().parents[1] / "data" / "dataset-version-1"
AXES = ["sample", "Ry", "Rx", "Qy", "Qx"]


def foreign(path: Path, seed: int = 3, n: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["c"] = np.random.default_rng(seed).random((n, 3, 4, 8, 6)).astype("f4")
        file["s"] = np.zeros((n, 5, 5), "f4")
    return path


def map_of(cbed: dict[str, Any] | None = None, **more: Any) -> MapSpec:
    fields = {"cbed": {"array": "/c", "axes": AXES, **(cbed or {})}, **more.pop("fields", {})}
    return MapSpec.model_validate({"fields": fields, "parameters": {"energy_keV": 200}, **more})


def test_a_zarr_export_does_not_go_on_where_another_one_stopped(tmp_path: Path) -> None:
    data = open_dataset(make_views_dataset(tmp_path / "d", "t", n=40))
    out = tmp_path / "out"

    def stop_at(*numbers: int) -> Any:
        left = list(numbers)

        def stopped() -> bool:
            left[0] -= 1
            return left[0] < 0

        return stopped

    with pytest.raises(InterruptedRunError):
        export_samples(data, range(40), ExportSpec(format="zarr"), out, stopped=stop_at(35))
    with pytest.raises(InterruptedRunError):  # another one: begins anew, and is stopped before it notes how far it is
        export_samples(data, range(40), ExportSpec(format="zarr", fields=("cbed",)), out, stopped=stop_at(5))
    export_samples(data, range(40), ExportSpec(format="zarr", fields=("cbed",)), out)
    zarr = pytest.importorskip("zarr")
    found = zarr.open_group(str(out), mode="r")["cbed"][:]
    np.testing.assert_array_equal(found, data.read(range(40), ["cbed"])["cbed"])


def test_what_is_thrown_away_is_never_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with pytest.raises(InterruptedRunError), build_beside(out, {"a": 1}) as folder:
        (folder / "one").touch()
        (folder / "two").touch()
        raise InterruptedRunError("stopped")

    def dies(path: Path) -> None:
        (Path(path) / "one").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(building.shutil, "rmtree", dies)
        with build_beside(out, {"b": 2}):
            pass
    with build_beside(out, {"a": 1}) as folder:
        assert not [*folder.iterdir()]


def test_a_usage_error_leaves_nothing(tmp_path: Path) -> None:
    data = open_dataset(make_views_dataset(tmp_path / "d", "t"))
    with pytest.raises(UsageError, match="--dose"):
        export_samples(data, [0], ExportSpec(format="emd", dose_e_per_pattern=-5), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("name", [".", "..", "/", ""])
def test_a_target_has_a_name(name: str) -> None:
    with pytest.raises(UsageError, match="something new"):
        refuse_existing(Path(name))


def test_shards_that_are_links_are_taken_as_files(tmp_path: Path) -> None:
    source = make_views_dataset(tmp_path / "d", "tv")
    for shard in load_manifest(source).shards:
        path = source / shard.path
        path.rename(tmp_path / path.name)
        path.symlink_to(f"../../../{path.name}")
    out = tmp_path / "else" / "where" / "out"
    subset_dataset(source, out, split="val")
    shutil.rmtree(source)
    for path in tmp_path.glob("*.h5"):
        path.unlink()
    assert verify_dataset(out).ok and len(open_dataset(out)) == 3


def test_exports_refuse_what_makes_no_sense(tmp_path: Path) -> None:
    data = open_dataset(make_views_dataset(tmp_path / "d", "t"))
    twice = export_samples(data, [0], ExportSpec(format="emd", fields=("cbed", "cbed")), tmp_path / "a.h5")
    assert twice.fields == ("cbed",)
    with pytest.raises(UsageError, match="four axes"):
        export_samples(data, [0], ExportSpec(format="py4dstem", fields=("potential",)), tmp_path / "b.h5")
    counts = tuple(replace(f, dtype="uint16", unit="electrons") if f.name == "cbed" else f for f in FIELDS)
    counted = open_dataset(make_views_dataset(tmp_path / "e", "t", fields=counts))
    with pytest.raises(UsageError, match="counted already"):
        export_samples(counted, [0], ExportSpec(format="emd", dose_e_per_pattern=100), tmp_path / "c.h5")


@pytest.mark.parametrize("name", ["uid", "params", "structures", "sample", "strain", "datacube", "_x", "é", "a-b"])
def test_names_with_a_meaning_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"choose another|expected a letter"):
        map_of(fields={name: {"array": "/s", "axes": ["sample", "H", "W"]}})


@pytest.mark.parametrize("name", ["uid", "energy_keV", "formula", "", "a/b", "é", "cbed"])
def test_columns_of_ones_own_do_not_hide_others(name: str) -> None:
    with pytest.raises(ValidationError, match=r"choose another|expected a letter|has it already"):
        map_of(columns={name: "f8"})


def test_the_standard_fields_may_be_ingested() -> None:
    assert not set(STANDARD_FIELDS) & set(PARAMS_DTYPE.names or ())


@pytest.mark.parametrize("centre", [-5, 8, 14, 20])
def test_a_centre_outside_the_detector(tmp_path: Path, centre: int) -> None:
    with pytest.raises(UsageError, match="expected a pixel of 0 to 7"):
        ingest_files([foreign(tmp_path / "a.h5")], map_of({"centre": {"Qy": centre}}), tmp_path / "out")


def test_a_scale_of_zero(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="nothing of the values"):
        map_of({"scale": 0})
    with pytest.raises(UsageError, match="its scale"):
        ingest_files([foreign(tmp_path / "a.h5")], map_of({"scale": {"array": "/s"}}), tmp_path / "out")


def test_an_id_does_not_hang_on_other_files_or_the_split(tmp_path: Path) -> None:
    a, b = foreign(tmp_path / "a.h5", 1), foreign(tmp_path / "b.h5", 2)
    ingest_files([a, b], map_of(), tmp_path / "both")
    ingest_files([b], map_of(split="val"), tmp_path / "second")
    both, second = open_dataset(tmp_path / "both"), open_dataset(tmp_path / "second")
    assert second.uids.tolist() == both.uids.tolist()[3:]
    ingest_files([b, a], map_of(), tmp_path / "turned")
    assert merge_datasets([tmp_path / "both", tmp_path / "turned"], tmp_path / "merged").samples == 6


def test_a_file_given_twice(tmp_path: Path) -> None:
    a = foreign(tmp_path / "a.h5")
    (tmp_path / "link.h5").symlink_to(a)
    for other in (a, tmp_path / "link.h5"):
        with pytest.raises(UsageError, match="the same file"):
            ingest_files([a, other], map_of(), tmp_path / "out")
    copy = tmp_path / "copy" / "a.h5"
    copy.parent.mkdir()
    shutil.copy(a, copy)
    with pytest.raises(UsageError, match="sample 0 of both is the same"):
        ingest_files([a, copy], map_of(), tmp_path / "out")
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]


def test_numbers_of_samples_are_whole(tmp_path: Path) -> None:
    data = open_dataset(make_views_dataset(tmp_path / "d", "tt"))
    for wrong in ([True, False, True], [1.5], ["1"], [[0, 1]]):
        with pytest.raises(TypeError):
            data.read(wrong, ["cbed"])
    for one in (1.5, "1", slice(0, 2)):
        with pytest.raises(TypeError):
            data[one]  # type: ignore[index]
    assert len(data.read(np.array([0, 5], "u1"), ["cbed"])["uid"]) == 2 and len(data.read([], [])["uid"]) == 0


def test_structures_of_one_number_in_a_merged_data_set(tmp_path: Path) -> None:
    first = make_views_dataset(tmp_path / "d", "t")
    second = make_views_dataset(tmp_path / "e", "t", first=1)
    manifest = load_manifest(first)
    other = load_manifest(second).shards[0]
    renumbered = replace(other, structures=(replace(other.structures[0], index=0),))
    rows = structure_rows(replace(manifest, shards=(*manifest.shards, renumbered)))
    assert [(row["formula"], row["samples"]) for row in rows] == [("Au", 3), ("GaAs", 3)]


def test_texts_beyond_ascii(tmp_path: Path) -> None:
    spec = map_of(columns={"operator": "S16"}, parameters={"energy_keV": 200, "operator": "Jörg"}, split="prüfung")
    ingest_files([foreign(tmp_path / "a.h5")], spec, tmp_path / "d")
    report = subset_dataset(tmp_path / "d", tmp_path / "e", where="operator == 'Jörg' and split == 'prüfung'")
    assert report.samples == 3 and report.splits == {"prüfung": 3}
    pytest.importorskip("xarray")
    assert open_dataset(tmp_path / "e").to_xarray()["operator"].values.tolist() == ["Jörg"] * 3
    assert tree(tmp_path / "e")


@contextmanager
def files_more(n: int) -> Iterator[None]:
    """This process may open `n` files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]
    used = {int(p.name) for p in Path("/proc/self/fd").iterdir()}
    while len(holes) < 4096 and set(range(max(used))) - used:  # the limit counts numbers, not files: no holes below it
        holes.append(os.open(os.devnull, os.O_RDONLY))
        used.add(holes[-1])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1 + n, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in holes:
            os.close(fd)


@pytest.mark.parametrize("n", [1, 12, 30])
@pytest.mark.parametrize("compression", [None, "bitshuffle-lz4"])
def test_more_shards_than_files_may_be_open(tmp_path: Path, n: int, compression: str | None) -> None:
    root = make_views_dataset(tmp_path / "d", "t" * 40, n=1, compression=compression)
    data = open_dataset(root)
    expected = data.read(range(40), ["cbed"])
    data.close()
    with files_more(n):
        assert len(open_dataset(root).params) == 40
        found = data.read([*range(40), *range(40)], ["cbed"])
    assert found["uid"].tolist() == data.uids.tolist() * 2
    assert np.array_equal(found["cbed"], np.concatenate([expected["cbed"]] * 2))


def rebuilt(root: Path, *, reverse: bool) -> Path:
    """The data set of version 1 with its shards committed in another order."""
    before = load_manifest(OLD)
    create_dataset(root, before.header)
    shutil.copytree(OLD / "shards", root / "shards", dirs_exist_ok=True)
    with ManifestWriter(root, epoch=1) as writer:
        for shard in sorted(before.shards, key=lambda s: s.seq, reverse=reverse):
            writer.commit(shard, split=shard.split, producer=shard.producer, generation=shard.generation)
    return root


@pytest.mark.parametrize("reverse", [False, True])
def test_migrating_keeps_the_order_of_arrival(tmp_path: Path, reverse: bool) -> None:
    root = rebuilt(tmp_path / "d", reverse=reverse)
    arrived = [s.shard_id for s in sorted(load_manifest(root).shards, key=lambda s: s.seq)]
    assert migrate_dataset(root).version_before == 1 and len(arrived) > 1
    assert [s.shard_id for s in sorted(load_manifest(root).shards, key=lambda s: s.seq)] == arrived


def test_shards_of_two_versions_do_not_come_together(tmp_path: Path) -> None:
    root = rebuilt(tmp_path / "d", reverse=False)
    fields = load_manifest(root).header.fields
    with ManifestWriter(root, epoch=1) as writer, pytest.raises(UsageError, match="exitwave migrate"):
        writer.commit(write_task(root, 200, fields=fields), split="train", producer={})
    assert verify_dataset(root).ok


def test_odd_things_in_a_foreign_file(tmp_path: Path) -> None:
    with h5py.File(foreign(tmp_path / "a.h5"), "r+") as file:
        file["c"].attrs["bytes"] = b"\xff\xfe"
        file["loop"], file["empty"] = h5py.SoftLink("/loop"), h5py.Empty("f4")
    with open_foreign(tmp_path / "a.h5") as opened:
        assert str(opened.attributes("/c")["bytes"]).encode()
        with pytest.raises(UsageError, match="there is no /loop in it"):
            opened.array("/loop")
        with pytest.raises(UsageError, match="without any elements"):
            opened.array("/empty")
