"""A file system of a few megabytes that a test can fill up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A tmpfs of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.balloon = folder / ".balloon"
        """What takes up the space; the injected fault `full` writes the same file."""

    def fill(self, leave_bytes: int = 0) -> None:
        """Use all space, and give back `leave_bytes` of it."""
        balloon = os.open(self.balloon, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while True:
                os.write(balloon, bytes(1 << 12))
        except OSError:
            os.ftruncate(balloon, max(0, os.fstat(balloon).st_size - leave_bytes))
        finally:
            os.close(balloon)

    def empty(self) -> None:
        """Give all balloon back."""
        self.balloon.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mount it; skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "keepstep-test", str(folder)]
    try:
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
