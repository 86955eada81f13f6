"""`exitwave doctor`: does this machine have what exitwave needs? Each check says what it found and how to mend it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from exitwave.workflows.config import environment_value
from exitwave.workflows.doctor_site import (
    Check,
    check_browser,
    check_direct_io,
    check_files,
    check_gpu,
    check_shared_locks,
    check_slurm,
    check_tls,
)
from exitwave.workflows.progress import human_bytes, human_seconds
from exitwave.workflows.provenance import host_facts, versions

__all__ = ["Check", "examine"]


def examine(folder: Path) -> dict[str, Any]:
    """All checks; `folder` is where data would be written."""
    checks: list[Check] = []
    for name, look in _CHECKS:
        try:
            checks.append(look(folder))
        except Exception as error:
            checks.append(Check(name=name, state="fail", found=f"{type(error).__name__}: {error}", hint=_REINSTALL))
    return {
        "ok": all(c.state != "fail" for c in checks),
        "host": host_facts(),
        "versions": versions(),
        "checks": [asdict(c) for c in checks],
    }


_REINSTALL = "Install exitwave anew: pip install -c constraints.txt -e ."


def _python(folder: Path) -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    ok = sys.version_info >= (3, 11)
    return Check(name="python", state="ok" if ok else "fail", found=found, hint="" if ok else "exitwave needs 3.11.")


def _packages(folder: Path) -> Check:
    have = versions()
    missing = [name for name, version in have.items() if version == "not installed"]
    found = ", ".join(f"{k} {v}" for k, v in have.items() if k != "python")
    return Check(name="packages", state="fail" if missing else "ok", found=found, hint=_REINSTALL if missing else "")


def _dask(folder: Path) -> Check:
    a, b = metadata.version("dask"), metadata.version("distributed")
    same = a == b
    hint = "" if same else f"pip install dask=={b}: the two are released together and must match."
    return Check(name="dask", state="ok" if same else "fail", found=f"dask {a}, distributed {b}", hint=hint)


def _cores(folder: Path) -> Check:
    import psutil

    usable = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    found = f"{usable} usable cores, {human_bytes(memory.available)} of {human_bytes(memory.total)} memory free"
    if memory.available < 1e9 * usable:
        return Check(
            name="cores",
            state="warn",
            found=found,
            hint="About 1 GB a worker is wanted; use fewer with --workers.",
        )
    return Check(name="cores", state="ok", found=found)


def _threads(folder: Path) -> Check:
    value = environment_value("OMP_NUM_THREADS")
    found = (
        f"OMP_NUM_THREADS={value}" if value else "OMP_NUM_THREADS is not set; workers limit themselves to one thread"
    )
    if value and not value.split(",")[0].isdigit():
        return Check(name="threads", state="warn", found=found, hint="Expected a number; unset it.")
    return Check(name="threads", state="ok", found=found)


def _fft(folder: Path) -> Check:
    import numpy as np
    from scipy import fft

    try:
        version = metadata.version("pyFFTW")
    except metadata.PackageNotFoundError:
        return Check(name="fft", state="fail", found="pyFFTW is not installed", hint=_REINSTALL)
    import pyfftw

    from exitwave.simulate.abtem_backend import configure_abtem

    effort = str(configure_abtem().config.get("fftw.planning_effort"))
    data = np.ones((256, 256), dtype=np.complex64)
    own, result = (pyfftw.empty_aligned(data.shape, dtype="complex64") for _ in range(2))
    transform = pyfftw.FFTW(own, result, axes=(0, 1), flags=("FFTW_ESTIMATE",), threads=1)
    own[:] = data
    quick = {"pyFFTW": _fastest_ms(transform), "scipy": _fastest_ms(lambda: fft.fft2(data))}
    found = f"pyFFTW {version}, planned with {effort}; 256² in " + ", ".join(
        f"{v:.2f} ms ({k})" for k, v in quick.items()
    )
    if effort != "FFTW_ESTIMATE":
        hint = "A measured plan differs from run to run in its last bits; exitwave should set FFTW_ESTIMATE."
        return Check(name="fft", state="warn", found=found, hint=hint)
    if quick["pyFFTW"] > 10:
        hint = "Simulations will be slow: is the machine busy, or throttled? `exitwave plan` says how long they take."
        return Check(name="fft", state="warn", found=found, hint=hint)
    return Check(name="fft", state="ok", found=found + " (the same bits on every run)")


def _fastest_ms(work: Callable[[], Any]) -> float:
    """The fastest of twenty calls, in milliseconds: what the machine can do when nobody disturbs it."""
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 1e3 * min(seconds)


def _disk(folder: Path) -> Check:
    usage = shutil.disk_usage(folder if folder.exists() else Path())
    found = f"{human_bytes(usage.free)} free of {human_bytes(usage.total)} at {folder.absolute()}"
    if usage.free < 1e9:
        return Check(
            name="disk", state="warn", found=found, hint="The quickstart needs about 100 MB, real work far more."
        )
    return Check(name="disk", state="ok", found=found)


def _writing(folder: Path) -> Check:
    """Write, sync and rename, as every commit does."""
    seconds = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".exitwave-doctor-") as name:
        for i in range(5):
            path = Path(name) / f"{i}.part"
            began = time.perf_counter()
            with path.open("wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            path.rename(Path(name) / f"{i}")
            seconds.append(time.perf_counter() - began)
    typical = sorted(seconds)[2]
    found = f"write, fsync and rename take {1e3 * typical:.2f} ms"
    if typical > 0.1:
        return Check(
            name="fsync",
            state="warn",
            found=found,
            hint="Slow to commit: use larger shards (samples_per_shard) or a local disk.",
        )
    return Check(name="fsync", state="ok", found=found)


def _locks(folder: Path) -> Check:
    """Two descriptors of one file: the second lock must be refused."""
    import fcntl

    with tempfile.TemporaryDirectory(dir=folder, prefix=".exitwave-doctor-") as name:
        path = Path(name) / "lock"
        with path.open("wb") as first, path.open("wb") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Check(name="locks", state="ok", found="flock keeps a second process out")
    return Check(
        name="locks",
        state="fail",
        found="flock does not exclude a second holder",
        hint="Mount the file system with locks, or keep data sets and runs on another one.",
    )


def _links(folder: Path) -> Check:
    """Shards get their final name by a hard link."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".exitwave-doctor-") as name:
        path = Path(name) / "a"
        path.write_bytes(b"x")
        try:
            (Path(name) / "b").hardlink_to(path)
        except OSError as error:
            return Check(
                name="hard links",
                state="fail",
                found=f"not possible here: {error.strerror}",
                hint="Choose a folder on a file system with hard links (not FAT, exFAT or some FUSE mounts).",
            )
    return Check(name="hard links", state="ok", found="possible")


def _ports(folder: Path) -> Check:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            pass
    found = f"127.0.0.1 answers (tried port {port})"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return Check(
            name="ports",
            state="warn",
            found=found + f"; the host's own name {socket.gethostname()!r} has no address",
            hint="Fine on one machine; on several, put the name into DNS or /etc/hosts.",
        )
    return Check(name="ports", state="ok", found=found)


def _gloo(folder: Path) -> Check:
    """A process group of one: what training ranks need to find each other."""
    import subprocess

    script = (
        "import torch, torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, "
        "world_size=1); "
        "t = torch.ones(4); d.all_reduce(t); assert t.sum() == 4; print(torch.get_num_threads()); "
        "d.destroy_process_group()"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    took = time.perf_counter() - began
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(
            name="torch",
            state="fail",
            found=f"a gloo process group cannot be made: {last}",
            hint="Check that torch is whole (pip install --force-reinstall torch) and that 127.0.0.1 is reachable.",
        )
    found = (
        f"torch {metadata.version('torch')}, gloo works, {done.stdout.strip()} threads, {human_seconds(took)} to start"
    )
    return Check(name="torch", state="ok", found=found)


_CHECKS: tuple[tuple[str, Callable[[Path], Check]], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("dask", _dask),
    ("cores", _cores),
    ("threads", _threads),
    ("fft", _fft),
    ("disk", _disk),
    ("file system", check_shared_locks),
    ("fsync", _writing),
    ("O_DIRECT", check_direct_io),
    ("locks", _locks),
    ("hard links", _links),
    ("ports", _ports),
    ("torch", _gloo),
    ("open files", check_files),
    ("gpu", check_gpu),
    ("slurm", check_slurm),
    ("tls", check_tls),
    ("chromium", check_browser),
)
