"""Joining a run of several nodes needs its secret: strangers are ignored, however many, and whatever they send."""

from __future__ import annotations

import random
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keepstep.core.proof import NONCE_BYTES, PROOF_BYTES
from keepstep.core.ranks import NodeGroup
from keepstep.resilience.join_gate import MAX_UNPROVEN, Gate, Tunnel
from keepstep.resilience.rendezvous import ElasticRendezvous
from tests.patience import PATIENCE_S
from tests.resilience.test_rendezvous import free_port

SECRET = b"the secret of this run"


class Echo(socketserver.ThreadingTCPServer):
    """Stands for the store: counts its connections, and says back what it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        self.connections = 0
        super().__init__(("127.0.0.1", 0), _EchoHandler)


class _EchoHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Echo)
        self.server.connections += 1
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


@pytest.fixture
def store() -> Iterator[Echo]:
    with Echo() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def gate(store: Echo) -> Gate:
    return Gate(0, SECRET, int(store.server_address[1]))


def echoed(port: int, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60) as node:
        node.sendall(text)
        return received(node, len(text))


def received(connection: socket.socket, size_bytes: int) -> bytes:
    """Up to this many bytes; fewer if the other side closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while len(data) < size_bytes and (piece := connection.recv(size_bytes - len(data))):
            data += piece
    return data


def stranger(port: int) -> socket.socket:
    """A connection from another address than that of the nodes."""
    return socket.create_connection(("127.0.0.1", port), 60, source_address=("127.0.0.2", 0))


def test_node_with_the_secret_reaches_the_store(gate: Gate) -> None:
    tunnel = Tunnel(("127.0.0.1", gate.port), SECRET)
    tunnel.check()
    text = random.Random(1).randbytes(300_000)
    assert echoed(tunnel.port, text) == text


def test_nodes_with_different_secrets_do_not_meet(gate: Gate, store: Echo) -> None:
    tunnel = Tunnel(("127.0.0.1", gate.port), b"of another run")
    with pytest.raises(ConnectionRefusedError, match="secret"):
        tunnel.check()
    assert echoed(tunnel.port, b"x") == b""
    assert store.connections == 0


def test_node_refuses_a_host_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as false_host:

        def pretend() -> None:
            node, _ = false_host.accept()
            with node:
                node.sendall(bytes(NONCE_BYTES))
                # The node's own proof sent back is no proof of the host.
                node.sendall(received(node, NONCE_BYTES + PROOF_BYTES)[NONCE_BYTES:])

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ConnectionRefusedError, match="secret"):
            Tunnel(("127.0.0.1", int(false_host.getsockname()[1])), SECRET).check()


def test_secret_is_never_sent_and_a_replay_is_refused(gate: Gate, store: Echo) -> None:
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen_in() -> None:
            node, _ = listener.accept()
            with node, stranger(gate.port) as host:
                for source, target, size in ((host, node, 32), (node, host, 64), (host, node, 32)):
                    seen.append(received(source, size))
                    target.sendall(seen[-1])

        threading.Thread(target=listen_in, daemon=True).start()
        Tunnel(("127.0.0.1", int(listener.getsockname()[1])), SECRET).check()
    assert [len(message) for message in seen] == [32, 64, 32]
    assert SECRET not in b"".join(seen)
    # The gate connects a node that has proven itself on a thread of its own.
    deadline_s = time.monotonic() + PATIENCE_S
    while not store.connections and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with stranger(gate.port) as again:
        received(again, NONCE_BYTES)
        again.sendall(seen[1])
        assert received(again, 1) == b"", "the proof of an earlier connection"
    assert store.connections == 1


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100_000])
def test_garbage_never_reaches_the_store(gate: Gate, store: Echo, size: int) -> None:
    with stranger(gate.port) as sender:
        with suppress(ConnectionError):
            sender.sendall(random.Random(size).randbytes(size))
            sender.shutdown(socket.SHUT_WR)
        assert received(sender, NONCE_BYTES + 1)[NONCE_BYTES:] == b""
    assert store.connections == 0
    assert echoed(Tunnel(("127.0.0.1", gate.port), SECRET).port, b"x") == b"x"


@pytest.mark.slow
def test_idle_strangers_do_not_shut_nodes_out(gate: Gate) -> None:
    tunnel = Tunnel(("127.0.0.1", gate.port), SECRET)
    with socket.create_connection(("127.0.0.1", tunnel.port), 60) as early:
        early.sendall(b"before")
        assert received(early, 6) == b"before"
        idle = [stranger(gate.port) for _ in range(MAX_UNPROVEN + 50)]
        # Each one that is kept out had to wait for nobody: the oldest lose their places.
        assert received(idle[0], NONCE_BYTES + 1)[NONCE_BYTES:] == b""
        assert echoed(tunnel.port, b"late") == b"late"
        early.sendall(b"after")
        assert received(early, 5) == b"after", "a node that was admitted stays connected"
        for connection in idle:
            connection.close()


@pytest.mark.slow
def test_store_of_the_rendezvous_listens_on_loopback_only() -> None:
    port = free_port()
    rendezvous = ElasticRendezvous(
        NodeGroup(1, 2, f"127.0.0.1:{port}", "test", True, SECRET, join_timeout_s=PATIENCE_S)
    )
    before = listeners()
    assert rendezvous.next().nodes == 1
    opened = listeners() - before
    rendezvous.close(done=True)
    ports = {int(address.rpartition(":")[2], 16) for address in opened if not address.startswith("0100007F")}
    assert ports == {port}, "only the gate is open to the network"


def listeners() -> set[str]:
    """Addresses at which this process listens, as the kernel writes them."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(str(entry.readlink()))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {words[1] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in own}


@contextmanager
def hostile_strangers(port: int) -> Iterator[Callable[[], int]]:
    """A hundred connections a second, idle, with garbage or with messages of torch; yields how many there were."""
    over, count = threading.Event(), 0

    def attack() -> None:
        nonlocal count
        idle: list[socket.socket] = []
        messages = random.Random(5)
        while not over.wait(0.01):
            with suppress(OSError):
                connection = stranger(port)
                count += 1
                connection.sendall(messages.choice([b"", b"\x00\x00\xc8\x5f\x3c", messages.randbytes(500)]))
                idle.append(connection)
            if len(idle) > 200:
                idle.pop(0).close()
        for connection in idle:
            connection.close()

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    try:
        yield lambda: count
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_nodes_meet_among_hostile_strangers() -> None:
    port = free_port()
    groups = [
        NodeGroup(2, 2, f"127.0.0.1:{port}", "test", host, SECRET, join_timeout_s=PATIENCE_S) for host in (True, False)
    ]
    with hostile_strangers(port) as connections, ThreadPoolExecutor(2) as pool:
        nodes = [ElasticRendezvous(group) for group in groups]
        met = list(pool.map(lambda node: node.next(), nodes))
        assert connections() > 0
        for node in nodes:
            node.close(done=True)
    assert sorted(node.node_rank for node in met) == [0, 1]
    assert [node.nodes for node in met] == [2, 2]
