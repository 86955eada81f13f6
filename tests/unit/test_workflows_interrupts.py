"""The first signal lets work finish what is in hand where it can, and cuts it where it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exitwave.ingest.errors import InterruptedRunError
from exitwave.workflows.interrupts import Interrupts
from exitwave.workflows.session import open_session

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_put_back() -> Iterator[None]:
    """A process that was told to stop keeps its handlers to its end; these tests go on."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_work_that_nobody_can_finish_early_is_cut(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.finishing("the shard in hand"):
            pass
        os.kill(os.getpid(), number)
    assert interrupts.stop.is_set()
    assert ": stopping.\n" in capfd.readouterr().err


def test_what_is_cut_is_told_as_an_interruption() -> None:
    with pytest.raises(InterruptedRunError), open_session():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("patient", [False, True])
def test_work_that_looks_at_stop_is_let_finish(patient: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts(patient=patient) as interrupts, interrupts.finishing("the shard in hand"):
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.stop.is_set()
        if patient:
            os.kill(os.getpid(), signal.SIGTERM)  # every signal is the first one
    assert capfd.readouterr().err.count("SIGTERM: finishing the shard in hand") == 1


def test_handlers_are_put_back_unless_told_to_stop() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Interrupts():
        assert signal.getsignal(signal.SIGHUP) != before
    assert signal.getsignal(signal.SIGHUP) == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
    with Interrupts():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_second_signal_while_the_verb_leaves_still_means_at_once() -> None:
    code = (
        "import os, signal\n"
        "from exitwave.workflows.session import open_session\n"
        "try:\n"
        "    with open_session():\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "finally:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_came_closed_lead_nowhere(closed: str) -> None:
    command = f"exec {sys.executable} -m exitwave.workflows inspect /nowhere --json {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


IMPORTING = """
import os, signal, sys
from exitwave.workflows.interrupts import Interrupts, cut_at_first_signal
if sys.argv[1] == "early":
    cut_at_first_signal()
try:
    with Interrupts() if sys.argv[1] == "late" else open(os.devnull):
        exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")  # as a data class does that is being imported
except KeyboardInterrupt:
    sys.exit(75)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_an_interruption_within_an_import_keeps_its_exit_code(when: str, tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text(IMPORTING)
    command = [sys.executable, "-m", "importing", when]  # run by -m, Python looks for the mark at its end
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
