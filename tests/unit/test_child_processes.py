"""What a process gives to those it starts, and asks of its system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = """
import json, os
from exitwave.workflows.config import child_environment, rank_threads
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")  # as a Dask nanny does
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ELSE"] = "kept"
child = child_environment(MORE="too", **rank_threads(2, 8))
print(json.dumps({name: child.get(name) for name in ("MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "ELSE", "MORE")}))
"""


@pytest.mark.parametrize(
    ("users", "trim", "threads"),
    [({}, None, "4"), ({"OMP_NUM_THREADS": "3", "MALLOC_TRIM_THRESHOLD_": "9"}, "9", "3")],
)
def test_ranks_inherit_what_the_user_set_and_not_what_dask_did(
    users: dict[str, str], trim: str | None, threads: str
) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")}
    said = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT], capture_output=True, text=True, check=True, env=clean | users
    ).stdout
    expected = {"MALLOC_TRIM_THRESHOLD_": trim, "OMP_NUM_THREADS": threads, "ELSE": "kept", "MORE": "too"}
    assert json.loads(said) == expected


FAULTS = """
import resource, sys
import numpy as np
from exitwave.ingest.processes import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def turn():
    np.ones(1 << 20)  # 8 MiB: 2048 pages
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_used_again_without_faulting_it_in() -> None:
    dask = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "THP_MEM_ALLOC_ENABLE": "0"}
    faults = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, env=dask
            ).stdout
        )
        for how in ("keep", "give-back")
    }
    assert faults["keep"] < 20 < faults["give-back"], faults


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="a kernel without autogroups")
def test_a_nicer_worker_stands_back_behind_other_sessions() -> None:
    code = "from exitwave.simulate.worker_child import _stand_back as back; back()"
    code += "; print(open('/proc/self/autogroup').read())"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, start_new_session=True,
        preexec_fn=lambda: os.nice(10),
    ).stdout  # fmt: skip
    assert said.split()[-1] == str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10))
