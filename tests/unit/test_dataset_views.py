"""Subset, merge and migrate: the right samples, every byte checked, sources untouched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_samples import flip_bit
from views_data import FIELDS, NAMES, arrays_of, make_views_dataset, tree, uid_of, write_task

from exitwave.ingest import load_manifest, open_dataset, verify_dataset
from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.merge import composition, merge_datasets
from exitwave.ingest.migrate import CONVERTERS, convert_params, dataset_version, migrate_dataset
from exitwave.ingest.records import Header
from exitwave.ingest.schema import PARAMS_DTYPE, PARAMS_SINCE_2, SHARD_VERSION
from exitwave.ingest.subset import subset_dataset

OLD = Path(__file__).resolve().parents[1] / "data" / "dataset-version-1"


def uids(root: Path) -> list[int]:
    return [int(u) for u in open_dataset(root).uids]


def whole(root: Path, *places: tuple[int, int]) -> None:
    """The data set verifies and holds just these samples, bytes and all."""
    assert verify_dataset(root).ok
    data = open_dataset(root)
    assert sorted(uids(root)) == sorted(uid_of(*place) for place in places)
    for sample in data:
        task, row = (int(sample["uid"]) - (1 << 63)) >> 32, int(sample["uid"]) & 0xFFFFFFFF
        wanted = arrays_of(task, row)
        assert all(np.array_equal(sample[name], wanted[name]) for name in wanted)
        assert sample["params"]["energy_keV"] == 100 + 50 * task and sample["params"]["structure"] == task


def test_subset_links_whole_shards_and_rewrites_others(tmp_path: Path) -> None:
    source = make_views_dataset(tmp_path / "d", "ttve")
    before = tree(source)
    report = subset_dataset(source, tmp_path / "s", where="energy_keV >= 150 and not (split=='test' and defocus_A > 5)")
    whole(tmp_path / "s", *[(t, r) for t in (1, 2) for r in range(3)], (3, 0))
    assert (report.linked, report.rewritten, report.dropped) == (2, 1, 5)
    assert report.splits == {"train": 3, "val": 3, "test": 1}
    linked = load_manifest(source).shards[1].path
    assert (source / linked).stat().st_ino == (tmp_path / "s" / linked).stat().st_ino
    assert tree(source) == before
    header = load_manifest(tmp_path / "s").header
    assert header.dataset_id != "views" and header.provenance[-1]["where"].startswith("energy_keV")
    assert header.provenance[-1]["sources"][0]["id"] == "views"
    last = load_manifest(tmp_path / "s").shards[-1]
    assert [s.formula for s in last.structures] == ["Cu"]
    assert open_dataset(tmp_path / "s").structure(6).positions_A.shape == (2, 3)
    subset_dataset(tmp_path / "s", tmp_path / "ss", split="train")
    assert [s["verb"] for s in load_manifest(tmp_path / "ss").header.provenance] == ["subset", "subset"]
    again = subset_dataset(source, tmp_path / "s2", where="energy_keV >= 150 and not (split=='test' and defocus_A > 5)")
    assert again.samples == 7 and tree(tmp_path / "s" / "shards") == tree(tmp_path / "s2" / "shards")


def test_subset_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    source = make_views_dataset(tmp_path / "d", "tt")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    cases: list[tuple[str, dict[str, Any], Path]] = [
        ("give --where", {}, tmp_path / "s"),
        ("no sample is chosen", {"where": "energy_keV > 1000"}, tmp_path / "s"),
        ("no split 'val'", {"split": "val"}, tmp_path / "s"),
        ("there already", {"split": "train"}, tmp_path / "there"),
        ("lies inside", {"split": "train"}, source / "s"),
    ]
    for match, given, out in cases:
        with pytest.raises(UsageError, match=match):
            subset_dataset(source, out, **given)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "there"]


@pytest.mark.parametrize("where", ["thickness_A > 0", "defocus_A < 15"])  # whole shards, and rows of them
def test_a_damaged_source_is_named(tmp_path: Path, where: str) -> None:
    source = make_views_dataset(tmp_path / "d", "tt")
    shard = load_manifest(source).shards[1]
    extent = shard.extent("potential")
    flip_bit(source / shard.path, extent.offset + extent.stride + 9)
    with pytest.raises(DamagedDataError, match=rf"shard {shard.shard_id}.*uid {uid_of(1, 1):#018x}.*potential"):
        subset_dataset(source, tmp_path / "s", where=where)
    assert not (tmp_path / "s").exists()


def test_an_interrupted_subset_goes_on(tmp_path: Path) -> None:
    source = make_views_dataset(tmp_path / "d", "tttt")
    done: list[int] = []

    def emit(kind: str, **fields: Any) -> None:
        done.append(fields["done"])

    with pytest.raises(InterruptedRunError, match="after 4 of 8"):
        subset_dataset(source, tmp_path / "s", where="defocus_A < 15", emit=emit, stopped=lambda: done[-1] == 4)
    assert not (tmp_path / "s").exists()
    kept = tree(tmp_path / ".s.part" / "content" / "shards")
    subset_dataset(source, tmp_path / "s", where="defocus_A < 15", emit=emit)
    assert kept.items() <= tree(tmp_path / "s" / "shards").items() and len(kept) == 2
    whole(tmp_path / "s", *[(t, r) for t in range(4) for r in range(2)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "s"]


def test_merge_takes_each_sample_once(tmp_path: Path) -> None:
    first = make_views_dataset(tmp_path / "a", "ttv", name="a")
    make_views_dataset(tmp_path / "b0", "tte", name="b", first=1)  # tasks 1, 2, 3; of which 1 is in a as well
    subset_dataset(tmp_path / "b0", tmp_path / "b", where="not (energy_keV == 200)")
    before = tree(first), tree(tmp_path / "b")
    report = merge_datasets([first, tmp_path / "b"], tmp_path / "m")
    assert (report.samples, report.dropped, report.splits) == (12, 3, {"train": 6, "val": 3, "test": 3})
    whole(tmp_path / "m", *[(t, r) for t in range(4) for r in range(3)])
    assert (tree(first), tree(tmp_path / "b")) == before
    (*_, last) = load_manifest(tmp_path / "m").header.provenance
    assert last["verb"] == "merge" and [s["name"] for s in last["sources"]] == ["a", "b"]
    subset_dataset(first, tmp_path / "c", where="defocus_A < 15 and energy_keV < 120")  # rows of a's first shard
    report = merge_datasets([tmp_path / "c", first], tmp_path / "m2")
    assert (report.samples, report.dropped, report.rewritten) == (9, 2, 1)
    whole(tmp_path / "m2", *[(t, r) for t in range(3) for r in range(3)])


def test_what_does_not_go_together_is_named(tmp_path: Path) -> None:
    first = make_views_dataset(tmp_path / "a", "tt", name="a")
    make_views_dataset(tmp_path / "leak", "e", name="leak", first=5)  # Au again, now to test
    make_views_dataset(tmp_path / "f", "t", name="f", first=7, fields=FIELDS[:1])
    create_dataset(tmp_path / "twin", Header(dataset_id="twin", campaign_hash="c", fields=FIELDS))
    published = write_task(tmp_path / "twin", 0, n=2)
    with ManifestWriter(tmp_path / "twin", epoch=1) as writer:
        writer.commit(published, split=NAMES["v"], producer={})
    cases = [
        ("Au is in test of .*leak and in train of .*a: together", [first, tmp_path / "leak"]),
        ("holds the fields cbed, potential, .*f cbed", [first, tmp_path / "f"]),
        ("Au is in val of .*twin and in train of", [first, tmp_path / "twin"]),
        ("at least two", [first]),
    ]
    for match, sources in cases:
        with pytest.raises(UsageError, match=match):
            merge_datasets(sources, tmp_path / "m")
    with pytest.raises(UsageError, match="lies inside the data set"):
        merge_datasets([first, tmp_path / "leak"], first / "m")
    with pytest.raises(UsageError, match=r"other parameters \(images_aperture_mrad.*exitwave migrate"):
        old = Path(shutil.copytree(OLD, tmp_path / "old"))
        merge_datasets([old, make_like(old, tmp_path / "new")], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def make_like(old: Path, root: Path) -> Path:
    """A copy of a data set, migrated."""
    shutil.copytree(old, root)
    migrate_dataset(root)
    return root


def test_one_uid_for_different_samples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import views_data

    first = make_views_dataset(tmp_path / "a", "t", name="a", n=2)
    monkeypatch.setattr(views_data, "arrays_of", lambda task, row, fields=FIELDS: arrays_of(task, row + 50, fields))
    make_views_dataset(tmp_path / "b", "t", name="b", n=2)
    with pytest.raises(
        UsageError, match=f"uid {uid_of(0, 0):016x} stands in .*different samples: cbed, potential differ"
    ):
        merge_datasets([first, tmp_path / "b"], tmp_path / "m")


@pytest.mark.parametrize(
    ("formula", "expected"), [("Au", "Au"), ("Au4", "Au"), ("Ga4As4", "AsGa"), ("SrTiO3", "O3SrTi"), ("x", "x")]
)
def test_composition(formula: str, expected: str) -> None:
    assert composition(formula) == expected


def test_migrate_keeps_samples_bytes_and_order(tmp_path: Path) -> None:
    root = Path(shutil.copytree(OLD, tmp_path / "d"))
    (root / "events.jsonl").write_text("{}\n")
    before, old = tree(root), open_dataset(root)
    samples = list(old)
    assert dataset_version(root) == 1
    report = migrate_dataset(root)
    assert (report.version_before, report.version, report.samples) == (1, SHARD_VERSION, len(samples))
    assert dataset_version(root) == SHARD_VERSION and verify_dataset(root).ok
    new = open_dataset(root)
    assert new.dataset_id == old.dataset_id and new.params.dtype == PARAMS_DTYPE
    assert [s.shard_id for s in new.shards] == [s.shard_id for s in old.shards]
    for a, b in zip(samples, new, strict=True):
        assert a["uid"] == b["uid"] and all(np.array_equal(a[f.name], b[f.name]) for f in old.fields)
        assert all(np.array_equal(a["params"][n], b["params"][n]) for n in a["params"].dtype.names)
        assert not any(np.any(b["params"][c[0]]) for c in PARAMS_SINCE_2)
    assert tree(tmp_path / "d.version-1") == before
    assert (root / "events.jsonl").exists() and (root / "campaign.yaml").read_bytes() == before["campaign.yaml"]
    assert migrate_dataset(root).kept == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "d.version-1"]


def test_a_migration_cut_anywhere_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from exitwave.ingest import migrate

    root = Path(shutil.copytree(OLD, tmp_path / "d"))
    before = tree(root)
    done: list[int] = []

    def emit(kind: str, **fields: Any) -> None:
        done.append(fields["done"])

    with pytest.raises(InterruptedRunError):
        migrate_dataset(root, emit=emit, stopped=lambda: len(done) == 2)
    assert tree(root) == before

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    for name in ("_compare", "_exchange"):  # built, not yet swapped
        with monkeypatch.context() as patch:
            patch.setattr(migrate, name, killed)
            with pytest.raises(Killed):
                migrate_dataset(root)
            assert tree(root) == before
    exchange = migrate._exchange

    def exchange_and_die(a: Path, b: Path) -> None:
        exchange(a, b)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(migrate, "_exchange", exchange_and_die)
        with pytest.raises(Killed):
            migrate_dataset(root)
    assert dataset_version(root) == SHARD_VERSION
    migrate_dataset(root)
    assert tree(tmp_path / "d.version-1") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "d.version-1"] and verify_dataset(root).ok


def test_a_data_set_that_is_written_to_is_not_migrated(tmp_path: Path) -> None:
    root = Path(shutil.copytree(OLD, tmp_path / "d"))
    with ManifestWriter(root, epoch=9), pytest.raises(UsageError, match="another process is writing"):
        migrate_dataset(root)
    assert dataset_version(root) == 1


def test_versions_form_one_chain() -> None:
    assert sorted(CONVERTERS) == list(range(1, SHARD_VERSION))
    with pytest.raises(UsageError, match="no way from 0"):
        convert_params(np.zeros(1, PARAMS_DTYPE), 0)
