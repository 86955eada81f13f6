"""The float16 square root: its stated error, its room, and a campaign that asks for it, seen by every reader."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_samples import plan, recipe

from exitwave.ingest import ShardDataset, open_dataset
from exitwave.ingest.codecs import decode
from exitwave.ingest.encoding import LARGEST_VALUE, SQRT_F2_RELATIVE_ERROR, encode, encode_sample, sqrt_scale
from exitwave.ingest.errors import UsageError
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.shard import ShardReader
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.tasks import fields_of

HALF = FieldSpec(name="cbed", dtype="<f2", shape=(3,), encoding="sqrt-f2", scale=sqrt_scale(1.0))


@given(st.floats(2.0**-58, 1.0))
def test_the_stated_relative_error(value: float) -> None:
    values = np.array([value], dtype=np.float32)
    back = decode(HALF, encode(HALF, values))
    assert back.dtype == np.float32
    assert abs(float(back[0]) - float(values[0])) <= SQRT_F2_RELATIVE_ERROR * float(values[0])


def test_tiny_values_and_the_whole_range() -> None:
    values = np.concatenate([np.logspace(-38, -17.5, 5000), np.linspace(0, 1.00001, 20001)]).astype(np.float32)
    back = decode(HALF, encode(HALF, values)).astype(np.float64)
    assert (np.abs(back - values) <= np.maximum(SQRT_F2_RELATIVE_ERROR * values, 1e-20)).all()
    assert back[values == 0].tolist() == [0.0]
    largest = np.abs(back - values)[values > 1e-17] / values[values > 1e-17]
    assert largest.max() > 0.9 * SQRT_F2_RELATIVE_ERROR  # the bound is not idle


@pytest.mark.parametrize("largest", [1e-6, 1.0, 4.0, 1000.0])
def test_the_scale_is_the_smallest_power_of_two_with_room(largest: float) -> None:
    scale = sqrt_scale(largest)
    assert math.frexp(scale)[0] == 0.5
    assert (65504 * scale / 2) ** 2 < largest <= (65504 * scale) ** 2


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (-1e-9, 4.1, float("nan")):
        with pytest.raises(UsageError, match=r"room for 0 to 3\.99.*without `encoding`"):
            encode(HALF, np.array([0.5, wrong]))
    with pytest.raises(UsageError, match="positive number"):
        sqrt_scale(0.0)
    with pytest.raises(ValueError, match="encoding: cbed is not among the fields"):
        recipe(fields=["potential"], encoding={"cbed": "sqrt-f2"})
    with pytest.raises(ValueError, match="encoding"):
        recipe(encoding={"potential": "sqrt-f2"})
    plain = replace(HALF, dtype="<f4", encoding="", scale=1.0)
    values = np.array([-1.0])
    assert encode(plain, values) is values
    assert encode_sample([HALF], {"potential": values}) == {"potential": values}


def test_a_campaign_in_half_precision(tmp_path: Path) -> None:
    """Half the bytes on disk, the same uids; every reader gives float32 intensities within the stated error."""
    common = {"structures": [{"library": ["Si"]}], "split": {}, "samples_per_structure": 2, "simulator": "weak-phase"}
    found = {}
    for name, encoding in (("full", {}), ("half", {"cbed": "sqrt-f2"})):
        made = plan(**common, encoding=encoding)
        assert run_campaign(made, tmp_path / name, make_cluster("inline")).failed == 0
        found[name] = open_dataset(tmp_path / name)
    full, half = found["full"], found["half"]
    field = next(f for f in half.fields if f.name == "cbed")
    assert (field.encoding, field.scale, field.dtype) == ("sqrt-f2", sqrt_scale(LARGEST_VALUE["cbed"]), "<f2")
    assert fields_of(made.spec.recipe()) == half.fields
    assert full.uids.tolist() == half.uids.tolist()
    assert half.shards[0].extent("cbed").stride * 2 == full.shards[0].extent("cbed").stride
    assert verify_dataset(tmp_path / "half").ok
    with ShardReader(tmp_path / "half" / half.shards[0].path) as reader:
        readers = (half[1]["cbed"], ShardDataset(tmp_path / "half")[1]["cbed"], reader.read("cbed", 1))
    expected = full[1]["cbed"]
    for values in readers:
        assert values.dtype == np.float32
        assert (np.abs(values - expected) <= np.maximum(SQRT_F2_RELATIVE_ERROR * expected, 1e-20)).all()
    for name in ("min", "max", "mean"):
        stats = [data.shards[0].stats["fields"]["cbed"][name] for data in (full, half)]
        assert stats[0] == pytest.approx(stats[1], rel=2e-3)
