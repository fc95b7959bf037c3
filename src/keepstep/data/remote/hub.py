"""Data sets on the Hugging Face Hub: list and fetch their files, with retries, a rate limit and resumed transfers."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, UsageError
from keepstep.data.remote.files import Result, Retry, with_retry

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
        """Read an address; the error shows an example of one."""
        parts = address.removeprefix(_PREFIX).split("/")
        if not address.startswith(_PREFIX) or len(parts) < 2 or not all(parts[:2]):
            raise DataError(f"{address} is not a data set address", "for example hf://datasets/allenai/c4/en/*.json.gz")
        name, _, revision = parts[1].partition("@")
        return cls(f"{parts[0]}/{name}", revision or "main", "/".join(parts[2:]) or "**")


def list_files(address: str) -> Iterator[tuple[str, int]]:
    """Address and size of every matching file, at one commit, so that a build never mixes two versions."""
    from huggingface_hub import HfApi

    wanted = HubAddress.parse(address)
    client: Any = HfApi()

    def look() -> tuple[str, list[tuple[str, int]]]:
        commit = client.repo_info(wanted.repository, revision=wanted.revision, repo_type="dataset").sha
        fixed = wanted.pattern.split("*", 1)[0].rpartition("/")[0]
        tree = client.list_repo_tree(
            wanted.repository, path_in_repo=fixed or None, recursive=True, revision=commit, repo_type="dataset"
        )
        return commit, [(entry.path, entry.size) for entry in tree if hasattr(entry, "size")]

    commit, files = with_retry(address, lambda: _translate(address, look))
    for path, size_bytes in sorted(files):
        if _is_wanted(path, wanted.pattern):
            yield f"{_PREFIX}{wanted.repository}@{commit}/{path}", size_bytes


def _is_wanted(path: str, pattern: str) -> bool:
    # The data set card describes the documents and is not one of them.
    if path == _CARD:
        return pattern == _CARD
    return fnmatch.fnmatch(path, pattern) or pattern == "**" or path.startswith(pattern + "/")


def fetch(address: str, folder: Path | None = None, retry: Retry | None = None) -> str:
    """A local copy of one file; an interrupted transfer resumes where it stopped."""
    from huggingface_hub import hf_hub_download

    wanted = HubAddress.parse(address)

    def act() -> str:
        return str(
            hf_hub_download(
                wanted.repository, wanted.pattern, repo_type="dataset", revision=wanted.revision, local_dir=folder
            )
        )

    return with_retry(address, lambda: _translate(address, act), retry or Retry())


def is_model_name(name: str) -> bool:
    """Whether it can be a model on the Hub, OWNER/NAME, and not a path."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not name.endswith(".json")


def fetch_model(name: str, patterns: Sequence[str]) -> Path:
    """A local folder with the files of OWNER/NAME that match a pattern."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # whatever the Hub's client raises, the user can only fix name, network or access
        raise UsageError(
            f"{name} is no local path and cannot be downloaded: {error}", "check the name, the network and your access"
        ) from None


def _translate(address: str, act: Callable[[], Result]) -> Result:
    """Translate the Hub's errors: those that waiting cannot fix become ours."""
    from huggingface_hub import errors

    try:
        return act()
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__ or error, errors.OfflineModeIsEnabled):
            raise DataError(f"{address} is not cached and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE") from error
        # The client raises this when it could not reach the Hub: the file may well exist.
        raise ConnectionError(f"the Hub cannot be reached: {error.__cause__ or error}") from error
    except errors.GatedRepoError as error:
        raise DataError(f"{address} is gated: {error}", "accept its terms on the Hub, then hf auth login") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise DataError(f"{address} is not on the Hub", "check the name; private ones need hf auth login") from error


class RateLimit:
    """Keeps a mean rate: after each transfer, wait until it would have taken that long."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = time.monotonic()

    def spend(self, size_bytes: int) -> None:
        """Account for a transfer and wait."""
        if self._bytes_per_s <= 0:
            return
        self._free_at_s = max(self._free_at_s, time.monotonic() - 1) + size_bytes / self._bytes_per_s
        wait_s = self._free_at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
