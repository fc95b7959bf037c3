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
"""What comes within this time is one request: `timeout` sends SIGTERM to its command and to the command's group, and a
wrapper passes on the Ctrl-C that its command has had from the terminal."""


class AskedToEnd(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a terminal that went away."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_of(error: KeyboardInterrupt) -> int:
    """What shells show for a process that the signal has ended."""
    return 128 + (error.number if isinstance(error, AskedToEnd) else signal.SIGINT)


@contextmanager
def ending_as_interrupt(*, until_exit: bool = False) -> Iterator[None]:
    """Raise `AskedToEnd` on SIGTERM and SIGHUP, where they would end the process and nobody else takes care of them.

    A request that comes twice, Ctrl-C's too, is heard once: the second would cut short what the first has cleared away.
    With `until_exit` the process ends with its command, and an interrupted one clears away until it is gone.

    What fails after an interrupt, Ctrl-C's too, failed because of it: libraries that are interrupted while they are
    imported go on half imported, and stumble over that.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _ENDINGS if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]
    owner, asked_at = os.getpid(), -ONE_REQUEST_S
    interrupts: list[KeyboardInterrupt] = []

    def ask(error: KeyboardInterrupt) -> None:
        nonlocal asked_at
        now = time.monotonic()
        # Counted from the request that was heard: whoever presses Ctrl-C again and again gets through.
        if now - asked_at >= ONE_REQUEST_S:
            asked_at = now
            interrupts.append(error)
            raise error

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:
            # A forked process has the handler, but none of what is to be cleared away.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        ask(AskedToEnd(number))

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
                signal.signal(signal.SIGINT, signal.default_int_handler)
