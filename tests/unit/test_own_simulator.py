"""What is refused of a user's simulator, and that each refusal says where, what, and with which parameters."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.errors import UsageError
from exitwave.simulate import (
    ParametricPlan,
    ParametricSpec,
    campaign_failures,
    make_cluster,
    make_parametric_plan,
    run_campaign,
)

GOOD = """
import numpy as np
from exitwave.simulate import FieldSpec, own_simulator

@own_simulator(fields=[FieldSpec(name="u", dtype="<f4", shape=(4,), axes=("x",), unit="K")], version="7")
def simulate(parameters):
    return {"u": np.full(4, parameters["a_K"], np.float32)}
"""
PLAIN = "import numpy as np\ndef simulate(parameters):\n    return "


def plan(folder: Path, source: str, use: str = "sim:simulate", **changes: Any) -> ParametricPlan:
    (folder / "sim.py").write_text(source)
    simulator = {"use": use, **changes.pop("simulator", {})}
    given = {"name": "n", "parameters": {"a_K": {"uniform": [1, 2]}}, "samples": 6, "samples_per_shard": 2, **changes}
    return make_parametric_plan(ParametricSpec.model_validate({**given, "simulator": simulator}), base_dir=folder)


def refusal(folder: Path, source: str, use: str = "sim:simulate", **changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        plan(folder, source, use, **changes)
    return str(caught.value)


def test_declared_fields_are_those_of_the_plan(tmp_path: Path) -> None:
    made = plan(tmp_path, GOOD)
    assert [(f.name, f.unit) for f in made.fields] == [("u", "K")]
    assert made.simulator == "sim:simulate" and made.recipe.version == "7"


def test_a_plain_function_is_enough(tmp_path: Path) -> None:
    made = plan(tmp_path, PLAIN + "{'u': np.arange(3), 'v': np.ones((2, 2), np.float32)}")
    assert [(f.name, f.dtype, f.shape) for f in made.fields] == [("u", "<i8", (3,)), ("v", "<f4", (2, 2))]
    run_campaign(made, tmp_path / "data", make_cluster("inline"))
    assert np.array_equal(open_dataset(tmp_path / "data")[5]["u"], [0, 1, 2])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("[1, 2]", "a mapping from names to arrays expected, came list"),
        ("{}", "at least one array expected"),
        ("{'u': np.ones(3, np.float32)}", "u is of shape (3,), expected (4,)"),
        ("{'u': np.ones(4)}", "u is float64, expected float32: nothing is converted here; .astype(numpy.float32)"),
        ("{'u': np.full(4, np.nan, np.float32)}", "u holds 4 values that are not finite, of 4"),
        ("{'v': np.ones(4, np.float32)}", "the fields u expected: missing u; undeclared v"),
        ("{'u': np.full(4, 1 / 0)}", "ZeroDivisionError: division by zero (sim.py, line 7)"),
        ("__import__('sys').exit(3)", "SystemExit: 3"),
        ("{'u': np.random.rand(4).astype(np.float32)}", "when it is simulated again, equal bits expected"),
    ],
)
def test_what_it_returns_is_compared_with_what_it_declares(tmp_path: Path, returned: str, words: str) -> None:
    source = GOOD.replace('{"u": np.full(4, parameters["a_K"], np.float32)}', returned)
    text = refusal(tmp_path, source)
    assert words in text and "a_K=1." in text and "seed=" in text


def test_state_that_one_sample_leaves_for_the_next_is_found(tmp_path: Path) -> None:
    body = "    kept.append(0)\n    return {'u': np.full(2, len(kept))}"
    source = "import numpy as np\nkept = []\ndef simulate(parameters):\n" + body
    assert "u differs by up to 2 when it is simulated again" in refusal(tmp_path, source)


def test_one_that_says_that_it_is_not_deterministic_is_taken_at_its_word(tmp_path: Path) -> None:
    source = PLAIN + "{'u': np.random.rand(4)}\nsimulate.deterministic = False"
    assert "not deterministic" in plan(tmp_path, source).warnings[0]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ('name="uid", dtype="<f4", shape=(4,)', "none of uid, params, crc32c"),
        ('name="a/b", dtype="<f4", shape=(4,)', "a name of letters, digits and _ expected"),
        ('name="u", dtype="<c8", shape=(4,)', "give real and imaginary part as two fields"),
        ('name="u", dtype="f99", shape=(4,)', "is not one that NumPy knows"),
        ('name="u", dtype="<f4", shape=(0,)', "a shape of whole numbers above zero"),
        ('name="u", dtype="<f4", shape=(4, 4), axes=("x",)', "1 axes ['x'] for the shape [4, 4]"),
    ],
)
def test_fields_that_no_shard_can_hold(tmp_path: Path, declared: str, words: str) -> None:
    source = GOOD.replace('name="u", dtype="<f4", shape=(4,), axes=("x",), unit="K"', declared)
    assert words in refusal(tmp_path, source)


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("plate", "plate.model:simulate", "exitwave.simulators")
    found = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr("exitwave.simulate.own.entry_points", lambda group: found)
    assert "no entry point 'heat' in the group exitwave.simulators (plate)" in refusal(tmp_path, GOOD, "heat")
    assert "neither the script" in refusal(tmp_path, GOOD, "plate")
    assert "neither the script" in refusal(tmp_path, GOOD, "nowhere.at.all:simulate")
    assert "has no 'simulat'; it has FieldSpec, own_simulator, simulate" in refusal(tmp_path, GOOD, "sim:simulat")
    assert "a module: a function" in refusal(tmp_path, GOOD, "sim:np")
    assert "a class: an instance" in refusal(tmp_path, "class simulate: pass")
    assert "module:function or the name of an entry point" in refusal(tmp_path, GOOD, "../sim:simulate")


def test_modules_that_have_no_file(tmp_path: Path) -> None:
    assert "TypeError" in refusal(tmp_path, GOOD, "time:sleep")
    assert "time has no 'sleeep'" in refusal(tmp_path, GOOD, "time:sleeep")


def test_any_order_of_memory_and_of_bytes_is_stored_as_the_same_values(tmp_path: Path) -> None:
    array = "np.asfortranarray(np.arange(6, dtype='>f4').reshape(2, 3))"
    made = plan(tmp_path, PLAIN + f"{{'f': {array}, 's': np.arange(10)[::2]}}")
    run_campaign(made, tmp_path / "data", make_cluster("inline"))
    sample = open_dataset(tmp_path / "data")[3]
    assert sample["f"].tolist() == [[0, 1, 2], [3, 4, 5]] and sample["s"].tolist() == [0, 2, 4, 6, 8]


def test_an_entry_point_is_the_function_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "own_plate_test.py").write_text(GOOD)
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    point = importlib.metadata.EntryPoint("plate", "own_plate_test:simulate", "exitwave.simulators")
    monkeypatch.setattr("exitwave.simulate.own.entry_points", lambda group: importlib.metadata.EntryPoints([point]))
    made = plan(tmp_path, GOOD, "plate")
    assert made.simulator == "own_plate_test:simulate" and made.recipe.ref.file == "" and made.recipe.ref.sha256
    result = run_campaign(made, tmp_path / "data", make_cluster("inline"))
    assert (result.committed, result.failed) == (3, 0)
    del sys.modules["own_plate_test"]


@pytest.mark.parametrize("source", ["import nowhere_at_all", "def simulate(:", "raise SystemExit(2)"])
def test_a_script_that_cannot_be_imported_says_why(tmp_path: Path, source: str) -> None:
    text = refusal(tmp_path, source)
    assert "sim.py cannot be imported: " in text and ("Error: " in text or "SystemExit: 2" in text)


def test_a_script_that_changed_is_not_mixed_into_the_data_set(tmp_path: Path) -> None:
    made = plan(tmp_path, GOOD)
    run_campaign(made, tmp_path / "data", make_cluster("inline"))
    (tmp_path / "sim.py").write_text(GOOD + "# changed\n")
    worker = plan(tmp_path, GOOD + "# again\n")
    with pytest.raises(UsageError, match=r"simulator.sha256: \"\w+.* -> "):
        run_campaign(worker, tmp_path / "data", make_cluster("inline"))
    more = plan(tmp_path, GOOD + "# again\n", samples=12)
    with pytest.raises(UsageError, match=r"simulator.sha256: \"\w+.* -> .*made in another way \(simulator\)"):
        run_campaign(more, tmp_path / "data", make_cluster("inline"))
    (tmp_path / "sim.py").write_text(GOOD + "# changed while it runs\n")
    with pytest.raises(UsageError, match="is not what the campaign was planned with"):
        next(iter(worker_task(tmp_path, worker)))
    assert "it has changed" in refusal(tmp_path, GOOD + "# other\n", simulator={"sha256": made.recipe.ref.sha256})


def test_samples_are_added_by_the_same_script(tmp_path: Path) -> None:
    run_campaign(plan(tmp_path, GOOD), tmp_path / "data", make_cluster("inline"))
    result = run_campaign(plan(tmp_path, GOOD, samples=10), tmp_path / "data", make_cluster("inline"))
    assert (result.committed, result.samples, len(open_dataset(tmp_path / "data"))) == (5, 10, 10)


def worker_task(folder: Path, made: ParametricPlan) -> Any:
    """A task as a process sees it that has not imported the simulator yet."""
    from exitwave.simulate import own

    own._loaded.clear()
    return made.tasks[0].simulate()


def test_one_bad_sample_fails_its_shard_alone_and_tells_its_values(tmp_path: Path) -> None:
    source = GOOD.replace("    return", "    if parameters['a_K'] == 5: raise ValueError('too hot')\n    return")
    made = plan(tmp_path, source, parameters={"a_K": {"linspace": [0, 5, 6]}})
    result = run_campaign(made, tmp_path / "data", make_cluster("inline"))
    assert (result.committed, result.failed) == (2, 1)
    (failure,) = campaign_failures(tmp_path / "data")
    assert "a_K=5, seed=" in failure["why"] and "ValueError: too hot (sim.py, line 7)" in failure["why"]


def test_an_exception_of_the_script_does_not_travel(tmp_path: Path) -> None:
    """A worker's exception is unpickled where the script was never run, with its cause and context."""
    source = "class Odd(Exception):\n    def __init__(self, a, b): super().__init__('odd')\n"
    (tmp_path / "sim.py").write_text(source + "def simulate(parameters): raise Odd(1, 2)")
    with pytest.raises(UsageError, match=r"a_K=.*: Odd: odd \(sim.py, line 3\)") as caught:
        plan(tmp_path, (tmp_path / "sim.py").read_text())
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_only_a_full_disk_and_lack_of_memory_pass_as_they_are(tmp_path: Path) -> None:
    assert "FileNotFoundError" in refusal(tmp_path, "def simulate(parameters): open('/nowhere/at/all')")
    assert "more memory than there is" in refusal(tmp_path, "def simulate(parameters): raise MemoryError('8 TB')")
    with pytest.raises(OSError, match="No space left"):
        plan(tmp_path, "import os\ndef simulate(parameters): raise OSError(28, os.strerror(28))")


def test_draws_belong_to_the_sample_alone(tmp_path: Path) -> None:
    few, many = plan(tmp_path, GOOD, samples=3), plan(tmp_path, GOOD, samples=9, parameters={"b": 1, "a_K": 2.0})
    uniform = plan(tmp_path, GOOD, samples=9)
    assert [few.recipe.values(k) for k in range(3)] == [uniform.recipe.values(k) for k in range(3)]
    assert [few.recipe.values(k)["seed"] for k in range(3)] == [many.recipe.values(k)["seed"] for k in range(3)]
    held = plan(tmp_path, GOOD, samples=20, split={"val": 0.1, "test": 3})
    parts: dict[str, list[int]] = {}
    for task in held.tasks:
        parts.setdefault(task.split, []).extend(task.sample_indices)
    assert {k: len(v) for k, v in parts.items()} == {"train": 15, "val": 2, "test": 3}
    assert sorted(k for part in parts.values() for k in part) == list(range(20))
    assert "leave none for training" in refusal(tmp_path, GOOD, split={"test": 6})
    assert "of 6 samples is none" in refusal(tmp_path, GOOD, split={"test": 0.01})


def test_nothing_is_tried_where_that_was_asked(tmp_path: Path) -> None:
    made = plan(tmp_path, GOOD.replace("return", "raise RuntimeError\n    return"), simulator={"check": False})
    assert made.summary()["core_hours"] is None and made.tasks[0].estimated_seconds() == float("inf")
    assert "declares no fields" in refusal(tmp_path, PLAIN + "{}", simulator={"check": False})


@pytest.mark.parametrize("name", ["seed", "split", "a b", "1a", "naïve"])
def test_names_of_parameters(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"choose another name|a name of letters"):
        plan(tmp_path, GOOD, parameters={name: 1})
