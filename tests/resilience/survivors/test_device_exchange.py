"""Sums by a collective library that cannot notice a lost process: the connections do, and the collective is aborted."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.resilience.survivors.device_exchange import DeviceExchange
from keepstep.resilience.survivors.exchange import Exchange, InterruptedSumError, PeerLostError
from tests.patience import PATIENCE_S


class Stuck:
    """A group whose collective fails on demand, or never ends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started, self.aborted, self._error = threading.Event(), False, error

    def allreduce(self, _tensors: list[torch.Tensor]) -> Any:
        self.started.set()
        return self

    def is_completed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        assert self._error is not None
        raise self._error

    def abort(self) -> None:
        self.aborted = True


class Pair:
    """The exchange of the first of two members, and what the second one and the coordinator hold."""

    def __init__(self, group: Stuck) -> None:
        self.coordinator, control = socket.socketpair()
        ours, theirs = socket.socketpair()
        self.exchange = DeviceExchange(control, 0, {1: ours}, lambda _store, _rank, _size: group)
        # What it says about the store of the epoch.
        theirs.recv(1000)
        self.peer = Exchange(control, 1, {0: theirs})
        self._sockets = [self.coordinator, control]

    def close(self) -> None:
        for each in (self.exchange, self.peer, *self._sockets):
            each.close()


@pytest.fixture
def group() -> Stuck:
    return Stuck()


@pytest.fixture
def pair(group: Stuck) -> Iterator[Pair]:
    pair = Pair(group)
    yield pair
    pair.close()


def sum_and_then(pair: Pair, group: Stuck, action: Any) -> None:
    """Start a sum, with `action` while its collective is under way."""

    def other() -> None:
        pair.peer._wait_for_all()
        assert group.started.wait(30)
        action()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        pair.exchange.sum_(torch.ones(4, dtype=torch.int64))
    finally:
        thread.join()


def test_peer_lost_in_the_collective_aborts_it(pair: Pair, group: Stuck) -> None:
    with pytest.raises(PeerLostError) as caught:
        sum_and_then(pair, group, pair.peer.close)
    assert caught.value.peer == 1
    assert group.aborted
    assert pair.exchange.changed_numbers


def test_news_of_the_coordinator_abort_the_collective(pair: Pair, group: Stuck) -> None:
    with pytest.raises(InterruptedSumError):
        sum_and_then(pair, group, lambda: pair.coordinator.send(b"view"))
    assert group.aborted


def test_collective_that_fails_waits_for_the_coordinator() -> None:
    group = Stuck(RuntimeError("NCCL error: remote process exited"))
    pair = Pair(group)
    with pytest.raises(InterruptedSumError):
        sum_and_then(pair, group, lambda: None)
    assert group.aborted
    pair.close()


def test_peer_lost_before_the_collective_leaves_the_numbers(pair: Pair, group: Stuck) -> None:
    pair.peer.close()
    with pytest.raises(PeerLostError):
        pair.exchange.sum_(torch.ones(4, dtype=torch.int64))
    assert not group.started.is_set()
    assert not pair.exchange.changed_numbers


def test_small_sums_go_through_the_connections(pair: Pair, group: Stuck) -> None:
    own, other = np.array([3]), np.array([4])
    thread = threading.Thread(target=pair.peer.sum_, args=(other,))
    thread.start()
    pair.exchange.sum_(own)
    thread.join()
    assert (int(own[0]), int(other[0])) == (7, 7)
    assert not group.started.is_set()


@pytest.mark.slow
def test_replicas_that_are_killed_sum_in_new_groups() -> None:
    # In a process of its own: a fork of one with the threads of other tests' groups would hang.
    words = [
        sys.executable,
        "-m",
        "tests.resilience.survivors.protocol_kills",
        "--collective",
        "--kills",
        "3",
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert json.loads(done.stdout) == {"protocol_kills": 3, "protocol_mismatches": 0}
