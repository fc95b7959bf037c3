"""Small messages between a replica and the coordinator: JSON with a length in front, over local sockets."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, which only this user reaches; one that a dead process left there is replaced."""
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def connect(path: str) -> socket.socket:
    """A connection to whoever listens there; ConnectionError where nobody does."""
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
