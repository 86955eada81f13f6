"""The version gate: workers compute the same bits as this process only if both are of the same make.

Every worker is asked for its versions before the campaign's first task, and a worker that joins later checks its own
(`cluster_plugin`). Python counts to its minor version, packages in full.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

__all__ = ["GATED_PACKAGES", "differences", "own_versions", "short_python"]

GATED_PACKAGES = ("exitwave", "abtem", "numpy", "distributed")


def own_versions() -> dict[str, str]:
    """Of this process: Python and every package that counts; "none" where one is not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in GATED_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def short_python(text: str) -> str:
    """`3.11` of `3.11.2.final.0`."""
    return ".".join(text.split(".")[:2])


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """`numpy 2.4.6 here, 2.3.1 there` for each that differs."""
    return [
        f"{'Python' if name == 'python' else name} {here[name]} here, {there.get(name) or 'none'} there"
        for name in here
        if here[name] != (there.get(name) or "none")
    ]
