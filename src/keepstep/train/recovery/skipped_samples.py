"""Training samples that a rollback took out of the run, in a file of its folder that is only appended to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from keepstep.core.errors import DataError, malformed_as


class SkippedSamples:
    """Ranges of training samples that no step uses."""

    def __init__(self, path: Path, is_first: Callable[[], bool]) -> None:
        """`is_first` says whether this process writes for all."""
        self._path, self._is_first = path, is_first
        # One process reads for all: others may not see the folder, or not its newest line yet.
        found: list[Any] = [read_skipped(path) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        self.ranges: list[tuple[int, int]] = found[0]
        """First sample and count of each."""

    def add(self, first_sample: int, count: int, step: int) -> None:
        """Skip these from now on; on disk when this returns."""
        self.ranges.append((first_sample, count))
        if self._is_first():
            written = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
            with self._path.open("a", encoding="utf-8") as file:
                # A file edited by hand may end without a newline.
                file.write("\n" if written and not written.endswith("\n") else "")
                file.write(json.dumps({"first_sample": first_sample, "count": count, "step": step}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def read_skipped(path: Path) -> list[tuple[int, int]]:
    """First sample and count of each range in a run's file; none where there is no file."""
    if not path.is_file():
        return []
    ranges = []
    example = 'lines look like {"first_sample": 0, "count": 8}'
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        with malformed_as(DataError, f"{path} line {number} is not a range of samples", example):
            record = json.loads(line)
            ranges.append((int(record["first_sample"]), int(record["count"])))
    return ranges
