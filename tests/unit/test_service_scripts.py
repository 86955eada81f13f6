"""The systemd unit and the Slurm script of docs/service.md, as far as they can be checked without either."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import line
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "service.md"


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def words_of_serve() -> set[str]:
    told = line.exitwave("serve", "--help")
    return set(re.findall(r"--[a-z]+(?:-[a-z]+)*", told.stdout))


def test_the_unit_says_what_the_service_needs(tmp_path):
    unit = block("ini")
    settings = dict(row.split("=", 1) for row in unit.splitlines() if "=" in row and not row.startswith("#"))
    assert settings["KillMode"] == "process"  # what the service started outlives it
    assert settings["Restart"] == "always"
    command = settings["ExecStart"].split()
    assert command[1] == "serve" and {w for w in command if w.startswith("--")} <= words_of_serve()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here: the unit was read as text")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "exitwave"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "exitwave.service"
    path.write_text(unit.replace("%h/exitwave/.venv/bin/exitwave", str(program)))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    told = [row for row in checked.stderr.splitlines() if "exitwave.service" in row]
    assert told == [], checked.stderr


def test_the_slurm_script_is_one(tmp_path):
    script = block("bash")
    path = tmp_path / "exitwave-serve.sh"
    path.write_text(script)
    assert subprocess.run(["bash", "-n", str(path)], timeout=20).returncode == 0
    lines = script.splitlines()
    directives = [row for row in lines if row.startswith("#SBATCH ")]
    assert lines[1 : 1 + len(directives)] == directives  # sbatch reads them only before the first command
    assert "#SBATCH --requeue" in directives and any(d.startswith("#SBATCH --signal=B:USR1@") for d in directives)
    command = next(row for row in lines if row.startswith("exitwave serve")).split()
    assert {word for word in command if word.startswith("--")} <= words_of_serve()


def test_the_slurm_script_ends_its_service_and_asks_for_itself_again(tmp_path):
    """With an `exitwave`, a `scontrol` and a `pkill` that write down that they were called."""
    home = tmp_path / "home"
    (home / "exitwave" / ".venv" / "bin").mkdir(parents=True)
    (home / "exitwave" / ".venv" / "bin" / "activate").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    (tmp_path / "bin").mkdir()
    serve = "trap 'echo ended >> told; exit 0' TERM\necho \"$@\" >> told\nwhile :; do sleep 0.05; done"
    for name, body in (("exitwave", serve), ("scontrol", "echo scontrol $@ >> told"), ("pkill", "echo pkill >> told")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    script = tmp_path / "exitwave-serve.sh"
    script.write_text(block("bash"))
    started = subprocess.Popen(
        ["bash", str(script)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "USER": "nobody", "SLURM_JOB_ID": "7"},
    )
    told = tmp_path / "told"
    try:
        import signal
        import time

        until = time.monotonic() + 20
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        started.send_signal(signal.SIGUSR1)
        started.wait(20)
        while "ended" not in told.read_text() and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        started.kill()
    assert told.read_text().splitlines()[0] == f"serve --root {home}/runs --port 8787"
    assert {"ended", "pkill", "scontrol requeue 7"} <= set(told.read_text().splitlines())
