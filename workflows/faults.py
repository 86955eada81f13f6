"""From what pydantic reports to what a person can act on (pure).

Pydantic names a fault by a location that mixes keys of the file with names of union members, and speaks of "input".
Here each fault gets the key path that really stands in the file, a sentence with what was expected and what came, and
for an unknown key the nearest known one. Faults of several members of a union at one key become one.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["Fault", "faults_of"]

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong at one key."""

    path: KeyPath
    message: str


def faults_of(error: ValidationError, model: type[BaseModel], value: Any) -> list[Fault]:
    """The faults of `value` against `model`, in the order of the file, one for each key."""
    found: dict[KeyPath, list[str]] = {}
    for loc, item in _items(error):
        path = _path_in(value, loc, missing=item["type"] == "missing")
        message = _message(item, model, path, value)
        messages = found.setdefault(path, [])
        if message not in messages:
            messages.append(message)
    deepest = {p for p in found if not any(q != p and q[: len(p)] == p for q in found)}
    return [Fault(path=path, message=_one(found[path])) for path in found if path in deepest or _speaks(found[path])]


def _items(error: ValidationError, above: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Location and detail of each error; a validator that failed on a model of its own is opened up."""
    for item in error.errors(include_url=False):
        loc = (*above, *item["loc"])
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, ValidationError):
            yield from _items(inner, loc)
        else:
            yield loc, item


def _speaks(messages: Sequence[str]) -> bool:
    """Whether a fault at a key matters beside faults inside it: a union's "expected a number" does not."""
    return not all(m.startswith("expected ") for m in messages)


def _one(messages: Sequence[str]) -> str:
    """One message of the several that a union gave."""
    expected = [m.removeprefix("expected ") for m in messages if m.startswith("expected ")]
    if len(expected) == len(messages) and len(messages) > 1:
        heads = list(dict.fromkeys(e.rpartition(", got ")[0] or e for e in expected))
        got = expected[0].rpartition(", got ")[2]
        return f"expected {' or '.join(heads)}, got {got}"
    said = [m for m in messages if not m.startswith("expected ")]
    return "; ".join(said or list(messages))


def _path_in(value: Any, loc: Sequence[str | int], *, missing: bool) -> KeyPath:
    """The parts of a pydantic location that are keys of the file; union member names are not."""
    path: list[str | int] = []
    here = value
    for i, part in enumerate(loc):
        in_mapping = isinstance(here, Mapping) and part in here
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_mapping or in_list:
            path.append(part)
            here = here[part]
        elif missing and i == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _message(item: Any, model: type[BaseModel], path: KeyPath, value: Any) -> str:
    kind, context, given = item["type"], item.get("ctx", {}), item.get("input")
    got = f", got {_show(given)}"
    if kind == "extra_forbidden":
        return _unknown(model, path)
    if kind == "missing":
        return "this key is missing" + _meaning(model, path)
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", item["msg"])).removeprefix("Value error, ").strip()
    if kind in _PLAIN:
        return f"expected {_PLAIN[kind]}{got}"
    if kind in _BOUND:
        sign, key = _BOUND[kind]
        return f"expected a value {sign} {context.get(key)}{got}"
    if kind in ("literal_error", "enum"):
        choices = str(context.get("expected", ""))
        return f"expected {choices}{got}" + _near(given, _quoted(choices))
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"expected {'at least' if 'short' in kind else 'at most'} {bound} items{got}"
    message = str(item["msg"]).removeprefix("Value error, ")
    for before, after in (("Input should be", "expected"), ("Value should", "expected to")):
        message = message.replace(before, after)
    return message + ("" if kind.startswith("union") else got)


_PLAIN = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "`key: value` entries",
    "model_type": "`key: value` entries",
    "model_attributes_type": "`key: value` entries",
    "none_required": "null",
}
_BOUND = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
    "multiple_of": ("that is a multiple of", "multiple_of"),
}


def _show(value: Any, limit: int = 60) -> str:
    if isinstance(value, dict):
        text = "the keys " + ", ".join(str(k) for k in value)
    elif value is None:
        text = "nothing"
    else:
        text = repr(_as_lists(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _as_lists(value: Any) -> Any:
    """The lists that stand in the file, where a model has made tuples of them."""
    return list(map(_as_lists, value)) if isinstance(value, tuple) else value


def _quoted(text: str) -> list[str]:
    return text.split("'")[1::2]


def _near(given: Any, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(str(given), known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def _unknown(model: type[BaseModel], path: KeyPath) -> str:
    known = list(dict.fromkeys(_known_keys(model, path[:-1])))
    key = str(path[-1]) if path else ""
    match = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or [
        k for k in known if k.lower().rpartition("_")[0] == key.lower() or k.lower().startswith(key.lower() + "_")
    ]
    if match:
        return f"unknown key; did you mean `{match[0]}`?"
    return f"unknown key; known here: {', '.join(known)}" if known else "unknown key"


def _known_keys(model: type[BaseModel], path: KeyPath) -> Iterator[str]:
    for found in _models_at(model, path):
        for name, info in found.model_fields.items():
            yield str(info.alias or name)


def _meaning(model: type[BaseModel], path: KeyPath) -> str:
    for found in _models_at(model, path[:-1]):
        info = found.model_fields.get(str(path[-1])) if path else None
        if info is not None and info.description:
            return f": {info.description}"
    return ""


def _models_at(model: type[BaseModel], path: KeyPath) -> list[type[BaseModel]]:
    """The models that may describe the value at `path` (several where the model has a union)."""
    here = [model]
    for part in path:
        if isinstance(part, int):
            continue
        annotations = [
            info.annotation for m in here for name, info in m.model_fields.items() if part in (name, info.alias)
        ]
        if annotations:  # else the key of a mapping, whose values `here` describes
            here = [m for annotation in annotations for m in _models_in(annotation)]
    return here


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    origin = typing.get_origin(annotation)
    if origin is not None or isinstance(annotation, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _models_in(argument)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
