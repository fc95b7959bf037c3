"""A request to end, from whoever sends it, ends a command as Ctrl-C does: what it started and what it laid aside goes.

Left alone, SIGTERM and SIGHUP end Python on the spot, and no `finally` is heard: processes go on without their parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST_S = 1.0
"""What comes within this time is one request: `timeout` sends SIGTERM to its command and to the command's group."""


class AskedToEnd(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a terminal that went away."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_of(error: KeyboardInterrupt) -> int:
    """What shells show for a process that the signal has ended."""
    return 128 + (error.number if isinstance(error, AskedToEnd) else signal.SIGINT)


@contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Raise `AskedToEnd` on SIGTERM and SIGHUP, where they would end the process and nobody else takes care of them.

    What fails after an interrupt, Ctrl-C's too, failed because of it: libraries that are interrupted while they are
    imported go on half imported, and stumble over that.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _ENDINGS if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]
    owner, asked_at = os.getpid(), -ONE_REQUEST_S

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal asked_at
        if os.getpid() != owner:
            # A forked process has the handler, but none of what is to be cleared away.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        before, asked_at = asked_at, time.monotonic()
        if asked_at - before >= ONE_REQUEST_S:
            interrupts.append(AskedToEnd(number))
            raise interrupts[-1]

    interrupts: list[KeyboardInterrupt] = []

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        interrupts.append(KeyboardInterrupt())
        raise interrupts[-1]

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
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if takes_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
