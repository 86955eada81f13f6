"""Every gate of benchmarks/physics_gates.py holds: the functions there measure, the ranges there are what is asked."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "physics_gates.py"
_spec = importlib.util.spec_from_file_location("physics_gates", _FILE)
assert _spec is not None and _spec.loader is not None
gates = importlib.util.module_from_spec(_spec)
sys.modules["physics_gates"] = gates
_spec.loader.exec_module(gates)


@pytest.mark.parametrize("name", gates.GATES)
def test_gate(name: str) -> None:
    rows = list(gates.GATES[name]())
    assert rows
    missed = [f"{row.name}: {row.value:g}, {row.required} expected" for row in rows if not row.holds]
    assert not missed, "; ".join(missed)


def test_the_gates_see_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an interaction parameter doubles the extinction distances; a gate that let it pass would be none."""
    from exitwave.simulate.abtem_backend import AbtemSimulator

    right = AbtemSimulator.transmission
    monkeypatch.setattr(AbtemSimulator, "transmission", lambda self, spec, slices: right(self, spec, slices / 2))
    with pytest.raises((AssertionError, ValueError)):  # the second minimum lies beyond the specimen
        test_gate("pendelloesung")
    with pytest.raises(AssertionError, match="Bloch waves"):
        test_gate("bloch_waves")
