"""Node-local checkpoints: writers of different nodes hand each other copies, so that a lost node costs nothing.

Each writer serves one TCP port. A peer sends one line of JSON (what, with the secret that the job's processes share),
the bytes, and waits for `ok`, which comes once they are on disk. No torch here; only step folders can be written to.
"""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from keepstep.checkpoint.manifest import LATEST, MARKER, parse_folder_name, safe_name
from keepstep.checkpoint.retention import remove_step
from keepstep.checkpoint.store import Store
from keepstep.core.errors import CheckpointError

CHUNK_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Peers:
    """Whom a writer talks to."""

    secret: str
    replica: tuple[str, int] | None
    """Gets a copy of this rank's data file; None when there is only one node."""
    committer: tuple[str, int] | None
    """Gets this rank's part file; None on the committing node itself."""
    others: tuple[tuple[str, int], ...]
    """One writer on each other node; the committing writer sends them what it publishes."""

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Peers:
        """From a job's line."""
        return Peers(
            raw["secret"],
            tuple(raw["replica"]) if raw["replica"] else None,
            tuple(raw["committer"]) if raw["committer"] else None,
            tuple((host, port) for host, port in raw["others"]),
        )

    def send_data(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Copy a data file to the node that keeps our replica."""
        if self.replica is not None:
            self._send(self.replica, {"do": "data", "name": name, "bytes": sum(map(len, pieces))}, pieces)

    def send_part(self, name: str, content: bytes) -> bool:
        """Tell the committing node that data and replica are on disk; False when that is this node."""
        if self.committer is None:
            return False
        self._send(self.committer, {"do": "small", "name": name, "bytes": len(content)}, [memoryview(content)])
        return True

    def send_published(self, files: dict[str, bytes], retired: Sequence[str]) -> None:
        """Give every other node the manifest, the marker and `latest`, in that order, and what to delete."""
        for address in self.others:
            for name, content in files.items():
                self._send(address, {"do": "small", "name": name, "bytes": len(content)}, [memoryview(content)])
            self._send(address, {"do": "retire", "names": list(retired), "bytes": 0}, [])

    def _send(self, address: tuple[str, int], order: dict[str, Any], pieces: Sequence[memoryview]) -> None:
        try:
            with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
                connection.sendall(json.dumps({**order, "secret": self.secret}).encode() + b"\n")
                for piece in pieces:
                    connection.sendall(piece)
                with connection.makefile("r") as answers:
                    answer = answers.readline().strip()
        except OSError as error:
            raise CheckpointError(f"the node at {address[0]} cannot be reached for its copy: {error}") from error
        if answer != "ok":
            raise CheckpointError(f"the node at {address[0]} could not keep its copy: {answer or 'it hung up'}")


def serve(store: Store, secret: str) -> int:
    """Accept copies into `store` for as long as this process lives; returns the port."""

    class Handler(socketserver.StreamRequestHandler):
        timeout = TIMEOUT_S

        def handle(self) -> None:
            try:
                order = json.loads(self.rfile.readline(1_000_000))
                if not hmac.compare_digest(str(order["secret"]), secret):
                    return
                _obey(store, order, self.rfile)
                self.wfile.write(b"ok\n")
            except (OSError, CheckpointError, ValueError, KeyError, TypeError) as error:
                self.wfile.write(f"{error}\n".encode())

    server = socketserver.ThreadingTCPServer(("", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="checkpoint-copies", daemon=True).start()
    return int(server.server_address[1])


def _obey(store: Store, order: dict[str, Any], stream: BufferedIOBase) -> None:
    if order["do"] == "retire":
        for name in order["names"]:
            if parse_folder_name(str(name)) is not None:
                remove_step(store, name)
        return
    name, size_bytes = _checked(str(order["name"])), int(order["bytes"])
    if order["do"] == "data":
        # A copy that broke off earlier may be in the way; ours is whole or fails.
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
        # Processes of one node share its folder: a neighbour may have been told the same.
        if store.read(name) != content:
            raise


def _checked(name: str) -> str:
    """A file in a step folder, or `latest`; nothing else may be written from outside."""
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


def own_address(towards: str) -> str:
    """The address under which a process that reaches `towards` can be reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
