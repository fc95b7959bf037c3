"""Data sets on the Hugging Face Hub: list them, fetch their files with patience, at a polite pace, and go on later."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError
from keepstep.data.remote import Retry, with_retry

_PREFIX = "hf://datasets/"
_CARD = "README.md"


@dataclass(frozen=True)
class HubAddress:
    """`hf://datasets/OWNER/NAME[@REVISION]/PATTERN`."""

    repository: str
    revision: str
    pattern: str

    @classmethod
    def parse(cls, address: str) -> HubAddress:
        """Read an address; an error shows how one looks."""
        parts = address.removeprefix(_PREFIX).split("/")
        if not address.startswith(_PREFIX) or len(parts) < 2 or not all(parts[:2]):
            raise DataError(f"{address} is no data set address", "for example hf://datasets/allenai/c4/en/*.json.gz")
        name, _, revision = parts[1].partition("@")
        return cls(f"{parts[0]}/{name}", revision or "main", "/".join(parts[2:]) or "**")

    def file(self, path: str) -> str:
        """The address of one file."""
        owner, name = self.repository.split("/")
        return f"{_PREFIX}{owner}/{name}@{self.revision}/{path}"


def _client() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DataError("Hub data sets need huggingface_hub", "pip install huggingface_hub") from error
    return HfApi()


def list_files(address: str, retry: Retry | None = None) -> Iterator[tuple[str, int]]:
    """Address and size of every file that matches, at one commit, so that a build never mixes two versions."""
    wanted = HubAddress.parse(address)
    client = _client()

    def look() -> tuple[str, list[tuple[str, int]]]:
        commit = client.repo_info(wanted.repository, revision=wanted.revision, repo_type="dataset").sha
        fixed = wanted.pattern.split("*", 1)[0].rpartition("/")[0]
        tree = client.list_repo_tree(
            wanted.repository, path_in_repo=fixed or None, recursive=True, revision=commit, repo_type="dataset"
        )
        return commit, [(entry.path, entry.size) for entry in tree if hasattr(entry, "size")]

    commit, files = with_retry(address, lambda: _translate(address, look), retry or Retry())
    pinned = HubAddress(wanted.repository, commit, wanted.pattern)
    for path, size_bytes in sorted(files):
        if _is_wanted(path, wanted.pattern):
            yield pinned.file(path), size_bytes


def _is_wanted(path: str, pattern: str) -> bool:
    # Every data set has a card, which is about its documents and none of them.
    if path == _CARD:
        return pattern == _CARD
    return fnmatch.fnmatch(path, pattern) or pattern == "**" or path.startswith(pattern + "/")


def fetch(address: str, folder: Path | None = None, retry: Retry | None = None, pace: Pace | None = None) -> str:
    """A local copy of one file; an interrupted transfer goes on where it stopped."""
    from huggingface_hub import hf_hub_download

    wanted = HubAddress.parse(address)

    def act() -> str:
        return str(
            hf_hub_download(
                wanted.repository,
                wanted.pattern,
                repo_type="dataset",
                revision=wanted.revision,
                local_dir=folder,
            )
        )

    found: str = with_retry(address, lambda: _translate(address, act), retry or Retry())
    if pace is not None:
        pace.spend(os.path.getsize(found))  # noqa: PTH202 - the Hub's client speaks in strings
    return found


def _translate(address: str, act: Any) -> Any:
    """The Hub's own errors, as ours where waiting will not help."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return act()
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__ or error, OfflineModeIsEnabled):
            raise DataError(f"{address} is not here and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE") from error
        # What the client says when it could not ask: nothing is known about the file yet.
        raise ConnectionError(f"the Hub cannot be asked: {error.__cause__ or error}") from error
    except GatedRepoError as error:
        raise DataError(f"{address} is gated: {error}", "accept its terms on the Hub, then hf auth login") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        raise DataError(f"{address} is not on the Hub", "check the name; private ones need hf auth login") from error


class Pace:
    """Keeps a mean rate: after each transfer, wait until it would have taken that long."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = time.monotonic()

    def spend(self, size_bytes: int) -> None:
        """Account for a transfer."""
        if self._bytes_per_s <= 0:
            return
        self._free_at_s = max(self._free_at_s, time.monotonic() - 1) + size_bytes / self._bytes_per_s
        wait_s = self._free_at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
