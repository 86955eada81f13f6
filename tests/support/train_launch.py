"""Starts a training of real ranks, each a process of its own, under torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("train_rank.py")

# The learning rate is small: in float32 a difference of rounding size now and then decides a ReLU or a maximum the
# other way, which changes a gradient by far more than rounding, and large steps carry that on. FP64_SPEC leaves no
# such room.
# Small enough for many runs, with every part in use: dropout, augmentation, noise, uneven batches (10 over 3 ranks).
SPEC: dict[str, Any] = {
    "model": {"preset": "tiny", "growth": 4, "stem": [16], "dropout": 0.1},
    "data": {"detector_bin": 8},
    "batch": 10,
    "steps": 50,
    "seed": 11,
    "optimizer": {"lr": 1e-4, "warmup_steps": 5},
    "checkpoint": {"every_steps": 10, "keep": 2},
    "engine": {"timeout_s": 60},
    "trackers": [],
}

# A learning rate as people use it: the loss falls to a fraction within the 50 steps.
FP64_SPEC: dict[str, Any] = {**SPEC, "precision": "fp64", "optimizer": {"lr": 2e-3, "warmup_steps": 5}}


def start(ranks: int, job: dict[str, Any]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={job.pop('max_restarts', 0)}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(RANK)]
    job = {**job, "data": str(job["data"]), "out": str(job["out"])}
    return subprocess.Popen(
        [*command, json.dumps(job)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def launch(ranks: int, **job: Any) -> tuple[int, str]:
    """Runs to the end: (exit code of torchrun, everything printed)."""
    process = start(ranks, job)
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"did not end within 120 s:\n{output}") from None
    return process.returncode, output


def launch_plain(ranks: int, **job: Any) -> tuple[list[int], str]:
    """The same ranks as bare processes: (their exit codes, all they printed).

    Nobody ends a rank because another failed, as torchrun does, so each has its say.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {**job, "data": str(job["data"]), "out": str(job["out"])}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(job)],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "".join(outputs)
