"""The state of a run from its living replicas to one that joins: each of them sends one part, with a hash."""

from __future__ import annotations

import hashlib
import selectors
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from keepstep.core.failpoints import reach
from keepstep.resilience.survivors import wire

PIECE_BYTES = 1 << 22


def send(
    address: str, part: int, parts: int, epoch: int, buffers: Sequence[memoryview], values: Mapping[str, Any]
) -> None:
    """Send one of `parts` equal parts of the state to the replica at `address`; one that is gone does not matter."""
    with suppress(OSError):
        connection = wire.connect(address)
        with connection:
            wire.send(connection, {"kind": "state", "epoch": epoch, "part": part, "values": dict(values)})
            digest = hashlib.sha256()
            for piece in _pieces(buffers, part, parts):
                connection.sendall(piece)
                digest.update(piece)
                reach("serving")
            wire.send(connection, {"sha256": digest.hexdigest()})


def receive(
    listener: socket.socket, control: socket.socket, parts: int, epoch: int, buffers: Sequence[memoryview]
) -> dict[str, Any]:
    """Fill `buffers` with all parts; returns the values of the first. ConnectionError where a source is lost."""
    values: dict[str, Any] = {}
    left = set(range(parts))
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while left:
            if control in [key.fileobj for key, _ in selector.select()]:
                raise ConnectionError("a source of the state is gone")
            connection, _ = listener.accept()
            with connection:
                header = wire.receive(connection)
                if header["kind"] != "state" or header["epoch"] != epoch:
                    continue
                _receive_part(connection, _pieces(buffers, header["part"], parts))
                left.discard(header["part"])
                values = header["values"] or values
    return values


def _receive_part(connection: socket.socket, pieces: Iterator[memoryview]) -> None:
    digest = hashlib.sha256()
    for piece in pieces:
        filled = 0
        while filled < len(piece):
            count = connection.recv_into(piece[filled:])
            if not count:
                raise ConnectionError("a source of the state is gone")
            filled += count
        digest.update(piece)
        reach("copying")
    if wire.receive(connection)["sha256"] != digest.hexdigest():
        raise ConnectionError("a part of the state arrived with other bits")


def _pieces(buffers: Sequence[memoryview], part: int, parts: int) -> Iterator[memoryview]:
    """The bytes of one of `parts` equal parts of all buffers in a row."""
    total = sum(len(buffer) for buffer in buffers)
    first, end = total * part // parts, total * (part + 1) // parts
    start = 0
    for buffer in buffers:
        for begin in range(max(first - start, 0), min(end - start, len(buffer)), PIECE_BYTES):
            yield buffer[begin : min(begin + PIECE_BYTES, end - start, len(buffer))]
        start += len(buffer)
