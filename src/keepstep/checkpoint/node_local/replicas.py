"""Node-local checkpoints: writers send copies to another node, so that a lost node costs no step.

Each writer listens on one TCP port. Both ends prove that they know the secret of the job. Then the peer sends one line
of JSON (the request) and the bytes, and waits for `ok`, which is sent once they are on disk. No torch; only step
folders can be written to.
"""

from __future__ import annotations

import json
import random
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from keepstep.checkpoint.protocol.manifest import LATEST, safe_name
from keepstep.checkpoint.protocol.retention import remove_step
from keepstep.checkpoint.storage.store import Store
from keepstep.core.errors import CheckpointError
from keepstep.core.proof import admit, introduce, oldest_of_most_frequent
from keepstep.core.step_folders import MARKER, parse_folder_name

CHUNK_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 600.0
"""Without a byte from a peer that has proven itself: its disk may be slow."""
CONNECT_S = 60.0
ADMISSION_S = 60.0
"""How long a peer tries to be admitted, where strangers crowd it out."""
MAX_UNPROVEN = 64
"""Connections, each with a thread, that have not proven anything yet. A further one replaces the oldest of the address
that has most of them."""


@dataclass(frozen=True)
class Peers:
    """The writers on other nodes that this writer sends to."""

    secret: str
    replica: tuple[str, int] | None
    """Receives a copy of this rank's data file; None when there is only one node."""
    committer: tuple[str, int] | None
    """Receives this rank's part file; None on the committing node."""
    others: tuple[tuple[str, int], ...]
    """One writer on each other node; the committing writer sends them the manifest and the marker."""

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Peers:
        """Inverse of `dataclasses.asdict`."""
        return Peers(
            raw["secret"],
            tuple(raw["replica"]) if raw["replica"] else None,
            tuple(raw["committer"]) if raw["committer"] else None,
            tuple((host, port) for host, port in raw["others"]),
        )

    def send_data(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Copy a data file to the node that holds our replica."""
        if self.replica is not None:
            self._send(self.replica, {"do": "data", "name": name, "bytes": sum(map(len, pieces))}, pieces)

    def send_part(self, name: str, content: bytes) -> bool:
        """Tell the committing node that data and replica are on disk; False when this node commits."""
        if self.committer is None:
            return False
        self._send(self.committer, {"do": "small", "name": name, "bytes": len(content)}, [memoryview(content)])
        return True

    def send_published(self, files: dict[str, bytes], retired: Sequence[str]) -> None:
        """Send the manifest, the marker and `latest`, in that order, to every other node, and what to delete."""
        for address in self.others:
            for name, content in files.items():
                self._send(address, {"do": "small", "name": name, "bytes": len(content)}, [memoryview(content)])
            self._send(address, {"do": "retire", "names": list(retired), "bytes": 0}, [])

    def _send(self, address: tuple[str, int], request: dict[str, Any], pieces: Sequence[memoryview]) -> None:
        try:
            with self._admitted(address) as connection:
                connection.sendall(json.dumps(request).encode() + b"\n")
                for piece in pieces:
                    connection.sendall(piece)
                with connection.makefile("r") as answers:
                    answer = answers.readline().strip()
        except OSError as error:
            raise CheckpointError(f"the node at {address[0]} did not accept a copy: {error}") from error
        if answer != "ok":
            raise CheckpointError(
                f"the node at {address[0]} could not store a copy: {answer or 'it closed the connection'}"
            )

    def _admitted(self, address: tuple[str, int]) -> socket.socket:
        """A connection on which both ends have proven that they know the secret."""
        deadline = time.monotonic() + ADMISSION_S
        while True:
            connection = socket.create_connection(address, timeout=CONNECT_S)
            try:
                introduce(connection, self.secret.encode())
                connection.settimeout(TIMEOUT_S)
                return connection
            except (ConnectionAbortedError, ConnectionResetError, BrokenPipeError, TimeoutError):
                connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.05, 0.5))
            except BaseException:
                connection.close()
                raise


class _Server(socketserver.ThreadingTCPServer):
    """One thread for each connection; strangers get few of them, and not for long."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, store: Store, secret: str) -> None:
        self.store, self.secret = store, secret.encode()
        self._unproven: dict[Any, str] = {}
        self._lock = threading.Lock()
        super().__init__(("", 0), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Called before the connection gets its thread."""
        with self._lock:
            self._unproven[request] = str(client_address[0])
            if len(self._unproven) > MAX_UNPROVEN:
                oldest = oldest_of_most_frequent(self._unproven)
                del self._unproven[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
        return True

    def proven(self, request: Any) -> bool:
        """Whether the peer knows the secret. It no longer counts as a stranger then."""
        try:
            return admit(request, self.secret)
        except OSError:
            return False
        finally:
            with self._lock:
                self._unproven.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Strangers must not fill the log; a peer gets the error on its connection."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        if not self.server.proven(self.connection):
            return
        self.connection.settimeout(TIMEOUT_S)
        try:
            _store_copy(self.server.store, json.loads(self.rfile.readline(1_000_000)), self.rfile)
            self.wfile.write(b"ok\n")
        except (OSError, CheckpointError, ValueError, KeyError, TypeError) as error:
            self.wfile.write(f"{error}\n".encode())


def serve(store: Store, secret: str) -> int:
    """Accept copies into `store` until this process ends; returns the port."""
    server = _Server(store, secret)
    threading.Thread(target=server.serve_forever, name="checkpoint-copies", daemon=True).start()
    return int(server.server_address[1])


def _store_copy(store: Store, request: dict[str, Any], stream: BufferedIOBase) -> None:
    if request["do"] == "retire":
        for name in request["names"]:
            if parse_folder_name(str(name)) is not None:
                remove_step(store, name)
        return
    name, size_bytes = _checked(str(request["name"])), int(request["bytes"])
    if request["do"] == "data":
        # An earlier copy may have been cut off half-way.
        store.remove(name)
        store.write(name, _chunks(stream, size_bytes))
        return
    content = b"".join(bytes(chunk) for chunk in _chunks(stream, size_bytes))
    if name == LATEST:
        store.replace(name, content)
        return
    try:
        store.create(name, content)
    except FileExistsError:
        # Processes of one node share its folder: another one may have received the same file.
        if store.read(name) != content:
            raise


def _checked(name: str) -> str:
    """`name` if it is a file in a step folder or `latest`; peers may write nothing else."""
    folder, _, file = name.rpartition("/")
    if name == LATEST:
        return name
    if parse_folder_name(folder) is None:
        raise CheckpointError(f"{name} is not in a step folder")
    if file != MARKER:
        safe_name(file)
    return name


def _chunks(stream: BufferedIOBase, size_bytes: int) -> Iterator[memoryview]:
    left = size_bytes
    while left:
        chunk = stream.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise CheckpointError(f"the connection ended {left} bytes early")
        left -= len(chunk)
        yield memoryview(chunk)
