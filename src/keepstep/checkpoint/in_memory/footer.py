"""The footer of an in-memory snapshot: which step the bytes before it belong to, and that they are complete."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

FOOTER_BYTES = 65536
_COMPLETE = b"keepstep snapshot 2\n"


def make_footer(facts: Mapping[str, Any]) -> bytes:
    """A footer that declares the snapshot before it complete. Write it last."""
    text = json.dumps(facts).encode()
    if len(text) + len(_COMPLETE) > FOOTER_BYTES:
        raise ValueError(f"{len(text)} bytes of plain values do not fit into the footer of a snapshot")
    return _COMPLETE + text.ljust(FOOTER_BYTES - len(_COMPLETE))


def read_footer(fd: int) -> dict[str, Any] | None:
    """The footer of a snapshot, or None when the snapshot is not complete."""
    size = os.fstat(fd).st_size
    raw = os.pread(fd, FOOTER_BYTES, size - FOOTER_BYTES) if size >= FOOTER_BYTES else b""
    if not raw.startswith(_COMPLETE):
        return None
    footer: dict[str, Any] = json.loads(raw[len(_COMPLETE) :])
    return footer


def read_description(fd: int) -> dict[str, Any] | None:
    """The layout of a complete snapshot and what checkpoints say about its run; None while it is overwritten."""
    footer = read_footer(fd)
    if footer is None:
        return None
    begin, size = footer["description"]
    try:
        description: dict[str, Any] = json.loads(os.pread(fd, size, begin))
    except ValueError:
        return None
    return description


def write_footer(fd: int, footer: bytes) -> None:
    """Write a footer at the end; the bytes that declare the snapshot complete go last."""
    begin = os.fstat(fd).st_size - FOOTER_BYTES
    os.pwrite(fd, footer[len(_COMPLETE) :], begin + len(_COMPLETE))
    os.pwrite(fd, footer[: len(_COMPLETE)], begin)


def clear_footer(fd: int) -> None:
    """Declare the snapshot incomplete, before its bytes are overwritten."""
    size = os.fstat(fd).st_size
    if size >= FOOTER_BYTES:
        os.pwrite(fd, bytes(len(_COMPLETE)), size - FOOTER_BYTES)
