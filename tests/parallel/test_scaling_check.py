"""The scaling model against ranks that run on slow links."""

from __future__ import annotations

import pytest

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.bench_links import open_link
from exitwave.train.allreduce.bench_scaling import check_scaling, scale_rows, scaling_table


def needs_a_switch() -> None:
    try:
        with open_link("100mbit", 3):
            pass
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_the_model_predicts_ranks_that_run():
    needs_a_switch()
    rows, targets = check_scaling()
    assert [row["ranks"] for row in rows] == [2, 2, 4, 8]
    for target in targets:
        assert target["holds"], target
    assert "calibrated sleep" in scaling_table(rows, scale_rows())


@pytest.mark.long
def test_three_ranks_meet_on_a_switch_and_the_model_is_near():
    needs_a_switch()
    rows, _ = check_scaling(cases=[("sleep", 2, "count:8"), ("sleep", 3, "count:8")])
    for row in rows:
        assert row["measured_s"] > row["compute_s"] > 0.5
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.3)  # beside other tests
