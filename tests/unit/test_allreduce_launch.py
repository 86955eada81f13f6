"""Ranks that torchrun started and that never met: each would train alone, without a word."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from exitwave.train import GroupedAllreduce
GroupedAllreduce(torch.nn.Linear(2, 1))
"""


def test_under_torchrun_a_process_group_is_asked_for() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}  # as torchrun sets them
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert 'call torch.distributed.init_process_group("gloo") before GroupedAllreduce' in done.stderr


def test_without_a_launcher_it_is_a_world_of_one_rank() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
