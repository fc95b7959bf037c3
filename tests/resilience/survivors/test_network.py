"""Replicas over TCP, as between nodes: the same protocol, and strangers do not take part."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import StopRequested, UsageError
from keepstep.core.ranks import COORDINATOR, REPLICA_SECRET, NodeGroup
from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.control import EvictedError, RunOverError
from keepstep.resilience.survivors.coordinator import Coordinator, Network
from keepstep.resilience.survivors.remote import SurvivorRendezvous, make_supervisor
from keepstep.resilience.survivors.replica import Replica
from tests.resilience.survivors import protocol_kills
from tests.resilience.survivors.protocol_kills import Job, undisturbed

NETWORK = Network("127.0.0.1", b"of this attempt")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLICA_SECRET, NETWORK.secret.decode())


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    found = Coordinator(tmp_path / "membership", expected=1, network=NETWORK)
    yield found
    found.close()


@pytest.mark.slow
def test_random_kills_over_the_network_leave_equal_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Coordinators(Coordinator):
        def __init__(self, path: Path, expected: int) -> None:
            super().__init__(path, expected, network=NETWORK)
            monkeypatch.setenv(COORDINATOR, self.address)

    monkeypatch.setattr(protocol_kills, "Coordinator", Coordinators)
    job = Job(tmp_path, replicas=3, steps=200, pause_s=0.004)
    assert job.run(random_kills=4, seed=2) == {undisturbed(200)}
    assert job.kills == 4


def test_stranger_neither_joins_nor_holds_up_the_coordinator(coordinator: Coordinator) -> None:
    host, port = coordinator.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as silent:
        with pytest.raises(ConnectionError):
            wire.connect_network(coordinator.address, b"another secret")
        # The silent one is still there.
        replica = Replica(coordinator.address, 0)
        assert replica.leads
        replica.close()
        assert silent.fileno() >= 0


def test_replica_without_its_coordinator_ends_and_saves_nothing(tmp_path: Path) -> None:
    """Others may continue elsewhere: on one node it would save and stop instead."""
    coordinator = Coordinator(tmp_path / "membership", expected=1, network=NETWORK)
    replica = Replica(coordinator.address, 0)
    coordinator.close()
    with pytest.raises(EvictedError):
        replica.enter(0)
    replica.close()


def test_replica_that_waits_for_other_nodes_can_be_stopped(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path / "membership", expected=2, network=NETWORK)
    with pytest.raises(StopRequested):
        Replica(coordinator.address, 0, stopped=lambda: True)
    coordinator.close()


def test_connection_breaks_where_a_node_says_nothing(coordinator: Coordinator) -> None:
    replica = Replica(coordinator.address, 0)
    options = partial(replica._control.socket.getsockopt, socket.IPPROTO_TCP)
    assert options(socket.TCP_USER_TIMEOUT) == wire.LOST_S * 1000
    assert options(socket.TCP_KEEPIDLE) + options(socket.TCP_KEEPINTVL) * options(socket.TCP_KEEPCNT) <= 10
    replica.close()


def test_replica_on_the_coordinators_node_is_reached_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own connection may run over the loopback interface, where no other node reaches it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as control:
        listener, address = wire.listen_for_peers("tcp://node-1:4000", "0-0", control)
        assert address == f"tcp://node-1:{listener.getsockname()[1]}"
        listener.close()


def test_refused_connection_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=os.strerror(errno.ECONNREFUSED)):
        wire.connect(address)


def test_node_that_was_cut_off_does_not_wait_for_a_run_that_is_over() -> None:
    group = NodeGroup(2, 2, "127.0.0.1:9", "run", secret=b"of all nodes", join_timeout_s=60)
    with pytest.raises(RunOverError):
        SurvivorRendezvous(group, 1, lambda: True).next()


def test_hang_takes_longer_than_the_loss_of_a_node(tmp_path: Path) -> None:
    """Otherwise agents would end replicas that only wait for a node that is gone."""
    rendezvous = SurvivorRendezvous(NodeGroup(2, 2, "127.0.0.1:9", "run"), 1)
    assert make_supervisor(rendezvous, tmp_path, 1, ResilienceConfig(), print) is not None
    with pytest.raises(UsageError, match=r"resilience\.hang_s is 5"):
        make_supervisor(rendezvous, tmp_path, 1, ResilienceConfig(hang_s=5.0), print)
