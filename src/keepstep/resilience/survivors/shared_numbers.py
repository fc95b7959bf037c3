"""Memory for sums that the other replicas of this node read directly: sockets would copy every number twice."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class SharedNumbers:
    """A replica's own numbers. The memory has no name of its own and ends with the process.

    The others find it through a link next to the replica's socket, which only this user reaches.
    """

    def __init__(self, address: str, count: int) -> None:
        self._fd = os.memfd_create("keepstep-sums")
        os.ftruncate(self._fd, 8 * count)
        self._memory = mmap.mmap(self._fd, 8 * count)
        self.numbers: Numbers = np.frombuffer(self._memory, np.int64)
        self._link = _link(address)
        with suppress(FileNotFoundError):
            self._link.unlink()
        self._link.symlink_to(f"/proc/{os.getpid()}/fd/{self._fd}")

    def close(self) -> None:
        """Give the memory back when nobody uses it any more."""
        self._link.unlink(missing_ok=True)
        os.close(self._fd)


def numbers_of(address: str) -> Numbers:
    """The numbers of another replica of this node, to read; OSError where it is gone."""
    with _link(address).open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.int64)


def _link(address: str) -> Path:
    return Path(f"{address}.numbers")
