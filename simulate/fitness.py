"""What a simulator cannot do, told before anything is simulated. Pure functions of a recipe or of a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exitwave.simulate.distributions import bounds
from exitwave.simulate.route import repeats

if TYPE_CHECKING:
    from exitwave.simulate.spec import Recipe
    from exitwave.simulate.tasks import SampleSpec

__all__ = ["conflict", "unfit"]


def conflict(recipe: Recipe, simulator: str) -> str | None:
    """Why no sample of this recipe can be made by `simulator`, or None."""
    if simulator == "bloch" and recipe.phonons.count:
        return "bloch needs atoms at rest, phonons.count is not 0: `simulator: auto` takes another route"
    if simulator == "bloch" and recipe.grid.projection == "finite":
        return "bloch needs cells that are equal, grid.projection: finite rounds them: `simulator: auto` does it"
    if simulator != "weak-phase":
        return None
    asked = {
        "phonons.count": recipe.phonons.count > 0,
        "volume": recipe.volume is not None,
        "grid.projection: finite": recipe.grid.projection == "finite",
        "sampling.tilt_x_mrad": bounds(recipe.sampling.tilt_x_mrad) != (0, 0),
        "sampling.tilt_y_mrad": bounds(recipe.sampling.tilt_y_mrad) != (0, 0),
    }
    for name, given in asked.items():
        if given:
            return f"weak-phase is one thin phase object and knows no {name}: `simulator: auto` does"
    return None


def unfit(spec: SampleSpec, simulator: str) -> str | None:
    """Why this sample cannot be made by `simulator`, or None."""
    if (reason := conflict(spec.recipe, simulator)) is not None:
        return reason
    if simulator == "bloch" and not repeats(spec):
        (nx, ny), (rows, columns) = spec.structure.repeat_xy, spec.grid_yx
        return (
            f"bloch needs whole points in each cell: {columns} x {rows} points for {nx} x {ny} cells; "
            "grid.commensurate: true gives them"
        )
    return None
