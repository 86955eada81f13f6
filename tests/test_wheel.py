"""The wheel holds every tracked file of the four packages and nothing else.

setuptools leaves a subpackage that pyproject.toml does not list out of the wheel without a word; an editable install
hides that until a user meets it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("simulate", "ingest", "train", "workflows")


def tracked() -> set[str]:
    listing = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout: the tracked files are not known")
    return {f"exitwave/{line}" for line in listing.stdout.splitlines() if (ROOT / line).exists()}


def test_wheel_contents_equal_tracked_files(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, so that a build folder left here cannot leak into the wheel
    source.mkdir()
    names = {name.removeprefix("exitwave/") for name in tracked()} | {"pyproject.toml", "README.md", "LICENSE"}
    for name in names:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout[-3000:] + build.stderr[-3000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert inside == tracked()
