"""Object stores through fsspec: S3, Google Cloud Storage, Azure Blob. None can rename; we commit by conditional put."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from keepstep.core.errors import CheckpointError, KeepstepError

PART_BYTES = 64 * 1024 * 1024
_URL = re.compile(r"^([a-z][a-z0-9]+):/+(.*)$")
_ONLY_IF_ABSENT: dict[str, dict[str, Any]] = {
    "s3": {"mode": "create"},
    "gs": {"mode": "create"},
    "memory": {"mode": "create"},
    "abfs": {"overwrite": False},
}
"""How each kind is asked to put an object only if there is none of that name (If-None-Match and its like)."""
_SAME = {"s3a": "s3", "gcs": "gs", "az": "abfs", "adl": "abfs"}


def parse_url(place: str) -> tuple[str, str] | None:
    """(protocol, path) of an object store's address, or None for a local path. Forgives a slash that `Path` ate."""
    match = _URL.match(place)
    return (match[1], match[2]) if match else None


class StoreError(OSError):
    """An object store could not be asked: no connection, no credentials. Its libraries have errors of their own."""


class ObjectStore:
    """A prefix in a bucket."""

    def __init__(self, protocol: str, path: str) -> None:
        kind = _SAME.get(protocol, protocol)
        if kind not in _ONLY_IF_ABSENT:
            raise CheckpointError(
                f"checkpoints cannot be committed on {protocol}://: it has no put-if-absent that we know",
                f"use a local path or one of {', '.join(f'{name}://' for name in sorted({*_ONLY_IF_ABSENT, *_SAME}))}",
            )
        self._if_absent = _ONLY_IF_ABSENT[kind]
        self._url = f"{protocol}://{path.rstrip('/')}"
        self._files, self._root = _filesystem(self._url)

    def names(self, folder: str = "") -> list[str]:
        """Names directly inside `folder`, sorted; empty when there is no such folder."""
        path = self._path(folder)
        try:
            with self._asking():
                found = self._files.ls(path, detail=False, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != path.rstrip("/")})

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError when absent."""
        with self._asking():
            return int(self._files.info(self._path(name), refresh=True)["size"])

    def read(self, name: str) -> bytes:
        """All of a small file."""
        with self._asking():
            content: bytes = self._files.cat_file(self._path(name))
        return content

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""
        with self._asking():
            content = self._files.cat_file(self._path(name), start=offset, end=offset + len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Upload a new object in parts; it appears whole when the last part is in."""
        with self._asking(), self._files.open(self._path(name), "wb", block_size=PART_BYTES) as file:
            for piece in pieces:
                for start in range(0, len(piece), PART_BYTES):
                    file.write(piece[start : start + PART_BYTES])

    def create(self, name: str, content: bytes) -> None:
        """Put a small object only if there is none of that name; else FileExistsError."""
        with self._asking():
            self._files.pipe_file(self._path(name), content, **self._if_absent)

    def replace(self, name: str, content: bytes) -> None:
        """Put a small object, over an older one if need be."""
        with self._asking():
            self._files.pipe_file(self._path(name), content)

    def move(self, name: str, target: str) -> None:
        """Copy over the target, then delete."""
        with self._asking():
            self._files.cp_file(self._path(name), self._path(target))
            self._files.rm_file(self._path(name))

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone already is fine."""
        with suppress(FileNotFoundError), self._asking():
            self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Delete everything below a prefix; nothing there is fine."""
        with suppress(FileNotFoundError), self._asking():
            self._files.rm(self._path(name), recursive=True)

    def free_bytes(self) -> int | None:
        """A bucket does not fill up."""
        return None

    def locate(self, name: str = "") -> str:
        """The name as a person would write it."""
        return f"{self._url}/{name}" if name else self._url

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn whatever a store's library raises into an OSError, which everybody here is ready for."""
        try:
            yield
        except (OSError, KeepstepError):
            raise
        except Exception as error:
            raise StoreError(f"{self._url} cannot be used: {str(error) or type(error).__name__}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system behind a URL, with listings never cached: others write here at the same time."""
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise CheckpointError(f"{url} needs a package that is not installed: {error}", "pip install s3fs") from error
    return files, root
