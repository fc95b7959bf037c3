"""Sums over members: the same numbers for everybody, through sockets and through shared memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from keepstep.resilience.survivors import exchange
from keepstep.resilience.survivors.exchange import Exchange, InterruptedSumError, PeerLostError
from keepstep.resilience.survivors.shared_numbers import Numbers, SharedNumbers, numbers_of

RANKS = 3


class Members:
    """Three members, a thread each; `coordinators` are the other ends of their control connections."""

    def __init__(self, shared: list[Numbers] | None = None) -> None:
        ends: list[dict[int, socket.socket]] = [{} for _ in range(RANKS)]
        for low in range(RANKS):
            for high in range(low + 1, RANKS):
                ends[low][high], ends[high][low] = socket.socketpair()
        controls = [socket.socketpair() for _ in range(RANKS)]
        self._sockets = [each for pair in controls for each in pair]
        self.coordinators = [there for _, there in controls]
        self.exchanges = [
            Exchange(controls[rank][0], rank, ends[rank], dict(enumerate(shared)) if shared else None)
            for rank in range(RANKS)
        ]

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._sockets, *self.exchanges):
            each.close()

    def sum(self, numbers: list[Numbers]) -> None:
        self.run([lambda rank=rank: self.exchanges[rank].sum_(numbers[rank]) for rank in range(RANKS)])

    @staticmethod
    def run(actions: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=action) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def random_numbers(count: int) -> list[Numbers]:
    return list(np.random.default_rng(count).integers(-(2**60), 2**60, (RANKS, count)))


@pytest.mark.parametrize("count", [1, exchange.FEW, exchange.FEW + 1, exchange.SLICE + 7])
def test_all_members_hold_the_sum(count: int) -> None:
    numbers = random_numbers(count)
    right = sum(numbers)
    with Members() as members:
        members.sum(numbers)
    assert all(np.array_equal(each, right) for each in numbers)


def test_shared_memory_gives_the_same_sums(tmp_path: Path) -> None:
    count = 3 * exchange.BLOCK + 5
    numbers = random_numbers(count)
    right = sum(numbers)
    memories = [SharedNumbers(str(tmp_path / f"replica-{rank}"), count) for rank in range(RANKS)]
    for memory, own in zip(memories, numbers, strict=True):
        memory.numbers[:] = own
    # What others open shows the same memory, and cannot change it.
    seen = numbers_of(str(tmp_path / "replica-1"))
    assert not seen.flags.writeable
    with Members([memory.numbers for memory in memories]) as members:
        members.sum([memory.numbers for memory in memories])
    assert all(np.array_equal(memory.numbers, right) for memory in memories)
    assert np.array_equal(seen, right)
    for memory in memories:
        memory.close()
    with pytest.raises(OSError, match="No such file"):
        numbers_of(str(tmp_path / "replica-1"))


def test_lost_member_is_named() -> None:
    with Members() as members:
        members.exchanges[2].close()
        with pytest.raises(PeerLostError) as caught:
            members.exchanges[0].sum_(np.ones(1, np.int64))
    assert caught.value.peer == 2


def test_coordinator_interrupts_a_sum() -> None:
    with Members() as members:
        members.coordinators[0].send(b"!")
        with pytest.raises(InterruptedSumError):
            members.exchanges[0].sum_(np.ones(1, np.int64))
