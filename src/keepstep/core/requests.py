"""Requests to object stores that this process has made, as the layer that makes them counts them."""

from __future__ import annotations

import threading
from collections import Counter

KINDS = ("GET", "PUT", "LIST", "HEAD", "DELETE", "read_bytes", "written_bytes")
_counts: Counter[str] = Counter()
_lock = threading.Lock()


def count_request(kind: str, requests: int = 1, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
    """Add requests of one kind, and the bytes that they moved."""
    with _lock:
        _counts.update({kind: requests, "read_bytes": read_bytes, "written_bytes": written_bytes})


def take_requests() -> dict[str, int]:
    """What was counted since the last call; empty where no object store was used."""
    with _lock:
        taken = {kind: count for kind, count in _counts.items() if count}
        _counts.clear()
    return taken
