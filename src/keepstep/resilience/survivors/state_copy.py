"""The state of a run from its living replicas to one that joins, while they train.

Every member copies one part of its state between two steps, and sends it from a thread of its own. The sums of each
step that is committed meanwhile follow, again one part from every member. The last message is the end.

All bytes carry an XXH3 hash of 64 bits. Only this run reaches the sockets, so it has to find errors, not attacks:
SHA-256 would take several times as long as the copy itself, and CRC-32 three times as long as this. CRC-32 is for GPU
machines that have little more than PyTorch.
"""

from __future__ import annotations

import queue
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import UsageError
from keepstep.core.failpoints import reach
from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.shared_numbers import Numbers
from keepstep.resilience.survivors.wire import Message

try:
    import xxhash

    _new_xxh3: Callable[[], Any] | None = xxhash.xxh3_64
except ImportError:
    _new_xxh3 = None
PIECE_BYTES = 1 << 20
BUFFER_BYTES = 1 << 22
MOST_SUMS_BEHIND = 8
"""Sums that a member holds for a replica that is slower than the steps: then the members wait for it."""
Bytes = NDArray[np.uint8]


def part_bounds(size: int, part: int, parts: int) -> tuple[int, int]:
    """Where one of `parts` equal parts begins and ends."""
    return size * part // parts, size * (part + 1) // parts


class ReplicaState(Protocol):
    """What replicas hold in common, as a member gives it away and one that joins takes it over."""

    def part(self, part: int, parts: int) -> Bytes:
        """A copy of one of `parts` equal parts of all tensors."""

    def values(self) -> dict[str, Any]:
        """Plain values, after every step in flight has been read. Called on all members; one of them sends it."""

    def buffers(self) -> list[memoryview]:
        """Memory for all tensors."""

    def install(self) -> None:
        """Take over the tensors, which are complete."""

    def replay(self, facts: Mapping[str, Any], sums: Numbers) -> None:
        """Apply a step that the members have committed; `facts` and `sums` are those that they gave to `relay`."""


class Sender:
    """A member's thread that sends its part of the state, and of later sums, to one replica that joins."""

    def __init__(self, address: str, header: Message, state: Bytes) -> None:
        self._address = address
        self._queue: queue.Queue[tuple[Message, Bytes | None]] = queue.Queue(MOST_SUMS_BEHIND)
        self._queue.put((header, state))
        self._gone = threading.Event()
        """Set when the replica is gone, or shall get no more."""
        self._thread = threading.Thread(target=self._run, name="state-sender", daemon=True)
        self._thread.start()

    def send(self, message: Message, data: Bytes | None = None) -> None:
        """Send this after all that came before; a replica that is gone does not matter."""
        while not self._gone.is_set():
            with suppress(queue.Full):
                self._queue.put((message, data), timeout=0.1)
                return

    def abandon(self) -> None:
        """The replica starts over with other members."""
        self._gone.set()

    def join(self) -> None:
        """Wait until everything is sent, or the replica is gone."""
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError), wire.connect(self._address) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            message: Message = {"kind": "connected"}
            while message["kind"] != "end" and not self._gone.is_set():
                try:
                    message, data = self._queue.get(timeout=0.1)
                except queue.Empty:
                    continue
                wire.send(connection, message)
                if data is not None:
                    self._send_bytes(connection, data.data)
        self._gone.set()

    def _send_bytes(self, connection: socket.socket, data: memoryview) -> None:
        digest = Checksum()
        for piece in _split(data):
            if self._gone.is_set():
                raise ConnectionError("not needed any more")
            digest.update(piece)
            connection.sendall(piece)
            reach("serving")
        wire.send(connection, {"algorithm": digest.algorithm, "checksum": digest.hexdigest()})


class Checksum:
    """Of bytes that come in pieces."""

    def __init__(self) -> None:
        self.algorithm = "crc32" if _new_xxh3 is None else "xxh3_64"
        self._crc32, self._xxh3 = 0, None if _new_xxh3 is None else _new_xxh3()

    def update(self, piece: memoryview) -> None:
        """Add a piece."""
        if self._xxh3 is None:
            self._crc32 = zlib.crc32(piece, self._crc32)
        else:
            self._xxh3.update(piece)

    def hexdigest(self) -> str:
        """Of all pieces so far."""
        return f"{self._crc32:08x}" if self._xxh3 is None else str(self._xxh3.hexdigest())


class Receiver:
    """Copies the state from all members. Its methods raise ConnectionError where that has to start over."""

    def __init__(
        self,
        listener: socket.socket,
        control: socket.socket,
        interrupted: Callable[[bool], bool],
        parts: int,
        copy: int,
    ) -> None:
        """`interrupted` says whether the coordinator has ended this copy; it is given whether `control` is readable."""
        self._control, self._interrupted = control, interrupted
        self._connections: list[socket.socket] = []
        """By part."""
        self.step = -1
        """The step of the state that has arrived."""
        found: dict[int, socket.socket] = {}
        try:
            while len(found) < parts:
                self._wait_for(listener)
                connection, _ = listener.accept()
                header = wire.receive(connection)
                if header["kind"] == "state" and header["copy"] == copy:
                    found[header["part"]] = connection
                    self.step = header["step"]
                else:
                    connection.close()
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        self._connections = [found[part] for part in range(parts)]

    def receive_state(self, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`."""
        parts = len(self._connections)
        self._receive([_pieces(buffers, part, parts) for part in range(parts)])
        reach("copied")

    def next_sum(self, numbers: Callable[[int], Numbers]) -> Message:
        """Wait for the next message of the members. The sums of a step are written into `numbers` of their count."""
        messages = []
        for connection in self._connections:
            self._wait_for(connection)
            messages.append(wire.receive(connection))
        first = messages[0]
        if any(message["step"] != first["step"] or message["kind"] != first["kind"] for message in messages):
            raise ConnectionError("the members send different steps")
        if first["step"] != self.step + (first["kind"] == "sum"):
            raise ConnectionError(f"step {first['step']} does not follow on {self.step}: the members went back")
        if first["kind"] == "sum":
            into = numbers(first["count"])
            parts = len(self._connections)
            bounds = [part_bounds(len(into), part, parts) for part in range(parts)]
            self._receive([_split(into[start:end].view(np.uint8).data) for start, end in bounds])
            self.step = first["step"]
        return first

    def close(self) -> None:
        """Leave: the members notice."""
        for connection in self._connections:
            connection.close()

    def _receive(self, pieces: Sequence[Iterable[memoryview]]) -> None:
        """Each part in a thread of its own: reading and checking use several cores."""
        with ThreadPoolExecutor(len(pieces)) as pool:
            parts = [pool.submit(_receive_part, *each) for each in zip(self._connections, pieces, strict=True)]
            try:
                for part in parts:
                    part.result()
            except BaseException:
                for connection in self._connections:
                    # Ends the threads that still wait.
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                raise

    def _wait_for(self, source: socket.socket) -> None:
        ready: list[Any] = []
        while source not in ready:
            if self._interrupted(self._control in ready):
                raise ConnectionError("the copy starts over")
            ready = wait([self._control, source])


def _receive_part(connection: socket.socket, pieces: Iterable[memoryview]) -> None:
    digest = Checksum()
    for piece in pieces:
        filled = 0
        while filled < len(piece):
            count = connection.recv_into(piece[filled:])
            if not count:
                raise ConnectionError("a source of the state is gone")
            filled += count
        digest.update(piece)
        reach("copying")
    sent = wire.receive(connection)
    if sent["algorithm"] != digest.algorithm:
        raise UsageError(
            f"a replica sends its state with {sent['algorithm']}, and this one computes {digest.algorithm}",
            "install xxhash on all nodes, or on none",
        )
    if sent["checksum"] != digest.hexdigest():
        raise ConnectionError("a part of the state arrived with other bits")


def _pieces(buffers: Sequence[memoryview], part: int, parts: int) -> Iterator[memoryview]:
    """The bytes of one of `parts` equal parts of all buffers in a row."""
    first, end = part_bounds(sum(len(buffer) for buffer in buffers), part, parts)
    start = 0
    for buffer in buffers:
        yield from _split(buffer[max(first - start, 0) : max(min(end - start, len(buffer)), 0)])
        start += len(buffer)


def _split(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), PIECE_BYTES):
        yield buffer[start : start + PIECE_BYTES]
