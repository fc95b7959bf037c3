"""One tree of errors: each says what went wrong, how to mend it, and the exit code a script can branch on.

A `KeepstepError` is the user's to mend and is printed without a traceback; anything else is our own bug.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_PREFLIGHT = 3
EXIT_DATA = 4
EXIT_HARDWARE = 5
EXIT_STOPPED = 75
"""Saved and stopped on request: start the same command again and it goes on (EX_TEMPFAIL)."""


class KeepstepError(Exception):
    """A mistake or a fault that the user can mend; `hint` says how."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def lines(self) -> list[str]:
        """What the command line prints, one `error:` line and perhaps a `hint:` line."""
        lines = [f"error: {self.message}"]
        if self.hint:
            lines.append(f" hint: {self.hint}")
        return lines


class UsageError(KeepstepError):
    """The command line itself is wrong."""

    exit_code = EXIT_CONFIG


class RunTakenError(UsageError):
    """Another process trains in the run's folder."""


class ConfigError(KeepstepError):
    """All that is wrong with a configuration, reported at once."""

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
    """Training data is missing, damaged or not what it claims to be."""

    exit_code = EXIT_DATA


class NothingToReadError(DataError):
    """A run cannot begin: its data is not where it should be, or not what it should be. Another attempt is no use."""


class HardwareError(KeepstepError):
    """A device, a host or the network between them is not usable."""

    exit_code = EXIT_HARDWARE


class DivergedError(KeepstepError):
    """The numbers of the run went wrong and stayed wrong: starting it again would only repeat that."""


class CheckpointError(KeepstepError):
    """A checkpoint cannot be written, or cannot be trusted."""


class StateMismatchError(CheckpointError):
    """A checkpoint is whole, but it is not one of this state: no other attempt will find it fitting."""

    exit_code = EXIT_CONFIG


class StopRequested(KeepstepError):  # noqa: N818 - not a fault: the run was asked to stop and did
    """The run saved and stopped because it was asked to."""

    exit_code = EXIT_STOPPED

    def lines(self) -> list[str]:
        """No `error:`: nothing went wrong."""
        return [line.removeprefix("error: ") for line in super().lines()]
