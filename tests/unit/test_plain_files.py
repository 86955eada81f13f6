"""A pipe, a socket or a device where a file should be is told; nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.events import EventLog, EventTail, read_events
from exitwave.ingest.files import FileLock, NotAPlainFileError, read_plain, read_plain_text
from exitwave.ingest.manifest import load_header, load_manifest
from exitwave.simulate.commands import read_commands
from exitwave.simulate.lease import told_epoch
from exitwave.train.run import read_saved
from exitwave.train.spec import TrainSpec
from exitwave.workflows.config import load_document
from exitwave.workflows.datasets import completeness
from exitwave.workflows.pipeline_folder import trained
from exitwave.workflows.service.access import load_token
from exitwave.workflows.training_seen import FollowedTraining

PACKAGES = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(tmp_path):  # a path of a socket is short
        made.bind("socket")
        for path in (Path("pipe"), Path("socket"), Path("/dev/zero"), Path("/dev/tty")):
            with contextlib.suppress(FileNotFoundError), pytest.raises(NotAPlainFileError, match="not a plain file"):
                read_plain(path)
    with pytest.raises(IsADirectoryError):
        read_plain_text(tmp_path)
    (tmp_path / "text").write_bytes("Å\r\n".encode())
    assert read_plain_text(tmp_path / "text") == "Å\n"


READERS: dict[str, Any] = {
    "events.jsonl": lambda folder: read_events(folder / "events.jsonl"),
    "manifest.jsonl": load_manifest,
    "manifest.jsonl ": load_header,
    "plan.yaml": lambda folder: load_document(folder / "plan.yaml"),
    "model.pt": read_saved,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_a_files_place_is_told(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name.strip())
    with pytest.raises((NotAPlainFileError, UsageError, DamagedDataError), match="plain file"):
        READERS[name](tmp_path)


def test_what_only_helps_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "commands").mkdir()
    for name in ("lease", "plan.json", "train.json", "events.jsonl", "status.json", "commands/1.json", ".lock"):
        os.mkfifo(tmp_path / name)
    assert told_epoch(tmp_path) == 0
    assert completeness(tmp_path) is None
    (tmp_path / "model.pt").touch()
    assert not trained(tmp_path, TrainSpec(epochs=1))  # its folder does not say what it was
    assert [command.verb for command in read_commands(tmp_path)] == [None]
    assert EventTail(tmp_path / "events.jsonl", from_end=False).read() == []
    assert not FollowedTraining(tmp_path).look().any
    assert not FileLock(tmp_path / ".lock").is_held()


def test_nothing_is_logged_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(UsageError, match="no plain file"):
        EventLog(tmp_path / "events.jsonl").emit("started")


def test_a_token_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(UsageError, match="no plain file"):
        load_token(tmp_path / "token")


def test_a_configuration_may_come_by_a_pipe_that_was_handed_over() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"name: a\n")
    os.close(theirs)
    assert load_document(f"/dev/fd/{ours}").data == {"name": "a"}
    os.close(ours)


def test_files_are_read_by_one_reader() -> None:
    """The whole kind: what reads a file of a folder of ours or of a person reads plain files alone."""
    allowed = re.compile(r"/proc/|resources\.files|limit\.read_text|thread / |handed_over|library:")
    strays = [
        f"{path.relative_to(PACKAGES)}:{number}: {line.strip()}"
        for package in ("ingest", "simulate", "train", "workflows")
        for path in sorted((PACKAGES / package).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\.read_(text|bytes)\(|\.open\((\"rb?\")?[,)]", line)
        and not allowed.search(line)
        and not path.name.startswith("bench")
        and "path.suffix" not in line
    ]
    assert strays == []
