"""Stop on request: a signal sets a flag that the loop polls; nothing happens inside the handler."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers, people, Slurm's early warning and a terminal that goes away send."""


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The stop signals that count here: a run under `nohup` is told to outlive its terminal."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignores_hangup)


class StopFlag:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.signal_name = ""
        self._asked_at = 0.0
        self._interrupts = 0

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return bool(self.signal_name)

    @property
    def asked_s_ago(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return time.monotonic() - self._asked_at if self.requested else 0.0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            # A second Ctrl-C: the person does not want to wait for the save.
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()
        self.signal_name = signal.Signals(number).name


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Listen for stop signals for the length of a run, then give the old handlers back."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag._handle) for number in heeded_signals()}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
