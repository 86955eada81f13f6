"""Which samples: a small language of conditions on parameters, such as `energy_keV>=150 and split=='train'`.

    condition  = all { "or" all }
    all        = part { "and" part }
    part       = "not" part | "(" condition ")" | comparison
    comparison = value { operator value }          0.5 < strain <= 2 means both
               | value ["not"] "in" "(" value {"," value} ")"
    value      = number | 'text' | column | column "[" number "]"
    operator   = == != < <= > >=

It is parsed by hand into a tree of records and evaluated on whole columns: nothing is ever executed. Columns are those
of `/params`, and `split`, `uid`, `formula`, `prototype_group` and `space_group` of the sample's structure.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError

__all__ = ["columns_of", "parse_where", "select_rows"]

Array = np.ndarray[Any, Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>==|!=|<=|>=|<|>|\(|\)|\[|\]|,))"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WORDS = {"and", "or", "not", "in"}
_MAX_DEPTH = 50


@dataclass(frozen=True, kw_only=True)
class _Token:
    kind: str
    text: str
    at: int


@dataclass(frozen=True, kw_only=True)
class _Value:
    """A constant, a column, or one element of a column."""

    constant: float | int | str | None = None
    column: str = ""
    element: int | None = None
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class _Node:
    """`op`: and, or, not (over `parts`); one of the comparisons, or in (over `values`)."""

    op: str
    parts: tuple[_Node, ...] = ()
    values: tuple[_Value, ...] = ()
    at: int = 0


def _wrong(text: str, at: int, what: str) -> UsageError:
    return UsageError(f"--where, at character {at + 1}: {what}\n  {text}\n  {' ' * at}^")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.i = 0
        self.depth = 0

    def _tokens(self) -> Any:
        at = 0
        while self.text[at:].strip():
            found = _TOKEN.match(self.text, at)
            if found is None or found.lastgroup is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                said = "use == to compare" if self.text[at] == "=" else f"{self.text[at]!r} is not understood here"
                raise _wrong(self.text, at, f"{said}. {_HOW}")
            yield _Token(kind=found.lastgroup, text=found[found.lastgroup], at=found.start(found.lastgroup))
            at = found.end()
        yield _Token(kind="end", text="the end", at=len(self.text))

    @property
    def here(self) -> _Token:
        return self.tokens[self.i]

    def take(self, *texts: str) -> bool:
        """Goes over the next token if it is one of `texts`."""
        if self.here.text in texts and self.here.kind in ("word", "sign"):
            self.i += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise _wrong(self.text, self.here.at, f"expected {text!r}, found {self.here.text}. {_HOW}")

    def whole(self) -> _Node:
        node = self.condition()
        if self.here.kind != "end":
            raise _wrong(self.text, self.here.at, f"expected `and`, `or` or the end, found {self.here.text}. {_HOW}")
        return node

    def condition(self) -> _Node:
        return self._chain("or", lambda: self._chain("and", self.part))

    def _chain(self, word: str, inner: Callable[[], _Node]) -> _Node:
        parts = [inner()]
        while self.take(word):
            parts.append(inner())
        return parts[0] if len(parts) == 1 else _Node(op=word, parts=tuple(parts))

    def part(self) -> _Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _wrong(self.text, self.here.at, f"nested more than {_MAX_DEPTH} deep")
        try:
            if self.take("not"):
                return _Node(op="not", parts=(self.part(),))
            if self.take("("):
                node = self.condition()
                self.expect(")")
                return node
            return self.comparison()
        finally:
            self.depth -= 1

    def comparison(self) -> _Node:
        values, at = [self.value()], self.here.at
        negated = self.here.text == "not" and self.tokens[self.i + 1].text == "in" and self.take("not")
        if self.take("in"):
            self.expect("(")
            values.append(self.value())
            while self.take(","):
                values.append(self.value())
            self.expect(")")
            node = _Node(op="in", values=tuple(values), at=at)
            return _Node(op="not", parts=(node,)) if negated else node
        nodes = []
        while self.here.text in _COMPARE:
            op, at = self.here.text, self.here.at
            self.i += 1
            values.append(self.value())
            nodes.append(_Node(op=op, values=(values[-2], values[-1]), at=at))
        if not nodes:
            raise _wrong(self.text, self.here.at, f"expected a comparison, found {self.here.text}. {_HOW}")
        return nodes[0] if len(nodes) == 1 else _Node(op="and", parts=tuple(nodes))

    def value(self) -> _Value:
        token = self.here
        if token.kind == "number":
            self.i += 1
            number = int(token.text, 0) if re.fullmatch("0[xX].*|[+-]?[1-9][0-9]*|0", token.text) else float(token.text)
            return _Value(constant=number, at=token.at)
        if token.kind == "text":
            self.i += 1
            return _Value(constant=token.text[1:-1], at=token.at)
        if token.kind == "word" and token.text not in _WORDS:
            self.i += 1
            element = None
            if self.take("["):
                index = self.here
                if index.kind != "number" or not index.text.isdigit():
                    raise _wrong(self.text, index.at, f"expected a position such as 0, found {index.text}")
                self.i += 1
                self.expect("]")
                element = int(index.text)
            return _Value(column=token.text, element=element, at=token.at)
        raise _wrong(self.text, token.at, f"expected a number, 'text' or a column, found {token.text}. {_HOW}")


_HOW = "Conditions look like: energy_keV>=150 and split=='train'."


def parse_where(text: str) -> _Node:
    """The tree of a condition. UsageError with the position of what is wrong."""
    if not text.strip():
        raise UsageError(f"--where: the condition is empty. {_HOW}")
    return _Parser(text).whole()


def columns_of(params: Array, extra: Mapping[str, Array]) -> dict[str, Array]:
    """The columns (n, …) that a condition may name: those of `params` (n,), texts decoded, and `extra`."""
    columns = {name: params[name] for name in params.dtype.names or ()}
    columns |= extra
    return {name: np.char.decode(c, "utf-8", "replace") if c.dtype.kind == "S" else c for name, c in columns.items()}


def select_rows(text: str, columns: Mapping[str, Array], n: int) -> Array:
    """Which of `n` rows fulfil the condition, (n,) bool. UsageError with position for an unknown column or a mixed-up
    comparison."""
    return _evaluate(parse_where(text), text, columns, n)


def _evaluate(node: _Node, text: str, columns: Mapping[str, Array], n: int) -> Array:
    if node.op in ("and", "or"):
        together = np.logical_and if node.op == "and" else np.logical_or
        return np.asarray(together.reduce([_evaluate(part, text, columns, n) for part in node.parts]))
    if node.op == "not":
        return ~_evaluate(node.parts[0], text, columns, n)
    first, *rest = (_column(value, text, columns) for value in node.values)
    compare = _COMPARE["==" if node.op == "in" else node.op]
    found = np.zeros(n, dtype=bool)
    for other in rest:
        texts = [np.asarray(side).dtype.kind == "U" for side in (first, other)]
        if texts[0] != texts[1]:
            raise _wrong(text, node.at, "a text is compared with a number")
        found |= np.broadcast_to(compare(first, other), (n,))
    return found


def _column(value: _Value, text: str, columns: Mapping[str, Array]) -> Any:
    if not value.column:
        return np.asarray(value.constant)
    column = columns.get(value.column)
    if column is None:
        near = difflib.get_close_matches(value.column, columns, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise _wrong(text, value.at, f"no column {value.column}{hint}. There are: {', '.join(sorted(columns))}.")
    if column.ndim == 2 and value.element is not None and value.element < column.shape[1]:
        return column[:, value.element]
    if (column.ndim == 2) != (value.element is not None) or column.ndim == 2:
        size = f"has {column.shape[1]} elements: name one, as in {value.column}[0]" if column.ndim == 2 else "is scalar"
        raise _wrong(text, value.at, f"column {value.column} {size}")
    return column
