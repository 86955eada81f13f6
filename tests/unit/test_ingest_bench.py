"""The benchmark of the loaders: its document, and the gate that keeps a wrong loader from being measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from exitwave.ingest import ShardDataset, bench, open_dataset
from exitwave.ingest.bench import bench_ingest
from exitwave.ingest.bench_data import make_dataset, manifest_sums
from exitwave.ingest.bench_peers import ours_epoch, sums_of
from exitwave.ingest.errors import ExitwaveError, UsageError


@pytest.mark.long
def test_the_document(tmp_path: Path) -> None:
    document = bench_ingest(samples=64, rounds=1, many=500, folder=tmp_path)
    assert document["bench"] == "ingest"
    rates = {row["what"].split()[0]: row["samples_per_s"] for row in document["rows"]}
    assert {"raw", "bare", "exitwave", "stage,", "cp"} <= set(rates)
    assert min(rates.values()) > 0
    named = {t["name"]: t for t in document["targets"]}
    assert named["of 64 single bit flips and 3 half-copied files found"]["holds"]
    assert any("mosaicml-streaming" in text for text in document["skipped"]), "said, since no interpreter was named"
    assert not list(tmp_path.iterdir()), "all that it wrote is gone"


def test_a_loader_that_loses_a_sample_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from exitwave.ingest import bench_peers

    whole = bench_peers.ours_epoch
    monkeypatch.setattr(bench_peers, "ours_epoch", lambda *a, **k: list(whole(*a, **k))[1:])
    with pytest.raises(ExitwaveError, match="an epoch of exitwave does not hold each sample once"):
        bench_ingest(samples=64, rounds=1, many=500, folder=tmp_path)


def test_the_gate_sees_another_byte(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", n=40, per_shard=16, shape=(4, 4))
    expected = manifest_sums(open_dataset(root))
    assert sum(expected.values()) == 40
    data = ShardDataset(root, fields=("cbed",))
    assert sums_of(ours_epoch(data, epoch=3, batch=32)) == expected

    def altered():  # type: ignore[no-untyped-def]
        for uids, values in ours_epoch(data, epoch=3, batch=32):
            values[0, 0, 0] += 1
            yield uids, values

    assert sums_of(altered()) != expected


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected at least 64"):
        bench_ingest(samples=10)
    with pytest.raises(UsageError, match="expected the Python interpreter"):
        bench_ingest(mds_python=tmp_path / "python")
    assert "pip install mosaicml-streaming" in bench.MOSAIC_HOW
