"""Small messages between a replica and the coordinator: JSON with a length in front.

On one node they go over local sockets. Between nodes they go over TCP, with an address `tcp://HOST:PORT`, and only
between processes that prove to know the secret of the attempt.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from keepstep.core.proof import admit, introduce
from keepstep.core.ranks import REPLICA_SECRET

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
_NETWORK = "tcp://"
CONNECT_TIMEOUT_S = 3.0
LOST_S = 5
"""A node that does not acknowledge anything for so long is lost: shorter than any hang, longer than a full switch."""


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, which only this user reaches; one that a dead process left there is replaced."""
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    return listener


class NetworkListener(socket.socket):
    """Listens on all interfaces. Strangers are accepted as connections that are closed already."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        super().__init__(socket.AF_INET6 if dual else socket.AF_INET)
        if dual:
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.bind(("", 0))
        self.listen(64)

    @property
    def port(self) -> int:
        """The port that the system has chosen."""
        return int(self.getsockname()[1])

    def accept(self) -> tuple[socket.socket, Any]:
        """Wait for a connection, and for its proof."""
        connection, address = super().accept()
        if not admitted(connection, os.environ[REPLICA_SECRET].encode()):
            connection, nobody = socket.socketpair()
            nobody.close()
        return connection, address


def admitted(connection: socket.socket, secret: bytes) -> bool:
    """Whether a connection from the network has proven itself; it is closed where it has not."""
    with suppress(OSError):
        if admit(connection, secret):
            _watch(connection)
            return True
    connection.close()
    return False


def listen_for_peers(coordinator: str, name: str, control: socket.socket) -> tuple[socket.socket, str]:
    """Where other replicas reach this process, and its address. `control` is the connection to the coordinator."""
    if not is_network(coordinator):
        path = Path(coordinator).with_name(f"replica-{name}")
        return listen(path), str(path)
    listener = NetworkListener()
    own = str(control.getsockname()[0]).removeprefix("::ffff:")
    # On the coordinator's own node its name may mean the loopback interface, which other nodes do not reach.
    host = _host_and_port(coordinator)[0] if own.startswith("127.") or own == "::1" else own
    return listener, network_address(host, listener.port)


def network_address(host: str, port: int) -> str:
    """What `connect` takes."""
    return f"{_NETWORK}{host}:{port}"


def is_network(address: str) -> bool:
    """Whether an address can be reached from other nodes."""
    return address.startswith(_NETWORK)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(_NETWORK).rpartition(":")
    return host, int(port)


def _watch(connection: socket.socket) -> None:
    """The system notices a node that lost its power or its cable, and breaks the connection."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, LOST_S),
        (socket.TCP_USER_TIMEOUT, LOST_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connect_network(address: str, secret: bytes) -> socket.socket:
    """A connection over TCP to a process with the same secret; ConnectionError where there is none."""
    try:
        connection = socket.create_connection(_host_and_port(address), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ConnectionError(f"nobody answers at {address}: {error}") from error
    try:
        introduce(connection, secret)
    except OSError as error:
        connection.close()
        raise ConnectionError(f"no proof from {address}: {error}") from error
    _watch(connection)
    return connection


def connect(path: str) -> socket.socket:
    """A connection to whoever listens there; ConnectionError where nobody does."""
    if is_network(path):
        return connect_network(path, os.environ[REPLICA_SECRET].encode())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise ConnectionError(f"nobody answers at {path}: {error.strerror}") from error
    return connection


def send(connection: socket.socket, message: Message) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> Message:
    """Wait for one message on a blocking socket that carries nothing else until then."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    message: Message = json.loads(_exactly(connection, length))
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the connection was closed in the middle of a message")
        parts += part
    return bytes(parts)


class Inbox:
    """Messages of a connection that is read whenever something arrives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def read(self, connection: socket.socket) -> list[Message]:
        """All messages that are complete after one read; ConnectionError at the end of the connection."""
        part = connection.recv(_READ_BYTES)
        if not part:
            raise ConnectionError("the connection was closed")
        self._bytes += part
        messages: list[Message] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(json.loads(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return messages
