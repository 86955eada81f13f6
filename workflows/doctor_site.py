"""What `exitwave doctor` asks of a site: direct reads, shared file systems, Slurm, GPUs, certificates, a browser."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = [
    "Check",
    "check_browser",
    "check_direct_io",
    "check_files",
    "check_gpu",
    "check_shared_locks",
    "check_slurm",
    "check_tls",
]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at; `state` is ok, warn or fail."""

    name: str
    state: str
    found: str
    hint: str = ""


def check_direct_io(folder: Path) -> Check:
    """Whether the file system reads past the page cache, as benchmarks of cold reads want to."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".exitwave-doctor-") as name:
        path = Path(name) / "a"
        path.write_bytes(b"x" * 8192)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            return Check(
                name="O_DIRECT",
                state="warn",
                found=f"not possible here: {error.strerror}",
                hint="Nothing is lost: reads go through the page cache. Benchmarks of cold reads want another disk.",
            )
        try:
            with mmap.mmap(-1, 8192) as aligned:
                count = os.preadv(descriptor, [aligned], 0)
        finally:
            os.close(descriptor)
    return Check(name="O_DIRECT", state="ok", found=f"{count} bytes read past the page cache")


def check_shared_locks(folder: Path) -> Check:
    """Whether the file system is one that several hosts share: there, locks of one host must be seen by the others."""
    kind, source = _file_system(folder)
    shared = kind in ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.sshfs", "9p")
    if shared:
        return Check(
            name="file system",
            state="warn",
            found=f"{kind} ({source}), shared by hosts",
            hint="Good for data sets; give a local disk as --cache. Mount it with locks (lustre: flock).",
        )
    return Check(name="file system", state="ok", found=f"{kind} ({source})")


def _file_system(folder: Path) -> tuple[str, str]:
    """Type and device of the mount that holds the folder."""
    here = str(folder.resolve())
    best = ("", "unknown", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, place, kind, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        inside = here == place or here.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best[0]):
            best = (place, kind, source)
    return best[1], best[2]


def check_files(folder: Path) -> Check:
    """Open files that a process may have: a scheduler holds some for each worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files a process (at most {hard})"
    if soft < 1024:
        return Check(name="open files", state="warn", found=found, hint="`ulimit -n 4096` before large clusters.")
    return Check(name="open files", state="ok", found=found)


def check_slurm(folder: Path) -> Check:
    """The commands of Slurm, and whether its controller answers."""
    tools = {name: shutil.which(name) for name in ("sbatch", "squeue", "scancel", "srun")}
    there = [name for name, path in tools.items() if path]
    if not there:
        return Check(name="slurm", state="ok", found="none found; none is needed (--cluster local)")
    if missing := [name for name, path in tools.items() if not path]:
        hint = "Put Slurm's folder of commands on PATH (`module load slurm` on many sites)."
        return Check(name="slurm", state="warn", found=f"{', '.join(missing)} missing", hint=hint)
    try:
        done = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess([], 1, "", "squeue says nothing for 20 s")
    if done.returncode != 0:
        told = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        hint = "The controller of Slurm does not answer; --cluster slurm waits until it does."
        return Check(name="slurm", state="warn", found=told, hint=hint)
    extra = _version("dask-jobqueue")
    found = f"squeue answers; dask-jobqueue {extra or 'is not installed'}"
    hint = "" if extra else "Needed for --cluster slurm-allocation alone: pip install 'exitwave[slurm]'."
    return Check(name="slurm", state="ok", found=found, hint=hint)


def check_tls(folder: Path) -> Check:
    """This user's certificates for encrypted clusters."""
    place = Path.home() / ".config" / "exitwave" / "tls"
    if _version("cryptography") is None:
        hint = "pip install 'exitwave[slurm]' for tls:// and --cluster slurm."
        return Check(name="tls", state="warn", found="cryptography is not installed", hint=hint)
    key = place / "key.pem"
    if not key.exists():
        return Check(name="tls", state="ok", found="no certificates yet; they are made when first needed")
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        return Check(name="tls", state="fail", found=f"{key} can be read by others", hint=f"chmod 600 {key}")
    return Check(name="tls", state="ok", found=f"certificates in {place}, readable by you alone")


def check_gpu(folder: Path) -> Check:
    """GPUs that the driver shows, and whether what uses them is installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check(name="gpu", state="ok", found="none found; none is needed")
    query = ["--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return Check(name="gpu", state="warn", found="nvidia-smi says nothing for 30 s", hint="Ask whose node it is.")
    if done.returncode != 0 or not done.stdout.strip():
        return Check(name="gpu", state="warn", found="nvidia-smi finds no GPU", hint="None is needed.")
    names = "; ".join(done.stdout.strip().splitlines())
    missing = [name for name in ("dask-cuda", "cupy") if not any(map(_version, _names_of(name)))]
    hint = f"For simulations on GPUs (--cluster cuda) install {' and '.join(missing)}." if missing else ""
    return Check(name="gpu", state="ok", found=names, hint=hint)


def _names_of(package: str) -> tuple[str, ...]:
    return ("cupy-cuda13x", "cupy-cuda12x", "cupy") if package == "cupy" else (package,)


def check_browser(folder: Path) -> Check:
    """Chromium, by which the dashboard's page is tested; nobody else needs it."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            driver = shutil.which("chromedriver") is not None
            found = f"{name}, {'with' if driver else 'without'} chromedriver"
            hint = "" if driver else "The tests of the dashboard's page are left out: install chromium-driver."
            return Check(name="chromium", state="ok", found=found, hint=hint)
    hint = "Only the tests of the dashboard's page need it: apt-get install chromium chromium-driver."
    return Check(name="chromium", state="ok", found="none found; none is needed to use exitwave", hint=hint)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
