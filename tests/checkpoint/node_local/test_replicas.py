"""Copies between nodes: both ends prove the job's secret, and strangers cost few threads and little time."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from keepstep.checkpoint.node_local import replicas
from keepstep.checkpoint.node_local.replicas import MAX_UNPROVEN, Peers, serve
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.core import proof
from keepstep.core.errors import CheckpointError

SECRET = "the secret of this job"
NAME = "step_00000003/rank00000-0123abcd.safetensors"


def peers(port: int, secret: str = SECRET) -> Peers:
    return Peers(secret, ("127.0.0.1", port), None, ())


def stranger(port: int) -> socket.socket:
    """A connection from another address than that of the peers."""
    return socket.create_connection(("127.0.0.1", port), 60, source_address=("127.0.0.2", 0))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it; bytes it sent before are dropped."""
    connection.settimeout(600)
    try:
        while connection.recv(1 << 12):
            pass
    except ConnectionResetError:
        pass
    return True


def test_copy_arrives_between_idle_strangers(tmp_path: Path) -> None:
    port, threads = serve(LocalStore(tmp_path), SECRET), threading.active_count()
    with ExitStack() as connections:
        crowd = [connections.enter_context(stranger(port)) for _ in range(4 * MAX_UNPROVEN)]
        # The oldest gave way to later ones.
        assert all(closed(connection) for connection in crowd[:MAX_UNPROVEN])
        wait_until(lambda: threading.active_count() <= threads + MAX_UNPROVEN + 1)
        peers(port).send_data(NAME, [memoryview(b"abc"), memoryview(b"def")])
        assert (tmp_path / NAME).read_bytes() == b"abcdef"


def test_stranger_that_sends_slowly_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PROOF_TIMEOUT_S", 0.5)
    port = serve(LocalStore(tmp_path), SECRET)
    with stranger(port) as connection:
        # One byte at a time, as long as the other end takes them: the limit is for the whole proof.
        with suppress(ConnectionError):
            for _ in range(proof.NONCE_BYTES + proof.PROOF_BYTES - 1):
                connection.sendall(b"x")
                time.sleep(0.02)
        assert closed(connection)


def test_wrong_or_old_proof_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "ADMISSION_S", 0.0)
    port = serve(LocalStore(tmp_path), SECRET)
    with pytest.raises(CheckpointError, match="did not accept a copy"):
        peers(port, "another secret").send_data(NAME, [memoryview(b"abc")])
    request = json.dumps({"do": "data", "name": NAME, "bytes": 3, "secret": SECRET}).encode() + b"\nabc"
    for recorded in (request, secrets.token_bytes(64) + request):
        with stranger(port) as connection:
            connection.sendall(recorded)
            assert closed(connection)
    assert list(tmp_path.iterdir()) == []


def test_secret_is_never_sent() -> None:
    """Nor anything else, to a listener that does not know it."""
    received = b""

    def listen(listener: socket.socket) -> None:
        nonlocal received
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(proof.NONCE_BYTES))
            while len(received) < proof.NONCE_BYTES + proof.PROOF_BYTES:
                received += connection.recv(1 << 12)
            connection.sendall(bytes(proof.PROOF_BYTES))
            while more := connection.recv(1 << 12):
                received += more

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen, args=(listener,))
        thread.start()
        with pytest.raises(CheckpointError, match="does not have the secret of this job"):
            peers(listener.getsockname()[1]).send_data(NAME, [memoryview(b"the weights")])
        thread.join()
    assert len(received) == proof.NONCE_BYTES + proof.PROOF_BYTES
    assert SECRET.encode() not in received
