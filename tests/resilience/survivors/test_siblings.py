"""Replicas of two processes at the coordinator: it hears them as one, and one that is gone takes the other with it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.coordinator import Coordinator
from tests.patience import PATIENCE_S


class Process:
    """One process of a replica, as far as the coordinator sees it."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, path: Path, number: int, rank: int, name: str = "first") -> None:
        self._connection = wire.connect(str(path))
        self._connection.settimeout(PATIENCE_S)
        self.opened.append(self._connection)
        own = {"number": number, "rank": rank, "size": 2, "name": name}
        self.say(kind="hello", address=f"{number}.{rank}", snapshot=-1, **own)

    def say(self, **message: Any) -> None:
        wire.send(self._connection, message)

    def hear(self) -> dict[str, Any]:
        return wire.receive(self._connection)

    def hears_nothing(self) -> bool:
        self._connection.settimeout(0.05)
        try:
            return not self._connection.recv(1)
        except TimeoutError:
            return True
        finally:
            self._connection.settimeout(PATIENCE_S)

    def end(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path / "membership", 2)
    yield coordinator
    coordinator.close()
    while Process.opened:
        Process.opened.pop().close()


def two_replicas(coordinator: Coordinator) -> dict[tuple[int, int], Process]:
    """All four processes, as members of the first epoch."""
    processes = {(n, r): Process(coordinator.path, n, r) for n in (0, 1) for r in (0, 1)}
    for process in processes.values():
        assert process.hear()["kind"] == "welcome"
        process.say(kind="ready", copy=0)
    for rank in (0, 1):
        assert processes[0, rank].hear()["joining"] == [[1, ["1.0", "1.1"]]]
        copy = processes[1, rank].hear()
        processes[1, rank].say(kind="copied", copy=copy["copy"], step=0)
    for process in processes.values():
        assert process.hear()["members"] == [[0, ["0.0", "0.1"]], [1, ["1.0", "1.1"]]]
    return processes


def prepare(processes: dict[tuple[int, int], Process], epoch: int, *skip: tuple[int, int]) -> None:
    for (number, rank), process in processes.items():
        if (number, rank) not in skip:
            process.say(kind="prepared", epoch=epoch, step=1, checksum=f"of shard {rank}")


def test_step_is_committed_when_every_process_has_prepared(coordinator: Coordinator) -> None:
    processes = two_replicas(coordinator)
    prepare(processes, 2, (1, 1))
    assert processes[0, 0].hears_nothing()
    prepare({(1, 1): processes[1, 1]}, 2)
    assert [process.hear()["kind"] for process in processes.values()] == ["commit"] * 4


def test_lost_process_takes_its_replica_and_the_others_redo_the_step(coordinator: Coordinator) -> None:
    processes = two_replicas(coordinator)
    prepare(processes, 2, (0, 1))
    processes.pop((1, 1)).end()
    assert processes.pop((1, 0)).hear()["kind"] == "evicted"
    assert [processes[0, rank].hear()["members"] for rank in (0, 1)] == [[[0, ["0.0", "0.1"]]]] * 2
    # What one of them has prepared before counts no more.
    prepare(processes, 3, (0, 0))
    assert processes[0, 1].hears_nothing()
    prepare(processes, 3, (0, 1))
    assert [processes[0, rank].hear()["kind"] for rank in (0, 1)] == ["commit"] * 2


def test_processes_of_a_lost_replica_and_its_successor_do_not_mix(coordinator: Coordinator) -> None:
    # Replicas are welcome when both are there.
    for rank in (0, 1):
        Process(coordinator.path, 0, rank)
    # The first process of a replica is gone before the second has connected.
    left_over = Process(coordinator.path, 1, 1)
    successor = Process(coordinator.path, 1, 0, name="second")
    assert successor.hears_nothing()
    left_over.end()
    assert successor.hears_nothing()
    other = Process(coordinator.path, 1, 1, name="second")
    assert [process.hear()["kind"] for process in (successor, other)] == ["welcome"] * 2


def test_shards_with_other_sums_evict_the_whole_replica(coordinator: Coordinator) -> None:
    processes = two_replicas(coordinator)
    prepare(processes, 2, (1, 1))
    processes[1, 1].say(kind="prepared", epoch=2, step=1, checksum="something else")
    assert [processes[1, rank].hear()["kind"] for rank in (0, 1)] == ["evicted"] * 2
    assert [processes[0, rank].hear()["kind"] for rank in (0, 1)] == ["view"] * 2
