"""Who may import whom (CONTRIBUTING.md, "Layers"), read from the source of every module: an executable contract."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("simulate", "ingest", "train", "workflows")

# package -> the packages of ours that it may import
MAY_IMPORT = {
    "ingest": {"ingest"},
    "simulate": {"simulate", "ingest"},
    "train": {"train", "ingest"},
    "workflows": {"workflows", "simulate", "ingest", "train"},
}

# third-party module -> the only files or folders that may import it
ONLY_IN = {
    "abtem": ("simulate/abtem_backend.py",),
    "dask": ("simulate/cluster_", "simulate/dashboard/"),
    "distributed": ("simulate/cluster_", "simulate/dashboard/"),
    "bokeh": ("simulate/dashboard/",),
    "prometheus_client": ("simulate/dashboard/",),
    "h5py": (
        "ingest/shard.py",
        "ingest/shard_reader.py",
        "ingest/compress.py",
        "ingest/export.py",
        "ingest/foreign.py",
    ),
    "zarr": ("ingest/export_zarr.py", "ingest/foreign_zarr.py"),
    "numba": ("simulate/kernels.py", "simulate/threads.py"),
    "pyfftw": ("simulate/transforms.py", "workflows/doctor.py"),
    "torch": (
        "train/",
        "ingest/batches.py",
        "ingest/bench_peers.py",
        "ingest/bench_mosaic.py",
        "ingest/bench_probe.py",
    ),
    "optuna": ("workflows/tune_sampler.py",),
    "ruamel": ("workflows/config.py",),
    "yaml": ("workflows/config.py",),
    "typer": ("workflows/",),
    "rich": ("workflows/",),
}


def modules() -> list[Path]:
    return sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported module of a file, those inside functions too, with its line; relative ones are made absolute."""
    package = ("exitwave", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def test_there_are_modules_to_check() -> None:
    assert {p.relative_to(ROOT).parts[0] for p in modules()} == set(PACKAGES)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_layers(path: Path) -> None:
    here = str(path.relative_to(ROOT))
    package = here.split("/")[0]
    wrong: list[str] = []
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] == "exitwave" and len(parts) > 1 and parts[1] not in MAY_IMPORT[package]:
            wrong.append(f"{here}:{line}: {package} may not import {name}")
        if parts[0] in ONLY_IN and not any(
            here == p or (not p.endswith(".py") and here.startswith(p)) for p in ONLY_IN[parts[0]]
        ):
            wrong.append(f"{here}:{line}: {parts[0]} is imported only in {', '.join(ONLY_IN[parts[0]])}")
        if parts[0] in PACKAGES:
            wrong.append(
                f"{here}:{line}: import exitwave.{parts[0]}, not {parts[0]}: a class under two names is two classes"
            )
        for first, second in (("allreduce", "spatial"), ("spatial", "allreduce")):
            if here.startswith(f"train/{first}/") and name.startswith(f"exitwave.train.{second}"):
                wrong.append(f"{here}:{line}: {first} may not import {second}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_environment_is_read_in_one_place(path: Path) -> None:
    """Only workflows/config.py reads environment variables: what a run does stands in its configuration."""
    here = str(path.relative_to(ROOT))
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in {"environ", "getenv", "environb"}
    ]
    assert not reads or here == "workflows/config.py", f"{here}:{reads}: environment variables are read in config.py"
