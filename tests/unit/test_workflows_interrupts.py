"""The first signal lets work finish what is in hand where it can, and cuts it where it cannot."""

from __future__ import annotations

import os
import signal

import pytest

from exitwave.ingest.errors import InterruptedRunError
from exitwave.workflows.interrupts import Interrupts
from exitwave.workflows.session import open_session


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_work_that_nobody_can_finish_early_is_cut(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.finishing("the shard in hand"):
            pass
        os.kill(os.getpid(), number)
    assert interrupts.stop.is_set() and signal.getsignal(number) == before
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
