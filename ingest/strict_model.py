"""The base of every description that people write: frozen, without unknown keys, and taken at its word.

Nothing is converted on the way in: `true` and `"1"` are no numbers, `2.0` is no count, and a number is finite. What is
wrong is refused where it stands, instead of meaning something that nobody wrote. Lists stand for tuples, since YAML
and JSON know no others; whole numbers stand for real ones.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

__all__ = ["StrictModel"]


class StrictModel(BaseModel):
    """A frozen record whose values are checked and never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        return _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
