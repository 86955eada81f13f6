"""The errors that exitwave shows to people, each with the exit code of the command that meets it.

They live in the lowest layer so that every other one can raise them. A message names what was wrong (file, line, key,
shard, rank or sample), what was expected, and what to do; the command line prints it without a traceback.
"""

from __future__ import annotations

__all__ = ["DamagedDataError", "ExitwaveError", "InterruptedRunError", "UsageError"]


class ExitwaveError(Exception):
    """Something went wrong that a person can act on. Exit code 1 unless a subclass says otherwise."""

    exit_code = 1


class UsageError(ExitwaveError):
    """A wrong command, configuration, file or data set; nothing was started. Exit code 2."""

    exit_code = 2


class DamagedDataError(ExitwaveError):
    """Data that should be whole is not, or parts of a run failed for good. Exit code 3."""

    exit_code = 3


class InterruptedRunError(ExitwaveError):
    """The run stopped before its end and resumes when called again (Ctrl-C, SIGTERM, disk full). Exit code 75."""

    exit_code = 75
