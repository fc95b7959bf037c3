"""A cache of remote files on a local disk that the processes of a node share.

A file is fetched once for each node: the first process holds the file's lock, writes a temporary file, checks and
renames it; the others wait. The lock is held until the file is open, and a locked file is never evicted. The kernel
releases the locks of a killed process. Space is reserved before a transfer starts, so concurrent fetches stay below the
limit together; a process that waits for space holds none, so another one always makes progress. The least recently used
files are evicted first. Evicting an open file is safe: its bytes stay until it is closed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from keepstep.core.errors import DataError
from keepstep.core.files import sync_file
from keepstep.core.units import format_bytes
from keepstep.data.remote import files
from keepstep.data.remote.files import RemoteFile, Retry, with_retry

_BAD_COPIES_ALLOWED = 3
_SPACE_WAIT_S = 0.02
_NOTICE_AFTER_S = 30.0

Opened = TypeVar("Opened")
Use = Callable[[Path], Opened]
"""Opens or maps a file; the file may be evicted right after."""


class NodeCache:
    """Local copies of files, at most `limit_bytes` in total."""

    def __init__(self, folder: Path, limit_bytes: int, retry: Retry | None = None) -> None:
        self.folder = folder
        self._limit = limit_bytes
        self._retry = retry or Retry()
        (folder / "locks").mkdir(parents=True, exist_ok=True)
        (folder / "files").mkdir(exist_ok=True)

    def open(self, file: RemoteFile, use: Use[Opened]) -> Opened:
        """Call `use` with a complete local copy, which is fetched if it is not cached."""
        return self._open(self._path(file.identity), file.size_bytes, lambda part: self._fetch(file, part), use)

    def open_unpacked(
        self, zipped: RemoteFile | Path, size_bytes: int, unpack: Callable[[BinaryIO, Path], None], use: Use[Opened]
    ) -> Opened:
        """Call `use` with a decompressed copy of `size_bytes`, which is fetched and unpacked if it is not cached."""

        def make(part: Path) -> None:
            if isinstance(zipped, RemoteFile):
                source = self.open(zipped, lambda path: path.open("rb"))
                # It is not needed again: evicted while open, it takes no space while we wait for ours.
                self._remove_unless_locked(self._path(zipped.identity))
            else:
                source = zipped.open("rb")
            with source:
                self._reserve_space(part, size_bytes, where)
                with self._filling(part, where):
                    unpack(source, part)

        where = zipped.address if isinstance(zipped, RemoteFile) else str(zipped)
        return self._open(self._path(f"unpacked {_identity(zipped)} {size_bytes}"), size_bytes, make, use)

    def _path(self, identity: str) -> Path:
        return self.folder / "files" / hashlib.sha256(identity.encode()).hexdigest()[:32]

    def _lock(self, path: Path) -> Path:
        return self.folder / "locks" / path.stem

    def _open(self, path: Path, size_bytes: int, make: Callable[[Path], None], use: Use[Opened]) -> Opened:
        with _locked(self._lock(path)):
            if not _touch(path, size_bytes):
                part = path.with_name(path.name + ".part")
                make(part)
                # The reserved file has its full length: after a power cut, zeros would be taken for its content.
                sync_file(part)
                # A rename while another process adds up the sizes would hide the file from it under both names.
                with _locked(self.folder / "locks" / "room"):
                    part.replace(path)
            try:
                return use(path)
            except DataError:
                # Without checksums, damage is first noticed here. The repaired file may have the same identity.
                path.unlink(missing_ok=True)
                raise

    def _fetch(self, file: RemoteFile, part: Path) -> None:
        for bad_copies in range(_BAD_COPIES_ALLOWED):
            self._reserve_space(part, max(0, file.size_bytes), file.address)
            with self._filling(part, file.address):
                with_retry(file.address, lambda: files.copy(file.address, part), self._retry)
            mismatch = files.find_mismatch(part, file)
            if not mismatch:
                return
            part.unlink()
            print(f"notice: {file.address} {mismatch}, copy {bad_copies + 1}", file=sys.stderr)
        raise DataError(
            f"{file.address} {mismatch}, {_BAD_COPIES_ALLOWED} times in a row",
            "the stored file is damaged: upload or build it again",
        )

    @contextmanager
    def _filling(self, part: Path, what: str) -> Iterator[None]:
        """Remove the partial file when it cannot be filled."""
        try:
            yield
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise DataError(
                    f"the cache {self.folder} cannot hold {what}: {error.strerror}",
                    "free space on that disk, lower data.cache_limit or set data.cache_dir",
                ) from error
            raise

    def _reserve_space(self, part: Path, wanted_bytes: int, what: str) -> None:
        """Wait for space, then give the partial file its full length, which reserves it."""
        if wanted_bytes > self._limit:
            raise DataError(
                f"{what} takes {format_bytes(wanted_bytes)}, the cache limit is {format_bytes(self._limit)}",
                "raise data.cache_limit above the largest file, or read a mounted folder without data.cache_dir",
            )
        started_s = noticed_s = time.monotonic()
        while not self._try_reserve(part, wanted_bytes):
            time.sleep(_SPACE_WAIT_S)
            if time.monotonic() - noticed_s > _NOTICE_AFTER_S:
                noticed_s = time.monotonic()
                waited_s = noticed_s - started_s
                print(
                    f"notice: {what} has waited {waited_s:.0f} s for space in {self.folder}: other processes are "
                    "filling all of it; a larger data.cache_limit avoids this",
                    file=sys.stderr,
                )

    def _try_reserve(self, part: Path, wanted_bytes: int) -> bool:
        with _locked(self.folder / "locks" / "room"):
            found = sorted(self._others(part))
            total = sum(size for _, size, _ in found)
            for _, size, path in found:
                if total + wanted_bytes <= self._limit:
                    break
                if self._remove_unless_locked(path):
                    total -= size
            if total + wanted_bytes > self._limit:
                return False
            part.touch(0o644)
            os.truncate(part, wanted_bytes)
            return True

    def _others(self, part: Path) -> Iterator[tuple[int, int, Path]]:
        """Time of last use, size and path of each other file."""
        for path in (self.folder / "files").iterdir():
            if path == part:
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            yield status.st_mtime_ns, status.st_size, path

    def _remove_unless_locked(self, path: Path) -> bool:
        """Remove a file, or what a dead process left of one; False while a process fills or opens it."""
        try:
            with _locked(self._lock(path), fcntl.LOCK_NB):
                path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True


def _identity(zipped: RemoteFile | Path) -> str:
    if isinstance(zipped, RemoteFile):
        return zipped.identity
    try:
        status = zipped.stat()
    except FileNotFoundError as error:
        raise DataError(f"{zipped} is missing", "copy the shard again, or run keepstep data verify") from error
    return f"{zipped.resolve()} {status.st_size} {status.st_mtime_ns}"


def _touch(path: Path, size_bytes: int) -> bool:
    """Mark as used; False if the file is not cached, or does not have the known size."""
    try:
        os.utime(path)
        return size_bytes < 0 or path.stat().st_size == size_bytes
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(handle)
