"""A campaign from a script of the user's that lacks the guard of its main part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
from pathlib import Path
from sim_samples import plan
from exitwave.simulate import make_cluster, run_campaign
{guard}run_campaign(plan(simulator="weak-phase"), Path("data"), make_cluster("local", workers=1))
"""


@pytest.mark.long
@pytest.mark.parametrize("guarded", [False, True])
def test_a_script_without_a_guard_is_told(tmp_path: Path, guarded: bool) -> None:
    """Each worker process would import it, and start a campaign of its own."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__": ' if guarded else ""))
    support = str(Path(__file__).resolve().parent.parent / "support")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHONPATH": support, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if guarded:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "UsageError: --cluster local: no worker process could import" in last and "mine.py" in last
    assert "below `if __name__ ==" in last
    assert not (tmp_path / "data" / "manifest.jsonl").exists()
