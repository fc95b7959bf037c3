"""All errors of keepstep. Each has a message, a hint and an exit code that scripts can test.

A `KeepstepError` is printed without a traceback, because the user can fix it. Anything else is our own bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_PREFLIGHT = 3
EXIT_DATA = 4
EXIT_HARDWARE = 5
EXIT_STORAGE_FULL = 6
"""No room to save: free some space and start the same command again."""
EXIT_STOPPED = 75
"""Saved and stopped on request: the same command resumes (EX_TEMPFAIL)."""


class KeepstepError(Exception):
    """An error that the user can fix; `hint` says how."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def lines(self) -> list[str]:
        """The lines to print: `error:` and, if there is one, `hint:`."""
        lines = [f"error: {self.message}"]
        if self.hint:
            lines.append(f" hint: {self.hint}")
        return lines


@contextmanager
def malformed_as(kind: type[KeepstepError], what: str, hint: str | None = None) -> Iterator[None]:
    """Around the lines that parse a file: what Python and torch raise for values that do not fit becomes `kind`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        told = str(error) if isinstance(error, (TypeError, ValueError)) else repr(error)
        told = f"{error} is missing" if isinstance(error, KeyError) else told
        raise kind(f"{what}: {told[:200]}", hint) from error


class UsageError(KeepstepError):
    """The command line itself is wrong."""

    exit_code = EXIT_CONFIG


class RunTakenError(KeepstepError):
    """Another process trains in the run's folder, perhaps on another machine. A restart would only meet it again."""

    exit_code = EXIT_HARDWARE


class ConfigError(KeepstepError):
    """All errors of a configuration, reported together."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[KeepstepError] | str, hint: str | None = None) -> None:
        self.problems = [KeepstepError(problems, hint)] if isinstance(problems, str) else problems
        super().__init__("\n".join(problem.message for problem in self.problems), hint)

    def lines(self) -> list[str]:
        """Every problem with its own hint."""
        return [line for problem in self.problems for line in problem.lines()]


class PreflightError(KeepstepError):
    """A check before the run failed."""

    exit_code = EXIT_PREFLIGHT


class DataError(KeepstepError):
    """Training data is missing, damaged or inconsistent."""

    exit_code = EXIT_DATA


class NothingToReadError(DataError):
    """The data of a run is missing or unusable, so the run cannot start. A retry does not help."""


class DataAccessError(DataError):
    """A file is missing or may not be read. A retry helps only where it was readable before."""


class HardwareError(KeepstepError):
    """A device, a host or the network does not work."""

    exit_code = EXIT_HARDWARE


class DivergedError(KeepstepError):
    """Training diverged. A restart would only repeat that."""


class CheckpointError(KeepstepError):
    """A checkpoint cannot be written, or cannot be trusted. Only its subclasses for storage are worth a retry."""


class StorageError(CheckpointError):
    """The storage of checkpoints failed or did not answer. A retry may succeed."""


class StorageFullError(StorageError):
    """There is no room for a checkpoint; the same save succeeds once there is."""

    exit_code = EXIT_STORAGE_FULL

    def __init__(self, message: str, hint: str | None, needed_bytes: int, free_bytes: int | None) -> None:
        super().__init__(message, hint)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        """None where only the failed write told that the disk is full."""

    @property
    def room(self) -> dict[str, int | None]:
        """For an event."""
        return {"needed_bytes": self.needed_bytes, "free_bytes": self.free_bytes}


class NotSavedError(KeepstepError):
    """A step that must be on disk is not, after all retries. The same command would only wait again."""

    def __init__(self, message: str, hint: str | None, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class MissingCheckpointError(CheckpointError):
    """The checkpoint that the configuration names does not exist."""

    exit_code = EXIT_CONFIG


class StateMismatchError(CheckpointError):
    """A checkpoint is complete, but belongs to another model or layout. A retry does not help."""

    exit_code = EXIT_CONFIG


class StopRequested(KeepstepError):  # noqa: N818 - not an error: the run stopped on request
    """The run saved and stopped on request."""

    exit_code = EXIT_STOPPED

    def lines(self) -> list[str]:
        """No `error:`: nothing went wrong."""
        return [line.removeprefix("error: ") for line in super().lines()]
