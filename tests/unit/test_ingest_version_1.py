"""A data set as version 1 wrote it stays readable: tests/data/dataset-version-1, three shards of two samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from exitwave.ingest import ShardDataset, open_dataset
from exitwave.ingest.schema import PARAMS_DTYPE, PARAMS_SINCE_2
from exitwave.ingest.shard import ShardReader
from exitwave.ingest.verify import verify_dataset

OLD = Path(__file__).resolve().parent.parent / "data" / "dataset-version-1"


def test_every_reader_takes_version_1() -> None:
    report = verify_dataset(OLD)
    assert (report.ok, report.shards, report.samples, report.uncommitted) == (True, 3, 6, ())
    data = open_dataset(OLD)
    assert data.split("train").params["energy_keV"].tolist() == [100.0, 200.0, 200.0, 100.0]
    assert [sample["params"]["split"] for sample in data] == [b"train"] * 4 + [b"test"] * 2
    assert data[5]["cbed"].shape == (2, 2, 8, 8) and 0.5 < data[5]["cbed"][0, 0].sum() <= 1
    assert data.structure(4).info.formula == "Al"
    assert ShardDataset(OLD)[0]["potential"].shape == (4, 4)
    with ShardReader(OLD / data.shards[0].path) as reader:
        assert reader.attrs["format_version"] == 1
        assert np.array_equal(reader.read("cbed", 1), data[1]["cbed"])


def test_what_version_2_added_is_all_that_differs() -> None:
    old = open_dataset(OLD).params.dtype
    added = [column[0] for column in PARAMS_SINCE_2]
    assert old.names is not None and PARAMS_DTYPE.names is not None
    assert [name for name in PARAMS_DTYPE.names if name not in added] == list(old.names)
    changed = {name: (old[name], PARAMS_DTYPE[name]) for name in old.names if PARAMS_DTYPE[name] != old[name]}
    assert changed == {"split": (np.dtype("S8"), np.dtype("S16"))}, (
        "names of splits became longer, nothing else changed"
    )
