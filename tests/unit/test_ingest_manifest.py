"""The manifest: what it accepts, what it refuses and where it says the trouble is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from ingest_samples import FIELDS, flip_bit, make_dataset, shard_id, write_shard

from exitwave.ingest import manifest as manifest_module
from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.manifest import ManifestWriter, create_dataset, load_manifest
from exitwave.ingest.records import Header, PublishedShard
from exitwave.ingest.schema import FieldSpec

NAME = "manifest.jsonl"


def edit(root: Path, line: int, **changes: object) -> None:
    """Changes fields of a line as a person might, dropping its checksum."""
    lines = (root / NAME).read_text().splitlines()
    data = {**json.loads(lines[line - 1]), **changes}
    del data["line_crc32c"]
    lines[line - 1] = json.dumps(data)
    (root / NAME).write_text("\n".join(lines) + "\n")


def test_commits_are_read_back_in_the_order_of_tasks(tmp_path: Path) -> None:
    create_dataset(tmp_path, Header(dataset_id="d", campaign_hash="c", fields=FIELDS))
    with ManifestWriter(tmp_path, epoch=3) as writer:
        records = [
            writer.commit(write_shard(tmp_path, task), split=split, producer={"host": "h"}, generation=generation)
            for task, split, generation in [(2, "train", 0), (0, "val", 1), (1, "train", 0)]
        ]
    manifest = load_manifest(tmp_path)
    assert [s.task for s in manifest.shards] == [1, 2, 0], "by generation, then by task, not by who finished first"
    assert [r.seq for r in records] == [0, 1, 2]
    assert list(manifest.shards) == [records[2], records[0], records[1]]
    assert (manifest.n_samples, manifest.next_seq, manifest.epoch, manifest.generation) == (12, 3, 3, 1)
    assert manifest.splits == ("train", "val")
    assert [s.task for s in manifest.by_split("train")] == [1, 2]
    first = json.loads((tmp_path / NAME).read_text().splitlines()[0])
    assert (first["kind"], first["format"], first["version"]) == ("header", "exitwave-manifest", 1)


def test_tombstones_take_out_and_the_task_may_come_again(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    shard = load_manifest(root).shards[1]
    (root / shard.path).unlink()  # the file is lost: the writer must still open, to say so
    with ManifestWriter(root, epoch=1) as writer:
        writer.tombstone(shard.shard_id, "file lost")
        with pytest.raises(UsageError, match="is not committed"):
            writer.tombstone(shard.shard_id, "again")
        assert [s.task for s in load_manifest(root).shards] == [0]
        writer.commit(write_shard(root, 1), split="train", producer={})
    manifest = load_manifest(root)
    assert [s.task for s in manifest.shards] == [0, 1]
    assert [t.why for t in manifest.tombstones] == ["file lost"]


def test_a_torn_last_line_is_ignored_and_cut_off(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    whole = (root / NAME).read_bytes()
    published = write_shard(root, 5)
    for cut in (1, 40, len(whole.splitlines()[-1]) // 2):
        (root / NAME).write_bytes(whole + whole.splitlines()[-1][:cut])
        manifest = load_manifest(root)
        assert manifest.torn_tail
        assert [s.task for s in manifest.shards] == [0, 1]
    with ManifestWriter(root, epoch=1) as writer:
        writer.commit(published, split="train", producer={})
    manifest = load_manifest(root)
    assert not manifest.torn_tail
    assert [s.task for s in manifest.shards] == [0, 1, 5]


def test_a_broken_middle_line_is_named(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt")
    lines = (root / NAME).read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:50] + b"\n"
    (root / NAME).write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=r"manifest\.jsonl:3: not a line of JSON"):
        load_manifest(root)


def test_a_line_of_endless_depth_is_named(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt")
    lines = (root / NAME).read_bytes().splitlines(keepends=True)
    lines[1] = b'{"kind": "shard", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    (root / NAME).write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=r"manifest\.jsonl:2: not a line of JSON"):
        load_manifest(root)


@pytest.mark.parametrize(
    ("line", "changes", "match"),
    [
        (
            1,
            {"version": 2},
            r"jsonl:1: found format 'exitwave-manifest' version 2, expected .* version 1\. Read it with",
        ),
        (1, {"format": "other"}, "jsonl:1: found format 'other'"),
        (2, {"path": "../elsewhere/x.h5"}, "jsonl:2: path '../elsewhere/x.h5' leaves the data set"),
        (3, {"path": "/etc/passwd"}, "jsonl:3: path '/etc/passwd' leaves the data set"),
        (2, {"kind": "party"}, "jsonl:2: kind 'party'"),
        (2, {"n": "many"}, "jsonl:2: ValueError"),
        (2, {"producer": 3}, "jsonl:2: AttributeError"),
        (2, {"extents": []}, "jsonl:2: shard .* expected"),
        (3, {"shard_id": shard_id(0)}, "jsonl:3: shard .* is committed twice"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: int, changes: dict, match: str) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    edit(root, line, **changes)
    with pytest.raises(UsageError, match=match):
        load_manifest(root)


def test_what_is_no_data_set(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is not an exitwave data set"), (tmp_path / "absent", "absent: no such folder")):
        with pytest.raises(UsageError, match=words):
            load_manifest(path)
    (tmp_path / NAME).write_bytes(b"")
    with pytest.raises(UsageError, match="jsonl:1: the header is missing"):
        load_manifest(tmp_path)


def test_a_data_set_is_not_made_twice_nor_in_a_file(tmp_path: Path) -> None:
    header = Header(dataset_id="d", campaign_hash="c", fields=FIELDS)
    create_dataset(tmp_path / "d", header)
    with pytest.raises(UsageError, match="there is a data set already"):
        create_dataset(tmp_path / "d", header)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        create_dataset(tmp_path / "file", header)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [NAME, "shards"]


def test_doubles_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    before = (root / NAME).read_bytes()
    other = write_shard(root, 4, fields=(FIELDS[0], FieldSpec(name="more", dtype="float32", shape=(2,))))
    with ManifestWriter(root, epoch=1) as writer:
        with pytest.raises(UsageError, match="is committed already"):
            writer.commit(load_manifest(root).shards[0], split="train", producer={})
        with pytest.raises(UsageError, match=r"expected .*potential"):
            writer.commit(other, split="train", producer={})
        twin = write_shard(tmp_path / "twin", 0)
        (root / "shards/twin.h5").write_bytes((tmp_path / "twin" / twin.path).read_bytes())
        data = {**twin.to_json(), "shard_id": "twin", "path": "shards/twin.h5"}
        with pytest.raises(UsageError, match="which another committed shard holds already"):
            writer.commit(type(twin).from_json(data), split="train", producer={})
        (root / other.path).unlink()
        with pytest.raises(DamagedDataError, match="cannot be read"):
            writer.commit(
                type(twin).from_json({**twin.to_json(), "path": other.path, "shard_id": "x"}), split="t", producer={}
            )
    assert (root / NAME).read_bytes() == before


def test_only_one_writer_and_fencing(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    published = write_shard(root, 1)
    with ManifestWriter(root, epoch=2) as writer:
        with pytest.raises(UsageError, match="another process is writing"):
            ManifestWriter(root, epoch=2)
        line = (root / NAME).read_bytes().splitlines(keepends=True)[1]
        with (root / NAME).open("ab") as file:  # as a controller on another machine might, where no kernel lock reaches
            file.write(
                line.replace(shard_id(0).encode(), b"other").replace(b'"epoch":1', b'"epoch":9').split(b',"line_')[0]
                + b"}\n"
            )
        with pytest.raises(InterruptedRunError, match="another controller has written"):
            writer.commit(published, split="train", producer={})
    assert load_manifest(root).epoch == 9
    with pytest.raises(UsageError, match=r"later controller \(epoch 9, this one has 2\)"):
        ManifestWriter(root, epoch=2)


def test_lines_of_a_fenced_off_controller_are_ignored(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt")
    edit(root, 3, epoch=5)
    manifest = load_manifest(root)
    assert [s.task for s in manifest.shards] == [0, 1], "line 4 has epoch 1, after epoch 5"
    assert manifest.stale == 1


def test_single_bit_flips_in_the_manifest_are_found_or_harmless(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "tv")
    whole, before = (root / NAME).read_bytes(), load_manifest(root)
    found = 0
    for byte in random.Random(4).sample(range(len(whole) - 1), 400):
        flip_bit(root / NAME, byte, byte % 8)
        try:
            after = load_manifest(root)
        except UsageError as error:
            found += 1
            assert f"{NAME}:" in str(error)
        else:  # the flip hit the key of a line's checksum: the content is whole
            assert after == before
            assert b"line_crc32c" in whole[byte - 13 : byte + 13]
        (root / NAME).write_bytes(whole)
    assert found >= 380


@pytest.mark.parametrize("many", [0, 5, 1 << 16])
def test_no_uid_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """However those of this run are held: a twin of any shard is refused, and that of one taken out is not."""
    monkeypatch.setattr(manifest_module, "_MANY_UIDS", many)
    root = make_dataset(tmp_path / "d", "tt")

    def twin(task: int, name: str) -> PublishedShard:
        made = write_shard(tmp_path / name, task)
        (root / f"shards/{name}.h5").write_bytes((tmp_path / name / made.path).read_bytes())
        return PublishedShard.from_json({**made.to_json(), "shard_id": name, "path": f"shards/{name}.h5"})

    with ManifestWriter(root, epoch=1) as writer:
        for task in (7, 8, 9):
            writer.commit(write_shard(root, task), split="train", producer={})
        for task in (0, 1, 7, 8, 9):
            with pytest.raises(UsageError, match="which another committed shard holds already"):
                writer.commit(twin(task, f"twin{task}"), split="train", producer={})
        for task in (1, 8):
            writer.tombstone(shard_id(task), "lost")
            writer.commit(twin(task, f"again{task}"), split="train", producer={})
            with pytest.raises(UsageError, match="which another committed shard holds already"):
                writer.commit(twin(task, f"third{task}"), split="train", producer={})
    assert len(load_manifest(root).shards) == 5
