"""Object stores through fsspec: S3, Google Cloud Storage, Azure Blob. None can rename: commits are conditional puts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from keepstep.core.errors import CheckpointError, KeepstepError
from keepstep.core.requests import count_request

PART_BYTES = 64 * 1024 * 1024
_URL = re.compile(r"^([a-z][a-z0-9]+):/+(.*)$")
_ONLY_IF_ABSENT: dict[str, dict[str, Any]] = {
    "s3": {"mode": "create"},
    "gs": {"mode": "create"},
    "memory": {"mode": "create"},
    "abfs": {"overwrite": False},
}
"""The option of each store that creates an object only if it is absent (If-None-Match and similar)."""
_SAME = {"s3a": "s3", "gcs": "gs", "az": "abfs", "adl": "abfs"}


def parse_url(place: str) -> tuple[str, str] | None:
    """(protocol, path) of an object store URL, or None for a local path. Accepts `s3:/x`, as `Path` would write it."""
    match = _URL.match(place)
    return (match[1], match[2]) if match else None


class StoreError(OSError):
    """A request to an object store failed: no connection, no credentials. Wraps the errors of its library."""


class ObjectStore:
    """A prefix in a bucket."""

    def __init__(self, protocol: str, path: str) -> None:
        kind = _SAME.get(protocol, protocol)
        if kind not in _ONLY_IF_ABSENT:
            raise CheckpointError(
                f"checkpoints cannot be committed on {protocol}://: keepstep knows no atomic create for it",
                f"use a local path or one of {', '.join(f'{name}://' for name in sorted({*_ONLY_IF_ABSENT, *_SAME}))}",
            )
        self._if_absent = _ONLY_IF_ABSENT[kind]
        self._url = f"{protocol}://{path.rstrip('/')}"
        import fsspec

        try:
            # Without a listings cache: other processes write here at the same time.
            self._files, self._root = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        except ImportError as error:
            message = f"{self._url} needs a package that is not installed: {error}"
            raise CheckpointError(message, "pip install s3fs") from error

    def names(self, folder: str = "") -> list[str]:
        """Names directly inside `folder`, sorted; empty when there is no such folder."""
        path = self._path(folder)
        count_request("LIST")
        try:
            with self._asking():
                found = self._files.ls(path, detail=False, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != path.rstrip("/")})

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError when absent."""
        count_request("HEAD")
        with self._asking():
            return int(self._files.info(self._path(name), refresh=True)["size"])

    def read(self, name: str) -> bytes:
        """All of a small file."""
        with self._asking():
            content: bytes = self._files.cat_file(self._path(name))
        # Without a range the client asks for the size first.
        count_request("HEAD")
        count_request("GET", read_bytes=len(content))
        return content

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""
        with self._asking():
            content = self._files.cat_file(self._path(name), start=offset, end=offset + len(buffer))
        count_request("GET", read_bytes=len(content))
        buffer[: len(content)] = content
        return len(content)

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Upload a new object in parts; it appears when the last part is uploaded."""
        size_bytes = 0
        with self._asking(), self._files.open(self._path(name), "wb", block_size=PART_BYTES) as file:
            for piece in pieces:
                size_bytes += len(piece)
                for start in range(0, len(piece), PART_BYTES):
                    file.write(piece[start : start + PART_BYTES])
        # Several parts are joined by one more request, and S3 wants one before the first.
        parts = max(1, -(-size_bytes // PART_BYTES))
        joined = 0 if parts == 1 else 2 if self._url.startswith("s3") else 1
        count_request("PUT", parts + joined, written_bytes=size_bytes)

    def create(self, name: str, content: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Create a small object; FileExistsError when there is one of that name. `check` may refuse by raising."""
        check()
        count_request("PUT", written_bytes=len(content))
        with self._asking():
            self._files.pipe_file(self._path(name), content, **self._if_absent)

    def replace(self, name: str, content: bytes) -> None:
        """Write a small object, replacing an older one."""
        count_request("PUT", written_bytes=len(content))
        with self._asking():
            self._files.pipe_file(self._path(name), content)

    overwrite = replace

    def refresh(self, folder: str) -> None:
        """Nothing to do: a listing is never older than the last put."""

    def move(self, name: str, target: str) -> None:
        """Copy over the target, then delete."""
        count_request("PUT")
        count_request("DELETE")
        with self._asking():
            self._files.cp_file(self._path(name), self._path(target))
            self._files.rm_file(self._path(name))

    def remove(self, name: str) -> None:
        """Delete a file; a missing one is not an error."""
        count_request("DELETE")
        with suppress(FileNotFoundError), self._asking():
            self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Delete everything below a prefix; a missing one is not an error."""
        count_request("LIST")
        with suppress(FileNotFoundError), self._asking():
            self._files.rm(self._path(name), recursive=True)

    def free_bytes(self) -> int | None:
        """None: a bucket does not fill up."""
        return None

    def locate(self, name: str = "") -> str:
        """The full URL of a name, for messages."""
        return f"{self._url}/{name}" if name else self._url

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn the errors of a store's library into OSErrors, which all callers handle."""
        try:
            yield
        except (OSError, KeepstepError):
            raise
        except Exception as error:
            raise StoreError(f"{self._url} cannot be used: {str(error) or type(error).__name__}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root
