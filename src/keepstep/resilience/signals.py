"""Stop on request: a signal sets a flag that the loop polls; nothing happens inside the handler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from keepstep.core.endings import ONE_REQUEST_S
from keepstep.core.errors import UsageError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers, people, Slurm's early warning and a terminal that goes away send."""

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable, known from torchrun: seconds between a stop request and the kill. Our charts and scripts set it
from how long the scheduler waits."""
SHUTDOWN_S = 540.0
"""Where nothing says how long: a step and a save must fit."""


def shutdown_s(environment: Mapping[str, str] = os.environ) -> float:
    """How long processes that were asked to stop may take for it."""
    text = environment.get(SHUTDOWN_VARIABLE) or str(SHUTDOWN_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # A comparison that NaN fails as well.
    if not seconds > 0:
        raise UsageError(f"{SHUTDOWN_VARIABLE} is {text!r}, but it must be seconds", f"{SHUTDOWN_VARIABLE}=540")
    return seconds


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The stop signals that count here: a run under `nohup` is told to outlive its terminal."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignores_hangup)


class Patience:
    """Whether a person who pressed Ctrl-C has pressed it again, and does not want to wait for the save."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self.lost = False

    def hear(self, number: int) -> None:
        """Take note of a signal. What comes right after the first is the same request, told twice by a wrapper."""
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        self._asked_at = now if self._asked_at is None else self._asked_at
        self.lost = now - self._asked_at >= ONE_REQUEST_S


class StopFlag:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.signal_name = ""
        self._asked_at = 0.0
        self._patience = Patience()

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return bool(self.signal_name)

    @property
    def asked_s_ago(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return time.monotonic() - self._asked_at if self.requested else 0.0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._patience.hear(number)
        if self._patience.lost:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()
        self.signal_name = signal.Signals(number).name


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Listen for stop signals for the length of a run, then give the old handlers back."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag._handle) for number in heeded_signals()}
    # Whoever started us may have held signals back for itself, and a process inherits that.
    held_back = signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    try:
        yield flag
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        for number, handler in before.items():
            signal.signal(number, handler)
