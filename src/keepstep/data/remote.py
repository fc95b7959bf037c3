"""Files that live elsewhere, through fsspec: found, waited for when their store is away, copied, checked."""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, HardwareError

_BLOCK_BYTES = 1 << 20
_EXTRAS = {"s3": "s3", "abfs": "azure", "az": "azure", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_NETWORK_WORDS = ("Connect", "Timeout", "Disconnected", "ServiceRe", "ServerError", "Payload")
_CREDENTIAL_WORDS = ("Credential", "Authentication")


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
            if not is_network(error) and (
                isinstance(error, FileNotFoundError | PermissionError)
                or any(word in type(error).__name__ for word in _CREDENTIAL_WORDS)
            ):
                raise DataError(
                    f"{what} is missing or not ours to read: {error}", "check the address, then its credentials"
                ) from error
            if is_full(error):
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


def is_full(error: BaseException) -> bool:
    """Whether an error says that a local disk has no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_network(error: BaseException) -> bool:
    """Whether a lost connection hides behind an error: some file systems call an unreachable file a missing one."""
    cause: BaseException | None = error
    while cause is not None:
        name = type(cause).__name__
        if isinstance(cause, ConnectionError | TimeoutError) or any(word in name for word in _NETWORK_WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def broke_off(address: str, error: BaseException) -> HardwareError:
    """What to say about a transfer that did not come to its end."""
    return HardwareError(
        f"{address} could not be read to its end: {type(error).__name__}: {error}",
        "the store or the network is down: start the same command again when it is back",
    )


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch, and what is known about it beforehand."""

    address: str
    size_bytes: int = -1
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Checksums by algorithm; those that this machine can compute are checked on arrival."""

    @property
    def identity(self) -> str:
        """Differs when the file at the address has become another one, as far as its index tells."""
        return f"{self.address} {self.size_bytes} {sorted(self.hashes.items())}"


def copy(address: str, path: Path) -> None:
    """Copy a remote file over a local one that is there already, whatever its length."""
    system, name = filesystem(address)
    # A listing remembered from before would hide a file that has come since.
    system.invalidate_cache()
    with system.open(name, "rb", block_size=_BLOCK_BYTES) as source, path.open("r+b") as target:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)
        target.truncate()


def what_is_wrong(path: Path, file: RemoteFile) -> str:
    """How a copy differs from what is known about its file; empty when nothing does."""
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
