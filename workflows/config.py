"""Configuration: the only place that reads YAML and environment variables.

A configuration file is read into a `Document`: plain values, and beside every key the line and column it stands in.
`--set key.path=value` changes a document before anything judges it, and is remembered as the place where that value
came from. `validate` then hands one section to a pydantic model and turns what the model dislikes into one message
with a line for each fault:

    campaign.yaml:12:5: sampling.energy_keV: expected 1..1000 keV, got 200000 (given in eV?)

Only mappings, sequences, strings, numbers, booleans and null are read: no tags, no merge keys, no objects. A key that
stands twice is a fault, because YAML would silently keep the last.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain_text
from exitwave.workflows.faults import Fault, faults_of
from exitwave.workflows.nodes_place import NETWORK_VARIABLES, NodePlace, interface_of, node_place, own_address

__all__ = [
    "Document",
    "RankEnvironment",
    "apply_overrides",
    "dotted",
    "expanded_folder",
    "in_allocation",
    "is_pipeline",
    "load_document",
    "parse_bytes",
    "place_of_node",
    "prefer_own_interface",
    "rank_environment",
    "shortened",
    "slurm_run",
    "validate",
]

KeyPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

_HANDED_OVER = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # a pipe with a writer: `exitwave plan <(…)`
_MAX_NODES = 200_000
_MAX_DEPTH = 50
_MAX_INT = 2**64
_PLAIN_TAGS = {"null", "bool", "int", "float", "str"}
_TAG = "tag:yaml.org,2002:"


@dataclass(kw_only=True)
class Document:
    """A configuration file: its values and where each of them was written.

    `places` maps a key path to `file:line:col` of its key (of the item, in a sequence), or to the `--set` that gave it.
    """

    source: str
    folder: Path
    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where the deepest known part of `path` was written."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.source


def load_document(path: Path | str) -> Document:
    """Read a YAML file. Raises UsageError naming file, line and column."""
    path = Path(path)
    try:
        handed_over = str(path).startswith(_HANDED_OVER)
        text = path.read_text(encoding="utf-8") if handed_over else read_plain_text(path)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file. `exitwave init {path}` writes one to start from, with every choice explained."
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path}: a folder; expected a YAML file.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.") from None
    return parse_document(text, source=str(path), folder=path.parent)


def parse_document(text: str, *, source: str, folder: Path) -> Document:
    """Read YAML text; `source` is what messages call it. Raises UsageError naming line and column."""
    reader = _Reader(source)
    value = reader.read(text)
    if value is None:
        raise UsageError(f"{source}:1:1: the file is empty; `exitwave init FILE` writes one to start from.")
    if not isinstance(value, dict):
        raise UsageError(f"{source}:1:1: expected `key: value` lines, got a {_kind(value)}.")
    return Document(source=source, folder=folder, data=value, places=reader.places)


class _Reader:
    """Turns YAML text into plain values, noting the place of every key."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.places: dict[KeyPath, str] = {}
        self._count = 0
        self._yaml = YAML(typ="safe", pure=True)

    def read(self, text: str) -> Any:
        try:
            node = self._yaml.compose(StringIO(text))
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{self.source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else self.source
            raise UsageError(f"{place}: not valid YAML: {error.problem or error.context}.{_yaml_hint(error)}") from None
        except YAMLError as error:
            raise UsageError(f"{self.source}: not valid YAML: {str(error).splitlines()[0]}.") from None
        except RecursionError:
            raise UsageError(f"{self.source}: nested too deeply to be read; at most {_MAX_DEPTH} levels.") from None
        return None if node is None else self._value(node, (), ())

    def _at(self, node: Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _value(self, node: Node, path: KeyPath, above: tuple[int, ...]) -> Any:
        self._count += 1
        if id(node) in above:
            raise UsageError(f"{self._at(node)}: the alias refers to what it stands in.")
        if self._count > _MAX_NODES:
            raise UsageError(f"{self.source}: more than {_MAX_NODES} values once aliases are followed.")
        if len(above) > _MAX_DEPTH:
            raise UsageError(f"{self._at(node)}: nested too deeply; at most {_MAX_DEPTH} levels are read here.")
        self.places.setdefault(path, self._at(node))
        if isinstance(node, MappingNode):
            self._plain_tag(node, "map")
            return self._mapping(node, path, (*above, id(node)))
        if isinstance(node, SequenceNode):
            self._plain_tag(node, "seq")
            return [self._value(item, (*path, i), (*above, id(node))) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: MappingNode, path: KeyPath, above: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, str] = {}
        for key_node, value_node in node.value:
            at = self._at(key_node)
            if not isinstance(key_node, ScalarNode):
                raise UsageError(f"{at}: a key must be a word.")
            key = str(key_node.value)
            if key == "<<":
                raise UsageError(f"{at}: merge keys (`<<`) are not read here; write the keys out.")
            if key in first:
                raise UsageError(
                    f"{at}: {dotted((*path, key))}: this key stands twice (first at {first[key]}); keep one of them."
                )
            first[key] = at
            self.places[(*path, key)] = at
            result[key] = self._value(value_node, (*path, key), above)
        return result

    def _scalar(self, node: Node) -> Any:
        tag = str(node.tag or "")
        if tag == _TAG + "timestamp":
            return node.value
        if tag.removeprefix(_TAG) not in _PLAIN_TAGS:
            raise UsageError(
                f"{self._at(node)}: the tag {tag.replace(_TAG, '!!')} is not read here; give a plain value."
            )
        try:
            value = self._yaml.constructor.construct_object(node, deep=True)
        except (ValueError, YAMLError):
            said = tag.replace(_TAG, "!!")
            raise UsageError(f"{self._at(node)}: {shortened(node.value)!r} is not what its tag {said} says.") from None
        if isinstance(value, int) and abs(value) >= _MAX_INT:
            raise UsageError(f"{self._at(node)}: {shortened(node.value)} is larger than any number that is read here.")
        return value

    def _plain_tag(self, node: Node, expected: str) -> None:
        if str(node.tag) != _TAG + expected:
            tag = str(node.tag).replace(_TAG, "!!")
            raise UsageError(f"{self._at(node)}: the tag {tag} is not read here; give plain values.")


def _yaml_hint(error: MarkedYAMLError) -> str:
    text = f"{error.problem} {error.context}"
    if "\\t" in text or "'\t'" in text:
        return " Indent with spaces, not with tabs."
    if "mapping values are not allowed" in text:
        return " A value that contains `: ` needs quotes; keys of one level need the same indentation."
    if "expected <block end>" in text:
        return " Lines of one level need the same indentation."
    return ""


def _kind(value: Any) -> str:
    return {"list": "list", "str": "text", "int": "number", "float": "number"}.get(type(value).__name__, "value")


def dotted(path: KeyPath) -> str:
    """`('structures', 0, 'cif')` as people write it: `structures[0].cif`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


# --- overrides ------------------------------------------------------------------------------------------------------


def apply_overrides(document: Document, overrides: Sequence[str], *, section: str | None = None) -> None:
    """Apply `--set key.path=value` to the document. Values are YAML (`[8, 8]`, `{uniform: [0, 1]}`, `null`).

    In a pipeline file keys are those of `section` (the part that the verb uses); a key that begins with the name of a
    section of the file stays as it is. Raises UsageError naming the option.
    """
    for text in overrides:
        option = f"--set {text}"
        key, equals, raw = text.partition("=")
        parts = [p for p in re.split(r"[.\[\]]+", key.strip()) if p]
        if not equals or not parts:
            raise UsageError(f"{option}: expected --set key.path=value, for example --set scan.step_A=0.5.")
        value = _override_value(raw, option)
        if section is not None and parts[0] not in _SECTIONS:
            parts = [section, *parts]
        path = _put(document.data, parts, value, option)
        for known in [p for p in document.places if p[: len(path)] == path]:
            del document.places[known]
        document.places[path] = option


def _override_value(raw: str, option: str) -> Any:
    reader = _Reader(option)
    try:
        return reader.read(raw) if raw.strip() else None
    except UsageError as error:
        raise UsageError(f"{option}: the value is not valid YAML ({error}).") from None


def _put(data: Any, parts: Sequence[str], value: Any, option: str) -> KeyPath:
    """Put `value` at the path; returns the path with list positions as numbers."""
    path: list[str | int] = []
    here = data
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(here, list):
            if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(here):
                raise UsageError(
                    f"{option}: {dotted(tuple(path))} is a list of {len(here)}; expected a position "
                    f"0..{len(here) - 1}, "
                    f"got {part!r}."
                )
            step: str | int = int(part)
        elif isinstance(here, dict):
            step = part
            if not last and (step not in here or here[step] is None):
                here[step] = {}
        else:
            raise UsageError(f"{option}: {dotted(tuple(path))} is a single value ({here!r}); it has no key {part!r}.")
        path.append(step)
        if last:
            here[step] = value
        else:
            here = here[step]
    return tuple(path)


# --- sections and validation ----------------------------------------------------------------------------------------

_SECTIONS = ("campaign", "cluster", "stage", "train", "ranks", "launch", "evaluate", "adaptive", "online", "tune")


def is_pipeline(document: Document) -> bool:
    """Whether the file is a pipeline: it holds a `campaign` or a `train` section."""
    return "campaign" in document.data or "train" in document.data


def validate(document: Document, model: type[Model]) -> Model:
    """The document as a `model`. Raises UsageError listing every fault with its place."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        faults = faults_of(error, model, document.data)
    raise UsageError("\n".join(_lines(document, faults)))


def _lines(document: Document, faults: Sequence[Fault]) -> Iterator[str]:
    for fault in faults:
        key = f"{dotted(fault.path)}: " if fault.path else ""
        yield f"{document.place(fault.path)}: {key}{fault.message}"


def shortened(value: Any, limit: int = 70) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- options and environment ----------------------------------------------------------------------------------------

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int, option: str = "--capacity") -> int:
    """`20GB`, `512MiB`, `1.5e9` in bytes. Raises UsageError naming `option`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtT]?i?)[bB]?\s*", str(text))
    factor = (_UNITS | _BINARY).get(match[2].lower()) if match else None
    if match is None or factor is None or float(match[1]) <= 0:
        raise UsageError(f"{option}: expected a size such as 20GB or 512MiB, got {text!r}.")
    return int(float(match[1]) * factor)


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """This process's place among the ranks, as an outer launcher told it."""

    rank: int
    world_size: int
    local_rank: int
    launcher: str
    job: str = ""  # names the run among those that share its folder, where ranks must find each other by a file
    attempt: int = 0  # torchrun's restarts before this one
    ours: bool = False  # started by `exitwave train --ranks N` itself

    def init_method(self, out: Path) -> str:
        """Where the ranks meet (torch.distributed): torchrun says so in the environment, under srun a file does."""
        return "env://" if not self.job else f"file://{out.resolve()}/.rendezvous-{self.job}"


def slurm_run(environ: Mapping[str, str] | None = None) -> str:
    """Step and restart of the Slurm job that this process is in: the same for all tasks of one srun, and no other."""
    env = os.environ if environ is None else environ
    return f"{env.get('SLURM_STEP_ID', '0')}-{env.get('SLURM_RESTART_COUNT', '0')}"


def place_of_node(nodes: int) -> NodePlace | None:
    """This task's place among `nodes` nodes, or None where srun did not start it."""
    return node_place(os.environ, nodes)


def prefer_own_interface() -> None:
    """Under srun on several nodes: let gloo and NCCL use the interface by which others reach this node.

    Left to themselves they take the address that the host's own name has, which may be 127.0.1.1.
    """
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    if nodes == "1":
        return
    address = own_address(os.environ.get("EXITWAVE_INTERFACE"), os.environ.get("SLURMD_NODENAME"))
    if (interface := interface_of(address)) is not None:
        for name in NETWORK_VARIABLES:
            os.environ.setdefault(name, interface)


def in_allocation() -> bool:
    """Whether Slurm has given this process nodes, in which no step runs yet: `salloc`, or a script of one's own."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ


def expanded_folder(text: str, key: str) -> Path:
    """A folder in which $TMPDIR, $USER and other variables of this node are filled in. Raises UsageError naming `key`.

    $TMPDIR is /tmp where it is not set.
    """
    known = {"TMPDIR": tempfile.gettempdir(), "USER": str(os.getuid()), **os.environ}
    path = Template(text).safe_substitute(known)
    if "$" in path or not path.startswith("/"):
        raise UsageError(f"{key}: expected a folder's whole path; {text!r} is {path!r} on {socket.gethostname()}.")
    return Path(path)


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """The place that torchrun (RANK, WORLD_SIZE) or srun (SLURM_PROCID, SLURM_NTASKS) gave this process, or None.

    An interactive Slurm allocation sets SLURM_PROCID without any step: a lone task is not a rank.
    """
    env = os.environ if environ is None else environ
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            return RankEnvironment(
                rank=int(env["RANK"]),
                world_size=int(env["WORLD_SIZE"]),
                local_rank=int(env.get("LOCAL_RANK", "0")),
                launcher="torchrun",
                attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
                ours=env.get("EXITWAVE_LAUNCHED") == "1",
            )
        if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in env:
            return RankEnvironment(
                rank=int(env["SLURM_PROCID"]),
                world_size=int(env["SLURM_NTASKS"]),
                local_rank=int(env.get("SLURM_LOCALID", "0")),
                launcher="srun",
                job="" if "MASTER_ADDR" in env else f"{env.get('SLURM_JOB_ID', '0')}-{slurm_run(env)}",
            )
    except ValueError as error:
        raise UsageError(
            f"RANK, WORLD_SIZE, LOCAL_RANK or SLURM_* in the environment: expected numbers ({error})."
        ) from None
    return None


# What a Dask nanny in this process sets for its workers and leaves behind in ours (`distributed.nanny`), by which ranks
# would train on one thread and give their memory back after each array.
_LEFT_BY_DASK = frozenset(
    ("MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED")
)
_SET_BEFORE = _LEFT_BY_DASK & os.environ.keys()


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a process that we start: ours as it was before Dask, and what `extra` sets."""
    own = {name: value for name, value in os.environ.items() if name not in _LEFT_BY_DASK or name in _SET_BEFORE}
    return {**own, **extra}


def rank_threads(ranks: int, cores: int) -> dict[str, str]:
    """OMP_NUM_THREADS for each of the ranks that share a host's cores; nothing where the user has set it."""
    return {} if "OMP_NUM_THREADS" in _SET_BEFORE else {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def environment_value(name: str) -> str | None:
    """One environment variable, for those who report on the machine."""
    return os.environ.get(name)
