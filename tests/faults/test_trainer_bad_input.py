"""What cannot be trained on is refused by one message that says what, where and what to do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import train_data
import train_launch

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.train.evaluate import evaluate
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

SPEC = {**train_launch.SPEC, "steps": 2, "batch": 4}
SMALL: dict[str, Any] = {"train": 1, "val": 1, "test": 1, "per_material": 6}


def _train(data, out, spec=SPEC):
    return train(TrainSpec.model_validate(spec), data=data, out=out, threads=1)


def test_a_data_set_without_the_fields(tmp_path):
    data = train_data.make_dataset(tmp_path / "set", **SMALL, label_name="phase")
    with pytest.raises(UsageError, match=r"set: no field 'potential'; there are cbed, phase"):
        _train(data, tmp_path / "run")
    with pytest.raises(UsageError, match=r"no field 'late'; there are cbed, phase"):
        _train(data, tmp_path / "run", {**SPEC, "data": {"input": "late", "target": "phase"}})
    with pytest.raises(UsageError, match=r"data.input: cbed is \(8, 8, 32, 32\), expected .* as the target phase"):
        small = train_data.make_dataset(tmp_path / "small", **SMALL, label=16, label_name="phase")
        _train(small, tmp_path / "run", {**SPEC, "data": {"input": "cbed", "target": "phase"}})
    assert not (tmp_path / "run" / "model.pt").exists()


@pytest.mark.parametrize(("field", "value"), [("cbed", np.nan), ("cbed", np.inf), ("potential", np.nan)])
@pytest.mark.parametrize("when", ["measured", "trained"])
def test_nan_in_the_data_names_sample_and_field(tmp_path, field, value, when, monkeypatch):
    """Our writers refuse such numbers; here they come from below, as a broken memory would let them."""
    data = train_data.make_dataset(tmp_path / "set", **SMALL)
    read, reads = ShardDataset._read, itertools.count()

    def spoilt(self, indices):
        samples = read(self, indices)
        if when == "measured" or next(reads) >= 6:  # the training set is measured first
            for sample in samples:
                if sample["uid"] == 100_003:
                    sample[field][1, 2] = value
        return samples

    monkeypatch.setattr(ShardDataset, "_read", spoilt)
    spec = {**SPEC, "steps": 6}
    with pytest.raises(DamagedDataError, match=rf"sample {100_003:016x}: expected finite numbers .*in {field}, \d+ of"):
        _train(data, tmp_path / "run", spec)


def test_a_negative_intensity_names_the_sample(tmp_path):
    def spoil(sample):
        sample["cbed"][0, 0, 0, 0] = -1.0

    data = train_data.make_dataset(tmp_path / "set", **SMALL, spoil=spoil)
    with pytest.raises(DamagedDataError, match=r"finite numbers of at least 0 in cbed, 1 of 65536"):
        _train(data, tmp_path / "run")


def test_another_scan_than_that_of_the_model_and_another_data_set(tmp_path):
    first = train_data.make_dataset(tmp_path / "first", **SMALL)
    _train(first, tmp_path / "run")
    other = train_data.make_dataset(tmp_path / "other", **SMALL, scan=4, label=16)
    with pytest.raises(UsageError, match=r"expected .*\(?8.*got|8, 8.*4, 4|8x8.*4x4"):
        evaluate(tmp_path / "run", other, threads=1)


def test_a_spec_that_asks_for_half_of_a_pair():
    with pytest.raises(ValueError, match=r"data.input and data.target belong together"):
        TrainSpec.model_validate({**SPEC, "data": {"input": "later"}})
