"""Plans searched for once and kept with the data set: whole, the same bits in every process, refused when damaged."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sim_samples import plan, sample, single_atom

from exitwave.ingest.errors import DamagedDataError
from exitwave.simulate import transforms, wisdom
from exitwave.simulate.simulator import simulate_sample

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from sim_samples import sample, single_atom
from exitwave.simulate.simulator import simulate_sample
from exitwave.simulate.wisdom import use_wisdom
use_wisdom(Path(sys.argv[1]))
cbed = simulate_sample(sample(single_atom()), simulator="fast").arrays["cbed"]
import hashlib
print(hashlib.sha256(cbed.tobytes()).hexdigest())
"""


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield
    transforms.set_wisdom(b"")
    wisdom._used.clear()


def test_a_long_campaign_gets_wisdom_once_and_a_short_one_none(tmp_path: Path) -> None:
    short = plan()
    assert wisdom.make_wisdom(short, tmp_path) is None and not (tmp_path / wisdom.FOLDER).exists()
    path = wisdom.make_wisdom(replace(short, core_seconds=1e4), tmp_path)
    assert path is not None and [p.name for p in path.parent.iterdir()] == [wisdom.host_kind()]
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert wisdom.make_wisdom(replace(short, core_seconds=1e4), tmp_path) == path
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.long
def test_every_process_plans_by_it_to_the_bit(tmp_path: Path) -> None:
    spec = sample(single_atom())
    folder = tmp_path / wisdom.FOLDER
    folder.mkdir()
    (folder / wisdom.host_kind()).write_bytes(transforms.search(sorted(set(spec.grid_yx)), limit_s=0.5))
    support = str(Path(__file__).parent.parent / "support")
    found = {
        subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path), support], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    import hashlib

    wisdom.use_wisdom(tmp_path)
    cbed = simulate_sample(spec, simulator="fast").arrays["cbed"]
    assert found == {hashlib.sha256(cbed.tobytes()).hexdigest() + "\n"}


def test_without_wisdom_plans_are_estimated_again(tmp_path: Path) -> None:
    spec = sample(single_atom())
    first = simulate_sample(spec, simulator="fast").arrays["cbed"].tobytes()
    assert transforms.set_wisdom(transforms.search(sorted(set(spec.grid_yx)), limit_s=0.5))
    simulate_sample(spec, simulator="fast")
    wisdom._used[:] = [tmp_path / "another"]
    wisdom.use_wisdom(tmp_path)
    assert transforms.planned_with() == b""
    assert simulate_sample(spec, simulator="fast").arrays["cbed"].tobytes() == first


def test_damaged_wisdom_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / wisdom.FOLDER
    folder.mkdir()
    (folder / wisdom.host_kind()).write_bytes(b"(fftw-3.3 nonsense")
    with pytest.raises(DamagedDataError, match="Remove the file"):
        wisdom.use_wisdom(tmp_path)
