"""What a run keeps of its configuration: resolved, as YAML text, and how another one differs from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exitwave.workflows.config import KeyPath, dotted, load_document, shortened

__all__ = ["differences", "dump_yaml", "read_resolved", "resolved_comment"]


def dump_yaml(data: Mapping[str, Any], *, comment: Sequence[str] = ()) -> str:
    """`data` (dicts with text keys, lists, text, numbers, booleans, None) as YAML text, under comment lines."""
    lines = [f"# {line}".rstrip() for line in comment]
    return "\n".join([*lines, *_block(data, "")]) + "\n"


def _block(data: Mapping[str, Any], indent: str) -> Iterator[str]:
    """One line a key; what fits on a line stays on it."""
    for key, value in data.items():
        line = f"{indent}{_text(str(key))}: {_flow(value)}"
        if len(line) <= 110 or not value or not isinstance(value, dict | list):
            yield line
        elif isinstance(value, dict):
            yield f"{indent}{_text(str(key))}:"
            yield from _block(value, indent + "  ")
        else:
            yield f"{indent}{_text(str(key))}:"
            yield from (f"{indent}  - {_flow(item)}" for item in value)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(str(k))}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _text(value) if isinstance(value, str) else json.dumps(value, allow_nan=False)


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./*-]*")
_MEANING = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # to any reader of YAML 1.1 or 1.2


def _text(value: str) -> str:
    """A plain word where that is safe, else a double-quoted string (JSON's are YAML's)."""
    if _WORD.fullmatch(value) and value.lower() not in _MEANING:
        return value
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in json.dumps(value, ensure_ascii=False))


def resolved_comment(what: str, versions: Mapping[str, str]) -> list[str]:
    """The lines that stand above a resolved configuration: what it is and what made it."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return [
        f"{what}, as resolved: defaults filled in, --set applied. Written {made}.",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]


def read_resolved(path: Path) -> dict[str, Any]:
    """A resolved configuration that an earlier run wrote."""
    return load_document(path).data


def differences(before: Any, after: Any, path: KeyPath = ()) -> list[str]:
    """What changed between two configurations, one readable line a key: `train.batch: was 16, now 32`."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = []
        for key in [*before, *(k for k in after if k not in before)]:
            if key not in after:
                lines.append(f"{dotted((*path, key))}: was {shortened(before[key])}, now not given")
            elif key not in before:
                lines.append(f"{dotted((*path, key))}: was not given, now {shortened(after[key])}")
            else:
                lines += differences(before[key], after[key], (*path, key))
        return lines
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            line for i, (a, b) in enumerate(zip(before, after, strict=True)) for line in differences(a, b, (*path, i))
        ]
    same = before == after and isinstance(before, bool) == isinstance(after, bool)
    return [] if same else [f"{dotted(path)}: was {shortened(before)}, now {shortened(after)}"]
