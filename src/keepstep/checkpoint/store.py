"""Where checkpoints live: the few things we ask of a place, and a local folder that does them durably.

A place can list, read a range, write a file once, create a small file only if it is absent, and delete. Nothing is ever
renamed into place except by `create` and `replace`, because object stores cannot.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from keepstep.checkpoint.direct import write_durable
from keepstep.checkpoint.objects import ObjectStore, parse_url
from keepstep.core.errors import CheckpointError
from keepstep.core.files import sync_folder, write_atomic


class UnreadableError(CheckpointError):
    """A place did not let itself be read. What lies there may well be whole, and answer a moment later."""


def unreadable(error: OSError, where: str, hint: str | None = None) -> CheckpointError:
    """What to raise for a failed read; one that is forbidden will not be allowed by waiting."""
    kind = CheckpointError if isinstance(error, PermissionError) else UnreadableError
    return kind(f"{where} cannot be read: {error.strerror or error}", hint)


class Store(Protocol):
    """A place for checkpoints. Names are relative, with `/` between folder and file."""

    def names(self, folder: str = "") -> list[str]:
        """Names directly inside `folder`, sorted; empty when there is no such folder."""

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError when absent."""

    def read(self, name: str) -> bytes:
        """All of a small file."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a new file, durable on return."""

    def create(self, name: str, content: bytes) -> None:
        """Write a small file whole and durable, or raise FileExistsError and change nothing."""

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file whole and durable, over an older one if need be."""

    def move(self, name: str, target: str) -> None:
        """Put a file in the place of another; only repair does this, on a file that is checked already."""

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone already is fine."""

    def remove_folder(self, name: str) -> None:
        """Delete a folder and all in it; one that is gone already is fine."""

    def free_bytes(self) -> int | None:
        """Bytes left to write, or None where the place does not say."""

    def locate(self, name: str = "") -> str:
        """The name as a person would write it."""


class LocalStore:
    """A folder on a disk or a shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, folder: str = "") -> list[str]:
        """Names directly inside `folder`, sorted; empty when there is no such folder."""
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError when absent."""
        return (self.root / name).stat().st_size

    def read(self, name: str) -> bytes:
        """All of a small file."""
        return (self.root / name).read_bytes()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""
        # pread and not mmap: an I/O error must become an exception that names the file, not a SIGBUS.
        handle = os.open(self.root / name, os.O_RDONLY)
        try:
            done = 0
            while done < len(buffer):
                read = os.preadv(handle, [buffer[done:]], offset + done)
                if not read:
                    break
                done += read
            return done
        finally:
            os.close(handle)

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a new file, durable on return."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durable(path, pieces)
        sync_folder(path.parent)

    def create(self, name: str, content: bytes) -> None:
        """Write a small file whole and durable, or raise FileExistsError and change nothing."""
        path = self.root / name
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            # A hard link, unlike a rename, refuses to replace what is there: the first writer wins.
            os.link(aside, path)
        finally:
            aside.unlink()
        sync_folder(path.parent)

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file whole and durable, over an older one if need be."""
        write_atomic(self.root / name, content)

    def move(self, name: str, target: str) -> None:
        """Put a file in the place of another; only repair does this, on a file that is checked already."""
        (self.root / name).replace(self.root / target)
        sync_folder((self.root / target).parent)

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone already is fine."""
        (self.root / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Delete a folder and all in it; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.root / name)

    def free_bytes(self) -> int | None:
        """Bytes left to write, or None where the place does not say."""
        self.root.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.root).free

    def locate(self, name: str = "") -> str:
        """The name as a person would write it."""
        return str(self.root / name) if name else str(self.root)


def open_store(place: str | Path) -> Store:
    """The store behind a path or an object store's URL."""
    url = parse_url(str(place))
    return ObjectStore(*url) if url else LocalStore(Path(place))
