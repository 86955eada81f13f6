"""Simulators that users bring: any callable from parameters to named arrays, and how one is found.

    from exitwave.simulate import FieldSpec, own_simulator

    @own_simulator(fields=[FieldSpec(name="u", dtype="<f4", shape=(32, 32), axes=("y", "x"), unit="K")])
    def simulate(parameters):
        rng = np.random.default_rng(parameters["seed"])
        return {"u": …}

A campaign names it: `use: heat:simulate` is the function `simulate` of `heat.py` beside the campaign, or else of an
installed module; `use: heat` is an entry point of the group `exitwave.simulators`. Only the name travels to a worker,
which imports it there; a script that has changed since it was planned is refused, since one data set is of one code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import read_plain
from exitwave.ingest.schema import TABLES, FieldSpec

__all__ = [
    "ENTRY_POINTS",
    "OwnSimulator",
    "SimulatorRef",
    "call_simulator",
    "declared_fields",
    "find_simulator",
    "infer_fields",
    "load_simulator",
    "own_simulator",
    "with_values",
]

ENTRY_POINTS = "exitwave.simulators"

Arrays = Mapping[str, Any]
Parameters = Mapping[str, float]
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@runtime_checkable
class OwnSimulator(Protocol):
    """The public protocol. It is called with the values of a sample: each parameter of the campaign by its name, and
    `seed`, a whole number of the sample's own for whatever is random. It returns one array for each field.

    Optional attributes: `fields` (FieldSpecs; without it they are what the first sample holds), `version` (text, part
    of each uid), `deterministic` (False: equal parameters may give other bits; the plan then does not compare them).
    """

    def __call__(self, parameters: dict[str, Any], /) -> Arrays: ...


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """A function with what its author declares of it."""

    function: Callable[[dict[str, Any]], Arrays]
    fields: tuple[FieldSpec, ...]
    version: str = ""
    deterministic: bool = True
    __doc__: str = field(default="", repr=False)

    def __call__(self, parameters: dict[str, Any]) -> Arrays:
        return self.function(parameters)


def own_simulator(
    *, fields: Sequence[FieldSpec], version: str = "", deterministic: bool = True
) -> Callable[[Callable[[dict[str, Any]], Arrays]], OwnSimulator]:
    """Declare the fields of a simulator: names, dtypes, shapes, axes, units, meanings."""

    def declare(function: Callable[[dict[str, Any]], Arrays]) -> OwnSimulator:
        return _Declared(
            function=function,
            fields=tuple(fields),
            version=version,
            deterministic=deterministic,
            __doc__=function.__doc__ or "",
        )

    return declare


@dataclass(frozen=True, kw_only=True)
class SimulatorRef:
    """Where a simulator is: `name` is `module:function`; `file` the script, empty for an installed module; `sha256`
    of the file that holds it, empty where there is none."""

    name: str
    file: str = ""
    sha256: str = ""


def find_simulator(use: str, *, base_dir: Path) -> SimulatorRef:
    """What `use` names. Raises UsageError where there is no such entry point, script or module."""
    if ":" not in use:
        use = _entry_point(use)
    module, _, attribute = use.partition(":")
    parts = module.removesuffix(".py").replace("/", ".").split(".")
    if not all(part.isidentifier() for part in (*parts, *attribute.split("."))):
        raise UsageError(f"simulator.use: {use!r}: module:function or the name of an entry point expected")
    name = f"{'.'.join(parts)}:{attribute}"
    script = base_dir.joinpath(*parts).with_suffix(".py").absolute()
    if script.is_file():
        return SimulatorRef(name=name, file=str(script), sha256=_digest(script))
    if "/" in module or module.endswith(".py"):
        raise UsageError(f"simulator.use: {use}: {script} not found")
    try:
        found = importlib.util.find_spec(".".join(parts))
    except Exception:  # a package above it cannot be imported
        found = None
    if found is None:
        raise UsageError(
            f"simulator.use: {use}: neither the script {script} nor an installed module {'.'.join(parts)} exists"
        )
    origin = Path(found.origin) if found.has_location and found.origin else None
    return SimulatorRef(name=name, sha256=_digest(origin) if origin is not None and origin.is_file() else "")


def _entry_point(name: str) -> str:
    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        there = ", ".join(sorted(found.names)) or "none is installed"
        raise UsageError(
            f"simulator.use: no entry point {name!r} in the group {ENTRY_POINTS} ({there}); a function of a script "
            f"beside the campaign is given as {name}:simulate"
        )
    return found[name].value.replace(" ", "").partition("[")[0]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_plain(path)).hexdigest()
    except OSError as error:
        raise UsageError(f"simulator.use: {path} cannot be read: {error.strerror}") from None


_loaded: dict[SimulatorRef, OwnSimulator] = {}


def load_simulator(ref: SimulatorRef) -> OwnSimulator:
    """Import it, once per process. Raises UsageError with the reason where that fails, and for a changed script."""
    if ref not in _loaded:
        module = _run_script(ref) if ref.file else _import(ref)
        found: Any = module
        for part in ref.name.partition(":")[2].split("."):
            if not hasattr(found, part):
                own = (n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
                there = ", ".join(n for n in sorted(own)) or "no function"
                where = ref.file or module.__name__
                raise UsageError(f"simulator.use: {ref.name}: {where} has no {part!r}; it has {there}")
            found = getattr(found, part)
        if isinstance(found, type) or not callable(found):
            kind = "a class: an instance of it" if isinstance(found, type) else f"a {type(found).__name__}: a function"
            raise UsageError(f"simulator.use: {ref.name} is {kind} was expected")
        _loaded[ref] = found
    return _loaded[ref]


def _import(ref: SimulatorRef) -> types.ModuleType:
    try:
        module = importlib.import_module(ref.name.partition(":")[0])
    except (Exception, SystemExit) as error:
        raise UsageError(f"simulator.use: {ref.name} cannot be imported: {_reason(error)}") from error
    source = getattr(module, "__file__", None)  # a module built into Python has none
    if ref.sha256 and source is not None and _digest(Path(source)) != ref.sha256:
        raise _changed(ref, source)
    return module


def _run_script(ref: SimulatorRef) -> types.ModuleType:
    """The script as a module, from exactly the bytes that were planned with."""
    path = Path(ref.file)
    try:
        source = read_plain(path)
    except OSError as error:
        raise UsageError(f"simulator.use: {ref.file} cannot be read here: {error.strerror}") from None
    if hashlib.sha256(source).hexdigest() != ref.sha256:
        raise _changed(ref, ref.file)
    # Modules beside the script can be imported by it, also later.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = types.ModuleType(f"exitwave_own_{ref.sha256[:12]}_{path.stem}")
    module.__file__ = ref.file
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, ref.file, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UsageError(f"simulator.use: {ref.file} cannot be imported: {_reason(error)}") from error
    return module


def _changed(ref: SimulatorRef, file: str) -> UsageError:
    return UsageError(
        f"simulator.use: {file} is not what the campaign was planned with (sha256 {ref.sha256[:12]} expected): give "
        "back the old script, or simulate into a new folder"
    )


def _reason(error: BaseException) -> str:
    """The exception on one line, with the line of the user's file where it came from."""
    text = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    file, line = "", 0
    trace = error.__traceback__
    while trace is not None:
        at = trace.tb_frame.f_code.co_filename
        if not file and at != __file__ and not at.startswith("<frozen"):
            file = at
        if at == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{text} ({Path(file).name}, line {line})" if file else text


def with_values(parameters: Parameters) -> str:
    """`kappa=0.2, seed=17`"""
    return ", ".join(
        f"{name}={value:.12g}" if name != "seed" else f"seed={value}" for name, value in parameters.items()
    )


def declared_fields(simulator: OwnSimulator, name: str) -> tuple[FieldSpec, ...] | None:
    """Its `fields`, checked; None where it declares none. Raises UsageError naming the field."""
    given = getattr(simulator, "fields", None)
    if given is None:
        return None
    try:
        fields = tuple(given)
    except TypeError:
        fields = (given,)
    for spec in fields:
        if not isinstance(spec, FieldSpec):
            raise UsageError(f"simulator {name}: fields: exitwave.simulate.FieldSpec expected, came {spec!r}")
        _check_field(spec, name)
    names = [spec.name for spec in fields]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"simulator {name}: fields: at least one, each name once expected, came {names}")
    return fields


def _check_field(spec: FieldSpec, name: str) -> None:
    where = f"simulator {name}: field {spec.name!r}"
    if not isinstance(spec.name, str) or not _NAME.fullmatch(spec.name) or spec.name in (*TABLES, "structures"):
        taken = ", ".join((*TABLES, "structures"))
        raise UsageError(f"{where}: a name of letters, digits and _ expected, none of {taken}")
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        raise UsageError(f"{where}: dtype {spec.dtype!r} is not one that NumPy knows; '<f4', say, is") from None
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        hint = "; give real and imaginary part as two fields" if dtype.kind == "c" else ""
        raise UsageError(f"{where}: whole or real numbers of at most 8 bytes expected, came {dtype}{hint}")
    if not isinstance(spec.shape, tuple) or not all(isinstance(n, int) and n > 0 for n in spec.shape) or not spec.shape:
        raise UsageError(f"{where}: a shape of whole numbers above zero expected, came {spec.shape!r}")
    if spec.axes and len(spec.axes) != len(spec.shape):
        raise UsageError(f"{where}: {len(spec.axes)} axes {list(spec.axes)} for the shape {list(spec.shape)}")
    if spec.encoding:
        raise UsageError(f"{where}: encoding {spec.encoding!r}: fields of an own simulator are stored as they are")


def infer_fields(arrays: Mapping[str, np.ndarray[Any, Any]], name: str) -> tuple[FieldSpec, ...]:
    """The fields as the first sample shows them, for a simulator that declares none."""
    fields = tuple(
        FieldSpec(name=key, dtype=np.dtype(array.dtype).newbyteorder("<").str, shape=array.shape)
        for key, array in arrays.items()
    )
    for spec in fields:
        _check_field(spec, name)
    return fields


def call_simulator(
    simulator: OwnSimulator, name: str, parameters: dict[str, Any], fields: Sequence[FieldSpec] | None
) -> dict[str, np.ndarray[Any, Any]]:
    """One sample: its arrays in the order of `fields`, checked against them. Whatever the simulator prints goes to
    stderr. Raises UsageError naming the parameters' values; MemoryError and a full disk pass as they are."""
    told, failure = with_values(parameters), ""
    made: Any = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            made = simulator(dict(parameters))
    except (MemoryError, InterruptedRunError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        failure = _reason(error)
    if failure:
        # Outside of the handler: as cause or context the script's own exception would travel along, and it cannot,
        # since the process that hears of it has not run the script.
        raise UsageError(f"simulator {name} ({told}): {failure}")
    where = f"simulator {name} ({told})"
    if not isinstance(made, Mapping):
        raise UsageError(f"{where}: a mapping from names to arrays expected, came {type(made).__name__}")
    arrays = {str(key): np.asarray(value) for key, value in made.items()}
    if not arrays:
        raise UsageError(f"{where}: at least one array expected, came none")
    for key, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise UsageError(f"{where}: {key} holds {bad} values that are not finite, of {array.size}")
    return arrays if fields is None else _as_declared(arrays, fields, where)


def _as_declared(
    arrays: Mapping[str, np.ndarray[Any, Any]], fields: Sequence[FieldSpec], where: str
) -> dict[str, np.ndarray[Any, Any]]:
    wanted = [spec.name for spec in fields]
    if set(arrays) != set(wanted):
        missing = ", ".join(n for n in wanted if n not in arrays)
        extra = ", ".join(n for n in arrays if n not in wanted)
        told = "; ".join([f"missing {missing}"] * bool(missing) + [f"undeclared {extra}"] * bool(extra))
        raise UsageError(f"{where}: the fields {', '.join(wanted)} expected: {told}")
    for spec in fields:
        array = arrays[spec.name]
        if array.shape != spec.shape:
            raise UsageError(f"{where}: {spec.name} is of shape {array.shape}, expected {spec.shape}")
        if array.dtype.newbyteorder("<") != spec.stored_dtype:
            raise UsageError(
                f"{where}: {spec.name} is {array.dtype}, expected {np.dtype(spec.dtype)}: nothing is converted here; "
                f".astype(numpy.{np.dtype(spec.dtype).name}) in the simulator would do"
            )
    return {name: arrays[name] for name in wanted}


def same_bits(one: Mapping[str, np.ndarray[Any, Any]], other: Mapping[str, np.ndarray[Any, Any]]) -> str | None:
    """The first field in which two samples differ, else None."""
    for name, array in one.items():
        if name not in other or array.shape != other[name].shape or array.tobytes() != other[name].tobytes():
            return name
    return None


def largest_difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Of two arrays; infinite where their shapes differ."""
    if one.shape != other.shape:
        return math.inf
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max())
