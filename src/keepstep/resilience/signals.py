"""Stop on request: a signal sets a flag that the loop polls; the handler does nothing else."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from keepstep.core.errors import UsageError
from keepstep.core.interrupts import ONE_REQUEST_S
from keepstep.core.messages import invalid_value

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers, Ctrl-C, Slurm's early warning and a closed terminal send."""

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable, known from torchrun: seconds between a stop request and the kill. Our charts and scripts derive
it from the scheduler's grace period."""
SHUTDOWN_S = 540.0
"""The default: a step and a save must fit."""


def shutdown_s(environment: Mapping[str, str] = os.environ) -> float:
    """How long processes may take to stop after a request."""
    text = environment.get(SHUTDOWN_VARIABLE) or str(SHUTDOWN_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # Written so that NaN fails, too.
    if not seconds > 0:
        raise UsageError(invalid_value(SHUTDOWN_VARIABLE, text, "must be seconds"), f"{SHUTDOWN_VARIABLE}=540")
    return seconds


def active_stop_signals() -> tuple[signal.Signals, ...]:
    """The stop signals that this process reacts to: under `nohup` a run must outlive its terminal."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignores_hangup)


class SecondInterrupt:
    """Whether Ctrl-C was pressed a second time: stop now, without waiting for the save."""

    def __init__(self) -> None:
        self._first_at: float | None = None
        self.received = False

    def observe(self, number: int) -> None:
        """Take a signal into account. One right after the first is the same request, forwarded by a wrapper."""
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        self.received = now - self._first_at >= ONE_REQUEST_S


class StopFlag:
    """Whether this process was asked to stop."""

    notice: Callable[[int], str] | None = None
    """What to print on the first stop signal, by its number. An agent prints this for its processes."""

    def __init__(self) -> None:
        self.signal_name = ""
        self._asked_at = 0.0
        self._second_interrupt = SecondInterrupt()

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return bool(self.signal_name)

    @property
    def asked_s_ago(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return time.monotonic() - self._asked_at if self.requested else 0.0

    def _print_notice(self, received: int) -> None:
        """On a thread of its own: the handler itself runs only when the main thread leaves a long operation."""
        printed = False
        with open(received, "rb", buffering=0) as pipe:
            # To the end: Python complains about a signal that it cannot write into the pipe.
            while number := pipe.read(1):
                if number[0] in STOP_SIGNALS and not printed and self.notice is not None:
                    printed = True
                    with suppress(OSError):
                        print(self.notice(number[0]), file=sys.stderr, flush=True)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._second_interrupt.observe(number)
        if self._second_interrupt.received:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()
        self.signal_name = signal.Signals(number).name


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Handle stop signals for the length of a run, then restore the old handlers."""
    flag = StopFlag()
    with _handled(active_stop_signals(), flag._handle) as received:
        # The thread closes its end of the pipe when it reads the end of the pipe.
        threading.Thread(target=flag._print_notice, args=(received,), name="stop-notice", daemon=True).start()
        # The parent may have blocked signals for itself, and a child inherits its mask.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, active_stop_signals())
        try:
            yield flag
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class WaitInterruptedError(BaseException):
    """A signal during a wait. Not an Exception, so that handlers inside the wait do not catch it."""


class AgentSignals:
    """The stop signals that an agent has received."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.second_interrupt = SecondInterrupt()
        self.wakeup_fd = -1
        """Readable after a signal, so that a wait for processes ends immediately."""
        self._interruptible_wait = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Receive signals for the length of a block."""
        try:
            with _handled((*active_stop_signals(), signal.SIGQUIT), self._handle) as self.wakeup_fd:
                os.set_blocking(self.wakeup_fd, False)
                yield
        finally:
            os.close(self.wakeup_fd)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A wait between two attempts: no process runs that could react to a stop request, so it ends here."""
        self._interruptible_wait = True
        try:
            if self.numbers:
                raise WaitInterruptedError
            yield
        finally:
            self._interruptible_wait = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.numbers.append(number)
        self.second_interrupt.observe(number)
        if self._interruptible_wait:
            self._interruptible_wait = False
            raise WaitInterruptedError


@contextmanager
def _handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[int]:
    """Handle signals in a block. Gives the end of a pipe that receives the number of each; the caller closes it."""
    before = {number: signal.signal(number, handle) for number in numbers}
    received, written = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(written, False)
    wakeup_before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(written)
