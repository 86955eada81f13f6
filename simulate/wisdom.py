"""Plans of transforms that are searched for once, kept with the data set, and the same in every worker.

1. Before its first task the controller of a campaign that is long enough to gain by it searches patiently, for a
   bounded time, for the plans of all lengths of lines in the plan, and writes what it found to
   DATASET/wisdom/<kind of host>: at once and whole, never to be changed.
2. A worker plans by the file of its own kind of host, and measures nothing: the same bits as in every other worker.
   Where there is none (a short campaign, a host of another kind than the controller's), plans are estimated: slower,
   and the same everywhere too.
3. A later controller on another kind of host makes a file of its own.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest.files import read_plain, write_atomic
from exitwave.simulate.route import FAST_ROUTES

if TYPE_CHECKING:
    from exitwave.simulate.plan import Plan
    from exitwave.simulate.spec import GridSpec
    from exitwave.simulate.tasks import StructureSpec

__all__ = ["FOLDER", "host_kind", "make_wisdom", "use_wisdom"]

FOLDER = "wisdom"
# A search costs about half a second a length and gains a sixth of the time of the transforms.
WORTH_CORE_S = 120.0
_SEARCH_S = 30.0


@cache
def host_kind() -> str:
    """What decides on plans: architecture, kind of processor, FFTW's version. A name for a file."""
    from exitwave.simulate.transforms import library_version

    model = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
        model += "".join(re.findall(r"(?:cpu family|model|model name|flags)\s*:.*", text.partition("\n\n")[0]))
    except OSError:
        pass
    digest = hashlib.blake2b(f"{model} {library_version()}".encode(), digest_size=6).hexdigest()
    return f"{platform.machine()}-{digest}"


def make_wisdom(plan: Plan, dataset: Path) -> Path | None:
    """The file of this kind of host, made where it is missing and the campaign long enough; None where it is not."""
    path = dataset / FOLDER / host_kind()
    if path.exists():
        return path
    if plan.core_seconds < WORTH_CORE_S or plan.simulator not in FAST_ROUTES:
        return None
    from exitwave.simulate.transforms import search

    lengths = sorted({points for structure in plan.structures for points in _lines(structure, plan.spec.grid)})
    found = search(lengths, limit_s=_SEARCH_S / (2 * len(lengths)))
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, found)
    return path


def _lines(structure: StructureSpec, grid: GridSpec) -> Iterator[int]:
    """Lengths of the lines that are transformed: of the supercell and, where the grid repeats with it, of a cell."""
    for points, cells in zip(structure.grid_yx(grid), structure.repeat_xy[::-1], strict=True):
        yield points
        if points % cells == 0:
            yield points // cells


_used: list[Path] = []


def use_wisdom(dataset: Path) -> None:
    """Plan as this data set's wisdom says, from now on in this process; by estimates where it has none.

    Raises DamagedDataError for a file that FFTW does not understand.
    """
    path = dataset / FOLDER / host_kind()
    if _used == [path]:
        return
    try:
        content = read_plain(path)
    except FileNotFoundError:
        content = b""
    if not content and not _used:
        return
    from exitwave.simulate.transforms import set_wisdom

    if not set_wisdom(content):
        raise DamagedDataError(
            f"{path}: FFTW does not understand this wisdom. Remove the file and give the same command again: it is "
            "made anew, and samples made from then on may differ in their last bits from those before"
        )
    _used[:] = [path]
