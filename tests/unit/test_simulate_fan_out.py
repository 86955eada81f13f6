"""A pass serves several samples: what is drawn once is shared, what fans out is spread, and nothing hangs on order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sim_samples import campaign, plan, recipe, single_atom

from exitwave.simulate.fan_out import FanOut
from exitwave.simulate.simulator import get_simulator
from exitwave.simulate.tasks import SampleSpec, draw_sample

SAMPLING: dict[str, Any] = {
    "energy_keV": {"uniform": [100, 200]},
    "semiangle_mrad": {"uniform": [15, 18]},
    "thickness_A": {"uniform": [4, 24]},
    "defocus_A": {"uniform": [-20, 20]},
    "tilt_x_mrad": {"normal": [0, 2]},
}


def fanned(fan_out: dict[str, int], **changes: Any) -> list[SampleSpec]:
    made = plan(**{"sampling": SAMPLING, "fan_out": fan_out, "samples_per_shard": 8, "split": {}} | changes)
    return [s for s in made.samples() if s.structure.index == 0]


def shared(sample: SampleSpec, *free: str) -> tuple[Any, ...]:
    """All that a sample has in common with its pass."""
    return (
        tuple(v for name, v in sorted(sample.values.items()) if name not in free),
        sample.scan_origin_yx_A,
        sample.phonon_seed,
    )


def test_a_pass_shares_everything_but_what_fans_out() -> None:
    samples = fanned({"thickness_A": 4, "defocus_A": 2}, samples_per_structure=24, phonons={"count": 2})
    passes = [list(group) for _, group in itertools.groupby(samples, key=lambda s: s.sample_index // 8)]
    assert [len(p) for p in passes] == [8, 8, 8]
    for one in passes:
        assert len({shared(s, "defocus_A") for s in one}) == 1
        planes = [s.exit_plane for s in one]
        assert planes[:4] == planes[4:] == sorted(set(planes[:4])) and len(set(planes[:4])) == 4
        assert len({s.values["defocus_A"] for s in one[:4]}) == len({s.values["defocus_A"] for s in one[4:]}) == 1
        assert one[0].values["defocus_A"] < 0 < one[4].values["defocus_A"]
    assert len({shared(p[0], "defocus_A") for p in passes}) == 3
    assert len({s.uid for s in samples}) == 24


def test_without_fan_out_the_draws_are_those_of_ever() -> None:
    plain = draw_sample(single_atom(), recipe(sampling=SAMPLING), 5, "train")
    ones = draw_sample(single_atom(), recipe(sampling=SAMPLING, fan_out={"thickness_A": 1}), 5, "train")
    assert plain.uid == ones.uid and plain.values == ones.values
    assert plain.scan_origin_yx_A == (13.840033401, 4.81386947912)  # as before there was any fan_out


def test_more_passes_keep_the_old_ones_and_shards_hold_whole_passes() -> None:
    few, more = (
        plan(sampling=SAMPLING, fan_out={"thickness_A": 2}, samples_per_structure=n, samples_per_shard=4)
        for n in (4, 10)
    )
    assert {s.uid for s in few.samples()} < {s.uid for s in more.samples()}
    for task in more.tasks:
        assert {k // 2 for k in task.sample_indices} == {k // 2 for k in task.sample_indices[::2]}
        assert len(task.sample_indices) <= 4


def test_two_thicknesses_on_one_exit_plane_are_counted_and_not_simulated_twice() -> None:
    thin = {**SAMPLING, "thickness_A": {"uniform": [4, 8]}}
    made = plan(sampling=thin, fan_out={"thickness_A": 4}, samples_per_structure=8, samples_per_shard=8)
    assert made.rejected_samples > 0 and made.n_samples + made.rejected_samples == 24
    assert any("the pass has a sample of" in row.why for row in made.rejected)
    assert len({s.uid for s in made.samples()}) == made.n_samples


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 200))
def test_every_sample_has_one_place_in_one_pass(thickness: int, defocus: int, c30: int, k: int) -> None:
    fan_out = FanOut(thickness_A=thickness, defocus_A=defocus, C30_A=c30)
    number, parts = fan_out.numbers(k)
    place, stride = 0, 1
    for name, count in fan_out.counts().items():
        place += parts[name][0] * stride
        stride *= count
    assert number * fan_out.width + place == k and stride == fan_out.width


def test_values_follow_their_distribution_one_from_each_part() -> None:
    values = {**SAMPLING, "defocus_A": {"choice": [-15, -5, 5]}, "C30_A": {"linspace": [0, 3000, 3]}}
    samples = fanned({"defocus_A": 2, "C30_A": 3}, sampling=values, samples_per_structure=240, samples_per_shard=6)
    counts = [sum(s.values["defocus_A"] == v for s in samples) for v in (-15, -5, 5)]
    assert sum(counts) == 240 and min(counts) > 50
    for start in range(0, 240, 6):
        one = samples[start : start + 6]
        assert len({s.values["defocus_A"] for s in one}) == 2
        assert {s.values["C30_A"] for s in one} == {0, 1500, 3000}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fan_out": {"energy_keV": 2}}, "energy_keV cannot fan out, one pass serves a single value of it; those"),
        ({"fan_out": {"thickness_A": 0}}, "greater than or equal to 1"),
        ({"fan_out": {"thickness_A": 100, "defocus_A": 100}}, "10000 samples a pass, at most 1024"),
        ({"fan_out": {"C12_A": 2}}, r"fan_out.C12_A: 2 different values a pass asked, sampling.C12_A has 1;"),
        (
            {"fan_out": {"thickness_A": 4}, "sampling": {"thickness_A": {"choice": [4, 8]}}},
            "sampling.thickness_A has 2",
        ),
        ({"fan_out": {"thickness_A": 3}, "samples_per_shard": 3}, "samples_per_structure: a multiple of 3 .* 3 or 6"),
        ({"fan_out": {"thickness_A": 4}}, "samples_per_shard: a multiple of 4 expected.* came 2; 4 would do"),
    ],
    ids=str,
)
def test_what_cannot_fan_out_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        campaign(**changes)


def test_samples_of_a_pass_are_simulated_in_order() -> None:
    upright = {name: value for name, value in SAMPLING.items() if "tilt" not in name}  # weak-phase knows no tilt
    samples = fanned({"thickness_A": 2, "defocus_A": 2}, samples_per_structure=4, sampling=upright)
    made = list(get_simulator("weak-phase").simulate(samples))
    assert [m.uid for m in made] == [s.uid for s in samples]
    assert [int(m.params["exit_plane"]) for m in made] == [s.exit_plane for s in samples]
