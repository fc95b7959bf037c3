"""Speed of a state copy between replicas, with its checks, over the raw speed of the same sockets."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.state_copy import BUFFER_BYTES, PIECE_BYTES, Receiver, Sender, part_bounds

SIZE_BYTES = 1 << 28
SOURCES = 3


def _serve(address: str, part: int) -> None:
    """A member in a process of its own, as in a run."""
    start, end = part_bounds(SIZE_BYTES, part, SOURCES)
    header = {"kind": "state", "copy": 1, "part": part, "step": 0}
    sender = Sender(address, header, np.full(end - start, part, np.uint8))
    sender.send({"kind": "end", "step": 0, "values": {}})
    sender.join()


def _send_raw(address: str) -> None:
    piece = np.ones(PIECE_BYTES, np.uint8).data
    with wire.connect(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        for _ in range(SIZE_BYTES // PIECE_BYTES):
            connection.sendall(piece)


def measure(folder: Path, turns: int = 5) -> dict[str, Any]:
    """Medians of alternating copies of 256 MiB: on the machine as it is, and with a busy process on each core."""
    folder.mkdir(exist_ok=True)
    copy_s, raw_s = _medians_s(folder, turns)
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_compute, daemon=True) for _ in range(os.cpu_count() or 1)]
    for other in others:
        other.start()
    busy_copy_s, busy_raw_s = _medians_s(folder, turns)
    for other in others:
        other.kill()
        other.join()
    return {
        "copy_gb_s": round(SIZE_BYTES / copy_s / 1e9, 3),
        "copy_over_loopback": round(raw_s / copy_s, 3),
        "copy_over_loopback_busy": round(busy_raw_s / busy_copy_s, 3),
    }


def _compute() -> None:
    while True:
        pass


def _medians_s(folder: Path, turns: int) -> tuple[float, float]:
    into = np.ones(SIZE_BYTES, np.uint8)
    seconds: dict[str, list[float]] = {"copy": [], "raw": []}
    for _ in range(turns):
        seconds["raw"].append(_time_raw(folder / "replica", into))
        seconds["copy"].append(_time_copy(folder / "replica", into))
    return statistics.median(seconds["copy"]), statistics.median(seconds["raw"])


def _time_copy(path: Path, into: np.ndarray[Any, Any]) -> float:
    context = multiprocessing.get_context("spawn")
    members = [context.Process(target=_serve, args=(str(path), part)) for part in range(SOURCES)]
    control, coordinator = socket.socketpair()
    with wire.listen(path) as listener, control, coordinator:
        for member in members:
            member.start()
        receiver = Receiver(listener, control, lambda _: False, SOURCES, copy=1)
        started = time.perf_counter()
        receiver.receive_state([into.data])
        took_s = time.perf_counter() - started
        receiver.close()
    for member in members:
        member.join()
    assert all(into[part_bounds(SIZE_BYTES, part, SOURCES)[0]] == part for part in range(SOURCES))
    return took_s


def _time_raw(path: Path, into: np.ndarray[Any, Any]) -> float:
    sender = multiprocessing.get_context("spawn").Process(target=_send_raw, args=(str(path),))
    with wire.listen(path) as listener:
        sender.start()
        connection, _ = listener.accept()
        filled, started = 0, time.perf_counter()
        with connection:
            while filled < SIZE_BYTES:
                filled += connection.recv_into(into.data[filled : filled + PIECE_BYTES])
        took_s = time.perf_counter() - started
    sender.join()
    return took_s
