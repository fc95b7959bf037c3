"""The state on its way to a replica that joins: every bit arrives, or the copy starts over."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from keepstep.core.errors import UsageError
from keepstep.resilience.survivors import state_copy, wire
from keepstep.resilience.survivors.state_copy import Bytes, Receiver, Sender, part_bounds

SOURCES = 3
STATE = np.random.default_rng(0).integers(0, 256, 5_000_011, dtype=np.uint8)


class Copy:
    """Three members that send, and one that joins."""

    def __init__(self, folder: Path) -> None:
        self.listener = wire.listen(folder / "replica")
        self.control, self.coordinator = socket.socketpair()
        self.senders = [Sender(str(folder / "replica"), self._header(part), self._part(part)) for part in range(3)]
        self.receiver = Receiver(self.listener, self.control, lambda readable: readable, SOURCES, copy=7)

    def _header(self, part: int) -> wire.Message:
        return {"kind": "state", "copy": 7, "part": part, "step": 4}

    def _part(self, part: int) -> Bytes:
        return STATE[slice(*part_bounds(len(STATE), part, SOURCES))]

    def relay(self, step: int, sums: state_copy.Numbers) -> None:
        for part, sender in enumerate(self.senders):
            data = sums[slice(*part_bounds(len(sums), part, SOURCES))].view(np.uint8)
            sender.send({"kind": "sum", "step": step, "count": len(sums), "facts": {}}, data)

    def close(self) -> None:
        self.receiver.close()
        for sender in self.senders:
            sender.abandon()
        for each in (self.listener, self.control, self.coordinator):
            each.close()


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    copy = Copy(tmp_path)
    yield copy
    copy.close()


def test_all_parts_of_the_state_and_the_sums_arrive(copy: Copy) -> None:
    arrived = [np.zeros(size, np.uint8) for size in (1, 4_000_000, 1_000_010)]
    copy.receiver.receive_state([buffer.data for buffer in arrived])
    assert np.array_equal(np.concatenate(arrived), STATE)
    sums, into = np.arange(100_001), np.zeros(100_001, np.int64)
    copy.relay(5, sums)
    assert copy.receiver.next_sum(lambda _: into)["kind"] == "sum"
    assert copy.receiver.step == 5
    assert np.array_equal(into, sums)


def test_state_arrives_on_machines_without_xxhash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "_new_xxh3", None)
    copy, arrived = Copy(tmp_path), np.zeros(len(STATE), np.uint8)
    copy.receiver.receive_state([arrived.data])
    assert np.array_equal(arrived, STATE)
    copy.close()


def test_another_kind_of_checksum_is_an_error_with_a_remedy() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"state")
        wire.send(theirs, {"algorithm": "md5", "checksum": "0"})
        with pytest.raises(UsageError, match="sends its state with md5"):
            state_copy._receive_part(ours, [memoryview(bytearray(5))])


def test_members_that_went_back_make_the_copy_start_over(copy: Copy) -> None:
    copy.receiver.receive_state([np.zeros(len(STATE), np.uint8).data])
    copy.relay(4, np.arange(10))
    with pytest.raises(ConnectionError, match="went back"):
        copy.receiver.next_sum(lambda count: np.zeros(count, np.int64))


def test_wrong_bits_make_the_copy_start_over(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = socket.socket.recv_into

    def flipped(self: socket.socket, buffer: memoryview) -> int:
        count = receive(self, buffer)
        buffer[0] ^= 4
        return count

    monkeypatch.setattr("socket.socket.recv_into", flipped)
    with pytest.raises(ConnectionError, match="other bits"):
        copy.receiver.receive_state([np.zeros(len(STATE), np.uint8).data])


def test_coordinator_interrupts_the_copy(copy: Copy) -> None:
    copy.receiver.receive_state([np.zeros(len(STATE), np.uint8).data])
    wire.send(copy.coordinator, {"kind": "copy"})
    with pytest.raises(ConnectionError, match="starts over"):
        copy.receiver.next_sum(lambda count: np.zeros(count, np.int64))


def test_lost_member_makes_the_copy_start_over(copy: Copy) -> None:
    copy.receiver.receive_state([np.zeros(len(STATE), np.uint8).data])
    copy.senders[1].abandon()
    copy.relay(5, np.arange(10))
    with pytest.raises(ConnectionError):
        copy.receiver.next_sum(lambda count: np.zeros(count, np.int64))


def test_word_of_the_coordinator_that_was_read_before_ends_the_copy(tmp_path: Path) -> None:
    control, coordinator = socket.socketpair()
    with wire.listen(tmp_path / "replica") as listener, control, coordinator, pytest.raises(ConnectionError):
        Receiver(listener, control, lambda readable: not readable, SOURCES, copy=7)
