"""Structures, recipes and campaigns for the tests of `exitwave.simulate`: small, and complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec, Recipe
from exitwave.simulate.tasks import SampleSpec, StructureSpec, draw_sample

DATA = Path(__file__).resolve().parent.parent / "data"


def single_atom(
    number: int = 79, *, at_xy: tuple[float, float] = (8.0, 8.0), width_A: float = 16.0, height_A: float = 4.0
) -> StructureSpec:
    """One atom alone in a square cell of one slice."""
    return StructureSpec(
        index=0,
        key=f"single-{number}-{at_xy}-{width_A}",
        source="test:single atom",
        licence="computed",
        formula="X",
        space_group=1,
        wyckoff="a",
        prototype_group=1,
        zone_axis=(0, 0, 1),
        inplane_axis=(1, 0, 0),
        strain=0.0,
        numbers=(number,),
        positions_A=((at_xy[0], at_xy[1], height_A / 2),),
        lengths_A=(width_A, width_A, height_A),
        repeat_xy=(1, 1),
        slices=1,
    )


def four_atoms(*, x_A: float = 12.0, y_A: float = 12.0) -> StructureSpec:
    """Four atoms without any symmetry in a cell of two slices."""
    places = ((0.1 * x_A, 0.2 * y_A, 0.3), (0.55 * x_A, 0.35 * y_A, 1.6), (0.8 * x_A, 0.9 * y_A, 2.4), (0.0, 0.0, 0.0))
    changes = {"key": f"four atoms {x_A} {y_A}", "numbers": (79, 14, 8, 31), "positions_A": places, "slices": 2}
    return replace(single_atom(), **changes, lengths_A=(x_A, y_A, 4.0))


def recipe(**changes: Any) -> Recipe:
    """A small recipe; `sampling` is merged, everything else replaced."""
    content: dict[str, Any] = {
        "seed": 7,
        "sampling": {"energy_keV": 200, "semiangle_mrad": 20, "thickness_A": 4},
        "scan": {"shape": [1, 1], "step_A": 0.5},
        "grid": {"sampling_A": 0.125},
        "detector": {"shape": [32, 32], "max_angle_mrad": 45},
        "label": {"shape": [4, 4], "blur_A": 0.3},
    }
    content["sampling"] |= changes.pop("sampling", {})
    return Recipe.model_validate(content | changes)


def sample(structure: StructureSpec, number: int = 0, **changes: Any) -> SampleSpec:
    return draw_sample(structure, recipe(**changes), number, "train")


def campaign(**changes: Any) -> CampaignSpec:
    """A campaign of a few quick samples with every split."""
    content: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "structures": [{"library": ["Si", "Al", "Cu"]}],
        "split": {"val": 1, "test": 1},
        "samples_per_structure": 4,
        "samples_per_shard": 2,
        "cell": {"min_extent_A": 16},
        "sampling": {
            "energy_keV": {"choice": [100, 200]},
            "semiangle_mrad": 18,
            "defocus_A": {"uniform": [-20, 20]},
            "thickness_A": {"uniform": [4, 10]},
        },
        "scan": {"shape": [2, 2], "step_A": 0.5},
        "grid": {"sampling_A": 0.25},
        "detector": {"shape": [16, 16], "max_q_per_A": 1.2},
        "label": {"shape": [8, 8], "blur_A": 0.3},
    }
    return CampaignSpec.model_validate(content | changes)


def plan(**changes: Any) -> Plan:
    return make_plan(campaign(**changes), base_dir=DATA)
