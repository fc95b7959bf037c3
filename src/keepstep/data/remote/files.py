"""Remote files through fsspec: open, copy and check them, and retry while their store is unreachable."""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from keepstep.core.errors import DataAccessError, DataError, HardwareError
from keepstep.core.requests import count_request
from keepstep.core.verbosity import debug

_BLOCK_BYTES = 1 << 20
_EXTRAS = {"s3": "s3", "abfs": "azure", "az": "azure", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_NETWORK_WORDS = ("Connect", "Timeout", "Disconnected", "ServiceRe", "ServerError", "Payload")
_CREDENTIAL_WORDS = ("Credential", "Authentication")

Result = TypeVar("Result")


def is_remote(path: str) -> bool:
    """Whether a path is an address."""
    return "://" in path


def filesystem(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address and the path in it; credentials come from the environment."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        extra = _EXTRAS.get(address.split("://", 1)[0])
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
    """How long to retry while a file system is unreachable."""

    timeout_s: float = 600.0
    """Give up after this long without success."""
    first_wait_s: float = 0.2
    longest_wait_s: float = 15.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)


def with_retry(what: str, act: Callable[[], Result], retry: Retry = Retry()) -> Result:  # noqa: B008
    """Call `act` until it succeeds; an error that waiting cannot fix is raised immediately."""
    start_s = time.monotonic()
    wait_s = retry.first_wait_s
    while True:
        try:
            return act()
        except (DataError, HardwareError):
            raise
        except Exception as error:  # every file system has errors of its own; all of them may be the network
            if not is_network(error) and (
                isinstance(error, FileNotFoundError | PermissionError)
                or any(word in type(error).__name__ for word in _CREDENTIAL_WORDS)
            ):
                raise DataAccessError(
                    f"{what} is missing or may not be read: {error}", "check the address, then its credentials"
                ) from error
            if is_full(error):
                raise
            if time.monotonic() - start_s + wait_s > retry.timeout_s:
                raise transfer_error(what, error, f"for {retry.timeout_s:.0f} s") from error
            if time.monotonic() - start_s > 5:
                print(f"notice: waiting for {what}: {type(error).__name__}: {error}", file=sys.stderr)
            # Jitter keeps a thousand processes from retrying at the same moment.
            retry.sleep(wait_s * random.uniform(0.7, 1.3))
            wait_s = min(2 * wait_s, retry.longest_wait_s)


def is_full(error: BaseException) -> bool:
    """Whether a local disk has no space left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_network(error: BaseException) -> bool:
    """Whether a lost connection caused an error: some file systems report an unreachable file as a missing one."""
    cause: BaseException | None = error
    while cause is not None:
        name = type(cause).__name__
        if isinstance(cause, ConnectionError | TimeoutError) or any(word in name for word in _NETWORK_WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def transfer_error(address: str, error: BaseException, extent: str = "to its end") -> HardwareError:
    """The error for a transfer that was interrupted."""
    return HardwareError(
        f"{address} could not be read {extent}: {type(error).__name__}: {error}",
        "the store or the network is down: start the same command again when it is back",
    )


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch, and what is known about it in advance."""

    address: str
    size_bytes: int = -1
    hashes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Checksums by algorithm; those that this machine can compute are checked after the transfer."""
    version: str = ""
    """Changes when the file is written again, where checksums may be missing."""

    @property
    def identity(self) -> str:
        """Changes when the file at the address changes, according to its size, checksums and version."""
        return f"{self.address} {self.size_bytes} {sorted(self.hashes.items())} {self.version}".rstrip()


def copy(address: str, path: Path) -> None:
    """Copy a remote file over an existing local one of any length."""
    debug(f"fetching {address}")
    system, name = filesystem(address)
    # A cached listing would hide files that were added since.
    system.invalidate_cache()
    with system.open(name, "rb", block_size=_BLOCK_BYTES) as source, path.open("r+b") as target:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)
        target.truncate()
        if "://" in address:
            # fsspec's cache knows how often it asked; a stream without one is a single request.
            reads = getattr(getattr(source, "cache", None), "miss_count", 1)
            count_request("HEAD")
            count_request("GET", max(1, reads), read_bytes=target.tell())


def find_mismatch(path: Path, file: RemoteFile) -> str:
    """How a copy differs from its file's size and checksums; empty if it does not."""
    size_bytes = path.stat().st_size
    if 0 <= file.size_bytes != size_bytes:
        return f"came with {size_bytes:,} bytes instead of {file.size_bytes:,}"
    for name, expected in file.hashes.items():
        if digest_file(path, name) not in (None, expected):
            return f"came with another {name} than its index has"
    return ""


def digest_file(path: Path, algorithm: str) -> str | None:
    """A checksum, by mosaicml-streaming's algorithm names; None for an algorithm this machine does not have."""
    digest: Any = algorithm if algorithm in hashlib.algorithms_available else None
    if algorithm.startswith("xxh") and find_spec("xxhash"):
        digest = getattr(import_module("xxhash"), algorithm, None)
    if digest is None:
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, digest).hexdigest()


def read_remote(address: str) -> bytes:
    """All bytes of a small remote file."""

    def act() -> bytes:
        system, name = filesystem(address)
        system.invalidate_cache()
        found: bytes = system.cat_file(name)
        count_request("HEAD")
        count_request("GET", read_bytes=len(found))
        return found

    return with_retry(address, act)
