"""Where checkpoints are stored: a local folder, written durably and with direct I/O, or an object store.

A store can list, read a range, write a file once, create a small file only if it is absent, and delete. Callers never
rename, because object stores cannot. Names are relative, with `/` between folder and file.

Direct I/O, because a checkpoint is written once and rarely read back, so caching it only costs copies. Measured with
two writers on a busy two-core machine, 1.2 GB: 0.55 s, against 1.8 s through the page cache with fdatasync. It needs
aligned memory, offset and length; unaligned data goes through a small aligned buffer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from keepstep.checkpoint.storage.object_store import ObjectStore, parse_url
from keepstep.core.errors import CheckpointError, StorageError
from keepstep.core.files import sync_folder, write_atomic, write_once

ALIGN_BYTES = 4096
WRITE_BYTES = 16 * 1024 * 1024
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class UnreadableError(StorageError):
    """A store could not be read. Its files may be intact, and reading may work a moment later."""


def unreadable(error: OSError, where: str, hint: str | None = None) -> CheckpointError:
    """The error for a failed read; a missing permission is not worth waiting for."""
    kind = CheckpointError if isinstance(error, PermissionError) else UnreadableError
    return kind(f"{where} cannot be read: {error.strerror or error}", hint)


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
        # pread, not mmap: an I/O error must become an exception, not a SIGBUS.
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

    def create(self, name: str, content: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Create a small file atomically and durably; FileExistsError when it exists.

        `check` is called directly before the file appears and may refuse by raising.
        """
        if not write_once(self.root / name, content, check):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.locate(name))

    def overwrite(self, name: str, content: bytes) -> None:
        """Overwrite a small file by content of the same length, in place: this needs no room on a full disk."""
        with (self.root / name).open("r+b") as file:
            file.write(content)

    def refresh(self, folder: str) -> None:
        """Make `names` see what other machines have created: NFS caches a folder until this machine changes it."""
        probe = self.root / folder / f".refresh-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            probe.touch()
            probe.unlink()

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file atomically and durably, replacing an older one."""
        write_atomic(self.root / name, content)

    def move(self, name: str, target: str) -> None:
        """Replace one file by another; only repair does this, with a file it has checked."""
        (self.root / name).replace(self.root / target)
        sync_folder((self.root / target).parent)

    def remove(self, name: str) -> None:
        """Delete a file; a missing one is not an error."""
        (self.root / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Delete a folder and its content; a missing one is not an error."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.root / name)

    def free_bytes(self) -> int | None:
        """Free bytes, or None where the store does not say."""
        self.root.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.root).free

    def locate(self, name: str = "") -> str:
        """The full path of a name, for messages."""
        return str(self.root / name) if name else str(self.root)


Store = LocalStore | ObjectStore


def open_store(place: str | Path) -> Store:
    """The store for a path or an object store's URL."""
    url = parse_url(str(place))
    return ObjectStore(*url) if url else LocalStore(Path(place))


def write_durable(path: Path, pieces: Iterable[memoryview]) -> None:
    """Write a new file from `pieces`, durable on return; FileExistsError when it exists already."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        handle = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        # tmpfs and some network file systems refuse O_DIRECT; the failed open may have created the file.
        path.unlink(missing_ok=True)
        handle = os.open(path, flags, 0o644)
    try:
        sink = _Sink(handle)
        for piece in pieces:
            sink.write(piece)
        sink.finish()
        getattr(os, "fdatasync", os.fsync)(handle)
    finally:
        os.close(handle)


class _Sink:
    """Accepts bytes of any length and passes aligned runs to the kernel."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._staging = mmap.mmap(-1, WRITE_BYTES)
        self._staged = 0
        self._written = 0

    def write(self, piece: memoryview) -> None:
        view = piece if piece.format == "B" else piece.cast("B")
        while len(view):
            if self._staged == 0 and len(view) >= ALIGN_BYTES:
                run = view[: min(len(view) // ALIGN_BYTES * ALIGN_BYTES, WRITE_BYTES)]
                if self._try(run):
                    view = view[len(run) :]
                    continue
            room = WRITE_BYTES - self._staged
            # Fill the staging buffer only to the next boundary, so that the rest can be written directly again.
            short = -self._staged % ALIGN_BYTES or room
            part = view[: min(short, room)]
            self._staging[self._staged : self._staged + len(part)] = part
            self._staged += len(part)
            view = view[len(part) :]
            if self._staged % ALIGN_BYTES == 0:
                self._flush(self._staged)

    def finish(self) -> None:
        """Write the unaligned end as a whole page, then truncate the file to its length."""
        if self._staged:
            length = self._written + self._staged
            self._flush(-(-self._staged // ALIGN_BYTES) * ALIGN_BYTES)
            os.ftruncate(self._handle, length)

    def _try(self, run: memoryview) -> bool:
        """Write directly from the source; False when its memory is not aligned."""
        done = 0
        while done < len(run):
            try:
                done += os.pwrite(self._handle, run[done:], self._written + done)
            except OSError as error:
                if error.errno not in _REFUSED or done:
                    raise
                return False
        self._written += done
        return True

    def _flush(self, length: int) -> None:
        with memoryview(self._staging) as view:
            done = 0
            while done < length:
                done += os.pwrite(self._handle, view[done:length], self._written + done)
        self._written += length
        self._staged = 0
