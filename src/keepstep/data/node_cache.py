"""Copies of files that live elsewhere, on a local disk that the processes of a node share.

A file is fetched once a node: whoever comes first holds its lock, writes aside, checks, renames; the others wait. It
stays locked until it is opened, and what is locked is not removed. Locks are the kernel's, so a killed process leaves
none behind. Room is taken before bytes come, so that many fetches at once stay below the limit, too; who waits for room
holds none, so that there is always somebody who goes on. The least recently used files go first; removing one that a
process has open is safe, its bytes stay until they are let go.
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
from keepstep.data import remote
from keepstep.data.remote import RemoteFile, Retry, with_retry

_BAD_COPIES_ALLOWED = 3
_ROOM_WAIT_S = 0.02
_NOTICE_AFTER_S = 30.0

Opened = TypeVar("Opened")
Use = Callable[[Path], Opened]
"""Opens or maps a file; its name may be gone right after."""


class NodeCache:
    """Local files made from others, at most `limit_bytes` of them."""

    def __init__(self, folder: Path, limit_bytes: int, retry: Retry | None = None) -> None:
        self.folder = folder
        self._limit = limit_bytes
        self._retry = retry or Retry()
        (folder / "locks").mkdir(parents=True, exist_ok=True)
        (folder / "files").mkdir(exist_ok=True)

    def open(self, file: RemoteFile, use: Use[Opened]) -> Opened:
        """What `use` makes of a whole local copy, which is fetched when it is not here."""
        return self._open(self._path(file.identity), file.size_bytes, lambda aside: self._fetch(file, aside), use)

    def open_unpacked(
        self,
        zipped: RemoteFile | Path,
        size_bytes: int,
        unpack: Callable[[BinaryIO, Path], None],
        use: Use[Opened],
    ) -> Opened:
        """What `use` makes of an unpacked copy of `size_bytes`, which is fetched and unpacked when it is not here."""

        def make(aside: Path) -> None:
            # Nobody else needs the packed copy; open and removed it holds no room while we wait for ours.
            with self._open_zipped(zipped) as source:
                if isinstance(zipped, RemoteFile):
                    self._remove_unless_held(self._path(zipped.identity))
                self._take_room(aside, size_bytes, str(where))
                with self._filling(aside, str(where)):
                    unpack(source, aside)

        where = zipped.address if isinstance(zipped, RemoteFile) else zipped
        return self._open(self._path(f"unpacked {_identity(zipped)} {size_bytes}"), size_bytes, make, use)

    def _open_zipped(self, zipped: RemoteFile | Path) -> BinaryIO:
        if isinstance(zipped, Path):
            return zipped.open("rb")
        return self.open(zipped, lambda path: path.open("rb"))

    def _path(self, identity: str) -> Path:
        return self.folder / "files" / hashlib.sha256(identity.encode()).hexdigest()[:32]

    def _lock(self, path: Path) -> Path:
        return self.folder / "locks" / path.stem

    def _open(self, path: Path, size_bytes: int, make: Callable[[Path], None], use: Use[Opened]) -> Opened:
        with _locked(self._lock(path)):
            if not _touch(path, size_bytes):
                aside = path.with_name(path.name + ".part")
                make(aside)
                # It has its full length from the start: after a power cut zeros would pass for what it holds.
                sync_file(aside)
                aside.replace(path)
            try:
                return use(path)
            except DataError:
                # Without checksums damage shows here first, and the mended file will look no different from outside.
                path.unlink(missing_ok=True)
                raise

    def _fetch(self, file: RemoteFile, aside: Path) -> None:
        for bad_copies in range(_BAD_COPIES_ALLOWED):
            self._take_room(aside, max(0, file.size_bytes), file.address)
            with self._filling(aside, file.address):
                with_retry(file.address, lambda: remote.copy(file.address, aside), self._retry)
            wrong = remote.what_is_wrong(aside, file)
            if not wrong:
                return
            aside.unlink()
            print(f"notice: {file.address} {wrong}, copy {bad_copies + 1}", file=sys.stderr)
        raise DataError(
            f"{file.address} {wrong}, {_BAD_COPIES_ALLOWED} times in a row",
            "the stored file is damaged: upload or build it again",
        )

    @contextmanager
    def _filling(self, aside: Path, what: str) -> Iterator[None]:
        """Leaves nothing behind when a file cannot be filled."""
        try:
            yield
        except BaseException as error:
            aside.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise DataError(
                    f"the cache {self.folder} cannot hold {what}: {error.strerror}",
                    "make room on that disk, lower data.cache_limit or set data.cache_dir",
                ) from error
            raise

    def _take_room(self, aside: Path, wanted_bytes: int, what: str) -> None:
        """Give a file to be filled its length, which is its claim to the room, as soon as there is enough."""
        if wanted_bytes > self._limit:
            raise DataError(
                f"{what} takes {format_bytes(wanted_bytes)}, the cache limit is {format_bytes(self._limit)}",
                "raise data.cache_limit above the largest file",
            )
        started_s = noticed_s = time.monotonic()
        while not self._try_to_take_room(aside, wanted_bytes):
            time.sleep(_ROOM_WAIT_S)
            if time.monotonic() - noticed_s > _NOTICE_AFTER_S:
                noticed_s = time.monotonic()
                waited_s = noticed_s - started_s
                print(
                    f"notice: {what} waits for room in {self.folder}, {waited_s:.0f} s so far: other processes are "
                    "filling all of it; a larger data.cache_limit would end this",
                    file=sys.stderr,
                )

    def _try_to_take_room(self, aside: Path, wanted_bytes: int) -> bool:
        with _locked(self.folder / "locks" / "room"):
            found = sorted(self._others(aside))
            total = sum(size for _, size, _ in found)
            for _, size, path in found:
                if total + wanted_bytes <= self._limit:
                    break
                if self._remove_unless_held(path):
                    total -= size
            if total + wanted_bytes > self._limit:
                return False
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.ftruncate(handle, wanted_bytes)
            finally:
                os.close(handle)
            return True

    def _others(self, aside: Path) -> Iterator[tuple[int, int, Path]]:
        """When each file was used last, how long it is, and the file."""
        for path in (self.folder / "files").iterdir():
            if path == aside:
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            yield status.st_mtime_ns, status.st_size, path

    def _remove_unless_held(self, path: Path) -> bool:
        """Remove a file, or a part that a dead process left; False while somebody fills or opens it."""
        handle = os.open(self._lock(path), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(handle)


def _identity(zipped: RemoteFile | Path) -> str:
    if isinstance(zipped, RemoteFile):
        return zipped.identity
    try:
        status = zipped.stat()
    except FileNotFoundError as error:
        raise DataError(f"{zipped} is missing", "copy the shard again, or run keepstep data verify") from error
    return f"{zipped.resolve()} {status.st_size} {status.st_mtime_ns}"


def _touch(path: Path, size_bytes: int) -> bool:
    """Mark as used; False when the file is not here, or not as long as it has to be where that is known."""
    try:
        os.utime(path)
        return size_bytes < 0 or path.stat().st_size == size_bytes
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
