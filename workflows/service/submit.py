"""What may be submitted over the network: a configuration, checked before anything is written.

YAML is read by the same reader as files are (no tags, places in messages). Paths in it are below the root, links
included. What would run a program of the sender's choice is refused: a simulator given as a script or module (install
it, and name its entry point), lines and options of job scripts (they belong into the site's own Dask configuration),
and a scheduler at an address of the sender's choice, whose messages workers would unpickle.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain, write_atomic
from exitwave.workflows.campaigns import is_parametric
from exitwave.workflows.config import Document, apply_overrides, is_pipeline, parse_document, validate
from exitwave.workflows.resolved import dump_yaml
from exitwave.workflows.service.catalogue import NAME

__all__ = ["Verb", "arguments_for", "checked", "verb_of", "write_new"]

Verb = Literal["simulate", "run", "online", "tune"]

_OURS = "Submitted to the service."
_COMMAND_KEYS = ("prologue", "directives", "python")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:@%+-]{0,200}")
_PLAIN_FOLDER = re.compile(r"[A-Za-z0-9_./$-]{1,500}")
_VARIABLES = ("TMPDIR", "USER", "SLURM_JOB_ID")
_PATH_KEYS = ("cif", "ase_db", "index", "path", "data", "cache")


def checked(text: str, *, name: str, root: Path) -> Document:
    """The configuration, valid in itself. Raises UsageError naming line, column and key."""
    if not NAME.fullmatch(name):
        raise UsageError(f"name: {name!r}: expected letters, digits, '.', '_' and '-', at most 100, first no mark")
    document = parse_document(text, source=f"{name}.yaml", folder=root)
    apply_overrides(document, [])
    for key, path in _paths(document.data):
        _refuse_outside(path, key, document, root)
    _refuse_commands(document)
    if is_pipeline(document):
        from exitwave.workflows.pipeline_spec import PipelineSpec

        validate(document, PipelineSpec)
    elif is_parametric(document.data):
        _refuse_program(document)
    else:
        from exitwave.simulate.spec import CampaignSpec

        validate(document, CampaignSpec)
    return document


def _paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in _PATH_KEYS:
                texts = inner if isinstance(inner, list) else [inner]
                yield from (((*at, key), text) for text in texts if isinstance(text, str))
            else:
                yield from _paths(inner, (*at, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*at, number))


def _refuse_outside(path: str, key: tuple[str | int, ...], document: Document, root: Path) -> None:
    if not _is_inside(path, Path(os.path.realpath(root))):
        where = ".".join(str(part) for part in key)
        raise UsageError(
            f"{document.place(key)}: {where}: {path!r}: expected a path below the service's root, written from there"
        )


def _is_inside(path: str, root: Path) -> bool:
    """Neither the path as written, nor what stands before its first wildcard, nor any file found leads out."""
    if "\0" in path or "://" in path or path.startswith("~") or ".." in Path(path).parts:
        return False
    found = glob.iglob(path, root_dir=root, recursive=True) if glob.has_magic(path) else ()  # noqa: PTH207
    for each in (re.split(r"[*?[]", path)[0], *found):
        real = Path(os.path.realpath(root / each))
        if real != root and root not in real.parents:
            return False
    return True


def _refuse_commands(document: Document) -> None:
    """Of a cluster only what is plain: no lines of job scripts, no other scheduler."""
    for section in ("cluster", "launch"):
        given = document.data.get(section)
        if not isinstance(given, dict):
            continue
        kind = given.get("kind")
        if isinstance(kind, str) and ":" in kind:
            raise UsageError(
                f"{document.place((section, 'kind'))}: {section}.kind: {kind!r}: over the network no scheduler at an "
                "address of its own is taken; run `exitwave simulate` yourself for that"
            )
        slurm = given.get("slurm")
        for key, value in slurm.items() if isinstance(slurm, dict) else ():
            plain = isinstance(value, int | float | None) or (isinstance(value, str) and _PLAIN.fullmatch(value))
            if key in _COMMAND_KEYS or not plain:
                raise UsageError(
                    f"{document.place((section, 'slurm', key))}: {section}.slurm.{key}: over the network nothing is "
                    "taken that becomes a line or an option of a job script; it belongs into jobqueue.slurm of "
                    "~/.config/dask/jobqueue.yaml where the service runs"
                )
        cache = given.get("cache")
        if isinstance(cache, str):
            plain = _PLAIN_FOLDER.fullmatch(cache)
            others = set(re.findall(r"\$([A-Za-z0-9_]*)", cache)) - set(_VARIABLES)
            if not plain or others or ("$" in cache and not cache.startswith("$TMPDIR/")):
                raise UsageError(
                    f"{document.place((section, 'cache'))}: {section}.cache: {cache!r}: expected a folder below "
                    "$TMPDIR, of other variables $USER and $SLURM_JOB_ID alone"
                )


def _refuse_program(document: Document) -> None:
    simulator = document.data.get("simulator")
    use = simulator.get("use") if isinstance(simulator, dict) else simulator
    if not isinstance(use, str) or not NAME.fullmatch(use):
        raise UsageError(
            f"{document.place(('simulator',))}: simulator.use: {use!r}: over the network only the name of an installed "
            "entry point of the group exitwave.simulators is taken, no script and no module"
        )
    from exitwave.simulate import ParametricSpec

    validate(document, ParametricSpec)


def write_new(document: Document, *, name: str, root: Path, began: bool = True) -> Path:
    """ROOT/NAME.yaml, if neither it nor a folder NAME is there. Raises UsageError where one is.

    `began=False`: no run of that name ever began; a file that the service wrote for it, and was killed, does not count.
    """
    path = root / f"{name}.yaml"
    taken = UsageError(f"name: {name}: there is a run of that name already; choose another, or resume that one")
    if (root / name).exists():
        raise taken
    text = dump_yaml(document.data, comment=[_OURS])
    if not began and _is_left_over(path):
        write_atomic(path, text.encode())
        return path
    if path.exists():
        raise taken
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise taken from None
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
    except BaseException:  # a full disk: the name is free again
        path.unlink(missing_ok=True)
        raise
    return path


def _is_left_over(path: Path) -> bool:
    """Whether the service wrote it, or was about to."""
    if path.is_symlink() or not path.is_file():
        return False
    return path.stat().st_size == 0 or read_plain(path).startswith(f"# {_OURS}\n".encode())


def arguments_for(configuration: Path, out: Path, *, verb: Verb, ranks: int | None = None) -> list[str]:
    """The command line that does it, and goes on with it when given again."""
    words = ["run", str(configuration), "--online"] if verb == "online" else [verb, str(configuration)]
    return [*words, "--out", str(out), *(["--ranks", str(ranks)] if ranks is not None else [])]


def verb_of(document: Document, *, online: bool | None = None, ranks: int | None = None) -> Verb:
    """What a submission asks for: a section `tune` is a search, a section `online` or the word trains meanwhile.

    `online`, `ranks`: what was said beside the configuration, None for nothing. Raises UsageError where that does not
    go with it.
    """
    search = is_pipeline(document) and document.data.get("tune") is not None
    if not is_pipeline(document) or search:
        what = "a search trains as its section `tune` says" if search else "a campaign alone trains nothing"
        for name, said in (("online", online), ("ranks", ranks)):
            if said is not None:
                raise UsageError(f"{name}: {what}: leave it out")
        return "tune" if search else "simulate"
    if online is None:
        online = document.data.get("online") is not None
    if online:
        from exitwave.workflows.online_fit import refuse_unfit_online
        from exitwave.workflows.pipeline_spec import PipelineSpec

        spec = validate(document, PipelineSpec)
        refuse_unfit_online(spec, ranks=ranks or spec.ranks, nodes=spec.launch.nodes)
    return "online" if online else "run"
