"""Files that live elsewhere, through fsspec, and a cache on local disk that the processes of a node share.

A file is fetched once a node: whoever comes first holds its lock, writes aside, checks, renames; the others wait. Locks
are the kernel's, so a killed process leaves none behind. The least recently used files go when the limit is reached;
removing one that another process has mapped is safe, the bytes stay until it lets go.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, HardwareError
from keepstep.core.units import format_bytes

_BLOCK_BYTES = 1 << 20
_EXTRAS = {"s3": "s3", "abfs": "azure", "az": "azure", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_BAD_COPIES_ALLOWED = 3
_NETWORK_WORDS = ("Connect", "Timeout", "Disconnected", "ServiceRe", "ServerError")


def is_remote(path: str) -> bool:
    """Whether a path is an address."""
    return "://" in path


def filesystem(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address and the path inside it; credentials come from the environment."""
    import fsspec

    protocol = address.split("://", 1)[0]
    try:
        system, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        raise DataError(
            f"{address} needs a package that is not installed: {error}",
            f"pip install 'keepstep[{extra}]'" if extra else "install the fsspec file system for it",
        ) from error
    except ValueError as error:
        raise DataError(
            f"{address} cannot be opened: {error}", "addresses start with s3://, az://, gs://, https://"
        ) from error
    return system, str(path)


@dataclass(frozen=True)
class Retry:
    """How long a file system may be away."""

    patience_s: float = 600.0
    """Give up when nothing came for this long."""
    first_wait_s: float = 0.2
    longest_wait_s: float = 15.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)


def with_retry(what: str, act: Callable[[], Any], retry: Retry) -> Any:
    """Call `act` until it works; what cannot get better by waiting is an error at once."""
    start_s = time.monotonic()
    wait_s = retry.first_wait_s
    while True:
        try:
            return act()
        except (DataError, HardwareError):
            raise
        except Exception as error:  # every file system has errors of its own; all of them may be the network
            if isinstance(error, FileNotFoundError | PermissionError) and not _is_network(error):
                raise DataError(
                    f"{what} is missing or not ours to read: {error}", "check the address, then its credentials"
                ) from error
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            if time.monotonic() - start_s + wait_s > retry.patience_s:
                raise HardwareError(
                    f"{what} could not be read for {retry.patience_s:.0f} s: {type(error).__name__}: {error}",
                    "the store or the network is down: start the same command again when it is back",
                ) from error
            if time.monotonic() - start_s > 5:
                print(f"notice: waiting for {what}: {type(error).__name__}: {error}", file=sys.stderr)
            # A little noise keeps a thousand processes from knocking at the same moment.
            retry.sleep(wait_s * random.uniform(0.7, 1.3))
            wait_s = min(2 * wait_s, retry.longest_wait_s)


def _is_network(error: BaseException) -> bool:
    """Whether a lost connection hides behind an error: some file systems call an unreachable file a missing one."""
    cause: BaseException | None = error
    while cause is not None:
        name = type(cause).__name__
        if isinstance(cause, ConnectionError | TimeoutError) or any(word in name for word in _NETWORK_WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch, and what is known about it beforehand."""

    address: str
    size_bytes: int = -1
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Checksums by algorithm; those that this machine can compute are checked on arrival."""


class NodeCache:
    """Local copies of remote files, at most `limit_bytes` of them."""

    def __init__(self, folder: Path, limit_bytes: int, retry: Retry | None = None) -> None:
        self.folder = folder
        self._limit = limit_bytes
        self._retry = retry or Retry()
        (folder / "locks").mkdir(parents=True, exist_ok=True)
        (folder / "files").mkdir(exist_ok=True)

    def get(self, file: RemoteFile) -> Path:
        """A whole local copy; fetched when it is not there."""
        name = hashlib.sha256(file.address.encode()).hexdigest()[:32]
        path = self.folder / "files" / name
        if self._touch(path):
            return path
        with _locked(self.folder / "locks" / name):
            if self._touch(path):
                return path
            self._fetch(file, path)
        return path

    @staticmethod
    def _touch(path: Path) -> bool:
        """Mark as used; False when the file is not here."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _fetch(self, file: RemoteFile, path: Path) -> None:
        if file.size_bytes > self._limit:
            raise DataError(
                f"{file.address} is {format_bytes(file.size_bytes)}, the cache limit is {format_bytes(self._limit)}",
                "raise data.cache_limit above the largest file",
            )
        aside = path.with_name(path.name + ".part")
        for bad_copies in range(_BAD_COPIES_ALLOWED):
            self._make_room(max(0, file.size_bytes), keep=aside)
            try:
                with_retry(file.address, lambda: _copy(file.address, aside), self._retry)
            except OSError as error:
                aside.unlink(missing_ok=True)
                raise DataError(
                    f"the cache {self.folder} cannot hold {file.address}: {error.strerror}",
                    "make room on that disk, lower data.cache_limit or set data.cache_dir",
                ) from error
            wrong = _what_is_wrong(aside, file)
            if not wrong:
                aside.replace(path)
                self._make_room(0, keep=path)
                return
            aside.unlink(missing_ok=True)
            print(f"notice: {file.address} {wrong}, copy {bad_copies + 1}", file=sys.stderr)
        raise DataError(
            f"{file.address} {wrong}, {_BAD_COPIES_ALLOWED} times in a row",
            "the stored file is damaged: upload or build it again",
        )

    def _make_room(self, wanted_bytes: int, keep: Path) -> None:
        with _locked(self.folder / "locks" / "evict"):
            found = []
            for path in (self.folder / "files").iterdir():
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                found.append((status.st_mtime_ns, status.st_size, path))
            total = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                if total + wanted_bytes <= self._limit:
                    return
                # A part of a file is somebody's work unless its lock is free.
                if path == keep or (path.suffix == ".part" and not self._is_abandoned(path)):
                    continue
                path.unlink(missing_ok=True)
                total -= size

    def _is_abandoned(self, part: Path) -> bool:
        handle = os.open(self.folder / "locks" / part.stem, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(handle)


def _copy(address: str, path: Path) -> None:
    system, name = filesystem(address)
    # A listing remembered from before would hide a file that has come since.
    system.invalidate_cache()
    with system.open(name, "rb", block_size=_BLOCK_BYTES) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)


def _what_is_wrong(path: Path, file: RemoteFile) -> str:
    size_bytes = path.stat().st_size
    if 0 <= file.size_bytes != size_bytes:
        return f"came with {size_bytes:,} bytes instead of {file.size_bytes:,}"
    for name, expected in file.hashes.items():
        if digest_file(path, name) not in (None, expected):
            return f"came with another {name} than its index says"
    return ""


def digest_file(path: Path, algorithm: str) -> str | None:
    """A checksum as mosaicml-streaming names them; None for an algorithm this machine does not have."""
    if algorithm in hashlib.algorithms_available:
        with path.open("rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()
    if algorithm.startswith("xxh"):
        try:
            import xxhash
        except ImportError:
            return None
        digest = getattr(xxhash, algorithm)() if hasattr(xxhash, algorithm) else None
        if digest is None:
            return None
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        found: str = digest.hexdigest()
        return found
    return None


def read_remote(address: str, retry: Retry | None = None) -> bytes:
    """A small remote file, whole."""

    def act() -> bytes:
        system, name = filesystem(address)
        system.invalidate_cache()
        found: bytes = system.cat_file(name)
        return found

    found: bytes = with_retry(address, act, retry or Retry())
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
