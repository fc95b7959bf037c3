"""Work that threads share: results in order, the first error, and no waiting for them when somebody interrupts."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from keepstep.core.threads import in_threads
from tests.patience import PATIENCE_S


def test_results_come_in_the_order_of_the_items() -> None:
    meet = threading.Barrier(3)

    def act(number: int) -> int:
        meet.wait(PATIENCE_S)
        return number * number

    assert in_threads(act, range(6), 3) == [0, 1, 4, 9, 16, 25]
    assert in_threads(act, [], 3) == []


def test_an_error_is_raised_and_nothing_more_is_begun() -> None:
    begun = []

    def act(number: int) -> None:
        begun.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        in_threads(act, range(5), 1)
    assert begun == [0]


def test_an_interrupt_does_not_wait_for_the_work() -> None:
    released = threading.Event()

    def act(_: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        in_threads(act, [0], 1)
    assert not released.is_set()
    released.set()
