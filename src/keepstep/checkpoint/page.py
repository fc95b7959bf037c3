"""The last page of a step in memory: what lies before it, and that it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

PAGE_BYTES = 65536
_WHOLE = b"keepstep whole 1\n"


def make_page(facts: Mapping[str, Any]) -> bytes:
    """A page that calls what lies before it whole. Write it last."""
    text = json.dumps(facts).encode()
    if len(text) + len(_WHOLE) > PAGE_BYTES:
        raise ValueError(f"{len(text)} bytes of plain values do not fit beside the tensors")
    return _WHOLE + text.ljust(PAGE_BYTES - len(_WHOLE))


def read_page(handle: int) -> dict[str, Any] | None:
    """What a piece of memory says of itself, if it is whole."""
    size = os.fstat(handle).st_size
    raw = os.pread(handle, PAGE_BYTES, size - PAGE_BYTES) if size >= PAGE_BYTES else b""
    if not raw.startswith(_WHOLE):
        return None
    page: dict[str, Any] = json.loads(raw[len(_WHOLE) :])
    return page


def write_page(handle: int, page: bytes) -> None:
    """Put a page at the end; its mark of wholeness after all the rest of it."""
    begin = os.fstat(handle).st_size - PAGE_BYTES
    os.pwrite(handle, page[len(_WHOLE) :], begin + len(_WHOLE))
    os.pwrite(handle, page[: len(_WHOLE)], begin)


def forget(handle: int) -> None:
    """What lies here is whole no more."""
    size = os.fstat(handle).st_size
    if size >= PAGE_BYTES:
        os.pwrite(handle, bytes(len(_WHOLE)), size - PAGE_BYTES)
