"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that it stops its processes and removes its temporary files.

By default they end Python immediately without running `finally` blocks, and child processes stay behind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TERMINATION = (signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST_S = 1.0
"""Signals within this time count as one request: `timeout` sends SIGTERM to its command and again to the group, and a
wrapper forwards a Ctrl-C that the command already got from the terminal."""


class TerminationRequested(KeyboardInterrupt):
    """SIGTERM, or SIGHUP from a closed terminal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_of(error: KeyboardInterrupt) -> int:
    """The exit code that shells show for a process ended by this signal."""
    return 128 + (error.number if isinstance(error, TerminationRequested) else signal.SIGINT)


@contextmanager
def termination_as_interrupt(*, until_exit: bool = False) -> Iterator[None]:
    """Raise `TerminationRequested` on SIGTERM and SIGHUP, unless they have another handler.

    Repeated signals, also Ctrl-C, count as one request: a second exception would interrupt the cleanup of the first.
    With `until_exit` the handlers stay after an interrupt, because the process cleans up until it exits; after a
    command that ended by itself Ctrl-C is ignored.

    An error after an interrupt is replaced by the interrupt: a library that is interrupted during its import stays
    half imported and fails later.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _TERMINATION if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]
    owner, asked_at = os.getpid(), -ONE_REQUEST_S
    interrupts: list[KeyboardInterrupt] = []

    def ask(error: KeyboardInterrupt) -> None:
        nonlocal asked_at
        now = time.monotonic()
        # Counted from the last accepted request, so that repeated Ctrl-C gets through.
        if now - asked_at >= ONE_REQUEST_S:
            asked_at = now
            interrupts.append(error)
            raise error

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:
            # A forked process inherits the handler, but has nothing to clean up.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        ask(TerminationRequested(number))

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        ask(KeyboardInterrupt())

    for number in numbers:
        signal.signal(number, end)
    takes_interrupts = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_interrupts:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if interrupts:
            raise interrupts[-1] from None
        raise
    finally:
        if not (until_exit and interrupts):
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
            if takes_interrupts:
                # The command is done: Ctrl-C while Python exits must not change its exit code.
                signal.signal(signal.SIGINT, signal.SIG_IGN if until_exit else signal.default_int_handler)
