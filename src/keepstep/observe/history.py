"""The history of one run, read incrementally from its files. Every viewer reads a run through this class.

The columns of long runs are also stored in binary, so that a page over five runs of 100,000 steps opens quickly. A run
writes them next to its metrics from time to time. If it did not, a viewer stores its own copy in the user's cache
folder, because a viewer never writes into a run folder. A copy covers the first bytes of metrics.jsonl: it holds their
number and a fingerprint, and is ignored when they have changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keepstep.core.files import cache_folder, read_regular, write_atomic
from keepstep.observe.columns import Columns
from keepstep.observe.run_folder import Record, RunFolder, is_validation, number, read_from, tail

_T = TypeVar("_T")
_PIECE_BYTES = 2 * 2**20
_RECENT_BYTES = 2**18
MIN_BYTES = 2 * 2**20
"""Smaller files are parsed quickly enough without a copy."""
_FORMAT = "keepstep columns 3"
_ENDS_BYTES = 4096
_LATEST_S = 1e11
"""A time after the year 5000 is damage: it overflows in a calendar."""


class History:
    """What a run has written so far. `refresh()` reads only what is new; threads that share one use `lock`."""

    def __init__(self, folder: RunFolder, cache_dir: Path | None = None) -> None:
        self.folder = folder
        self.version = 0
        """Changes whenever something new is read."""
        self._cache_dir = cache_dir
        self.lock = threading.Lock()
        """Blocks `refresh()`, so that all columns keep the same length."""
        self._reset()

    def _reset(self) -> None:
        self.train, self.valid = Columns(), Columns()
        self.events: list[Record] = []
        self.rolled_back = Columns()
        """Steps that were rolled back, in any order: when each ended, its seconds, what it read."""
        self.sources: dict[str, Any] = {}
        self._offsets = {"metrics": 0, "events": 0}
        self._cached: dict[Any, tuple[int, Any]] = {}
        self._first_lines = {"metrics": b"", "events": b""}

    def refresh(self) -> bool:
        """Read what was appended since the last call; True if there was anything."""
        with self.lock:
            before = self.version
            self._start_over_if_replaced()
            if not self._offsets["metrics"]:
                self._offsets["metrics"] = _load(self, self._cache_dir)
                self.version += bool(self._offsets["metrics"])
            first = self._offsets["metrics"]
            for lines in self._new_lines("metrics", self.folder.metrics):
                self._add(lines)
            for events in self._new_lines("events", self.folder.events):
                # Every event has a time: a line without one is damaged.
                self.events.extend(event for event in events if abs(number(event.get("time"))) < _LATEST_S)
            if self._cache_dir and self._offsets["metrics"] - first > MIN_BYTES:
                path = _cache_path(self.folder, self._cache_dir)
                _store(self, path, self._offsets["metrics"])
            return self.version != before

    def store_columns(self) -> None:
        """Write the columns next to the metrics; a run does this from time to time for its viewers."""
        self.refresh()
        with self.lock:
            _store(self, self.folder.columns, self._offsets["metrics"])

    def cached(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The result of `make`, computed once per version of the history."""
        if key not in self._cached or self._cached[key][0] != self.version:
            self._cached[key] = (self.version, make())
        made: _T = self._cached[key][1]
        return made

    def _start_over_if_replaced(self) -> None:
        """Start over if the folder was deleted and created again, or a file was truncated.

        The first lines identify a file, because they hold a time. Inode numbers do not: they are reused.
        """
        paths = {"metrics": self.folder.metrics, "events": self.folder.events}
        first_lines = {name: _first_line(path) for name, path in paths.items()}
        if any(
            first_lines[name] != (self._first_lines[name] or first_lines[name]) or _size(path) < self._offsets[name]
            for name, path in paths.items()
        ):
            version = self.version
            self._reset()
            self.version = version + 1
        self._first_lines = first_lines

    def _new_lines(self, name: str, path: Path) -> Iterator[list[Record]]:
        """What was appended to a file, in pieces."""
        at = -1
        while at < self._offsets[name] < max(1, _size(path)):
            at = self._offsets[name]
            lines, self._offsets[name] = read_from(path, at, _PIECE_BYTES)
            self.version += self._offsets[name] > at
            yield lines

    def _add(self, lines: Sequence[Record]) -> None:
        # Not `<`: a line may have no time, which is NaN.
        rows = [line for line in lines if _is_step(line.get("step")) and not abs(number(line.get("time"))) >= _LATEST_S]
        for piece, repeats in _rising(rows, self.train, lambda row: not is_validation(row)):
            if repeats:
                # The run resumed from an earlier step: drop what it repeats, with validations.
                self._roll_back(float(piece[0]["step"]))
            if train := [row for row in piece if not is_validation(row)]:
                self.train.append(train)
            # A resumed run may validate the same step again: the later validation counts.
            for valid, again in _rising([row for row in piece if is_validation(row)], self.valid, is_validation):
                if again:
                    self.valid.roll_back(float(valid[0]["step"]), ())
                self.valid.append(valid)
        self.sources = next((line["sources"] for line in reversed(lines) if "sources" in line), self.sources)

    def _roll_back(self, step: float) -> None:
        """Move the steps from `step` on, which the run repeats, to `rolled_back`."""
        gone, count = self.train.roll_back(step, ("step", "time", "step_s", "tokens", "samples"))
        for name in ("tokens", "samples"):
            # The lines count from the start of the run; a sum needs the count of each step.
            before = self.train.last(name) if len(self.train) else 0.0
            gone[name] = np.diff(gone[name], prepend=before)
        self.rolled_back.append_arrays(gone, count)
        self.valid.roll_back(step, ())

    def newest_ranks(self) -> Record:
        """The newest sample of all ranks, or an empty record."""
        # A list of many runs reads this every few seconds, and a line may hold thousands of ranks: read little first.
        for limit_bytes in (2**16, 2**20, 2**22, 2**24):
            if lines := tail(self.folder.ranks, limit_bytes):
                return lines[-1]
        return {}

    def newest_samples(self) -> list[Record]:
        """The newest 20 texts that the model generated, newest first."""
        return tail(self.folder.samples, 2**22)[:-21:-1]

    def facts(self) -> Record:
        """The run's facts: total steps, plan, environment, data."""
        try:
            value = json.loads(read_regular(self.folder.facts, 2**24))
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def damage(self) -> list[str]:
        """Files of the run that are not read."""
        run = self.folder
        paths = (run.metrics, run.events, run.ranks, run.samples, run.config, run.facts)
        found = [f"{path.name} is not a regular file" for path in paths if path.is_symlink() or path.is_fifo()]
        if not self.facts() and _size(run.facts) > len("{}\n"):
            found.append("facts.json is not a JSON object")
        return found

    def config_text(self) -> str:
        """The configuration as it was written at the start."""
        try:
            return read_regular(self.folder.config, 2**18).decode(errors="replace")
        except OSError:
            return ""


def _first_line(path: Path) -> bytes:
    """The first complete line, or nothing."""
    try:
        data = read_regular(path, 2**16)
    except FileNotFoundError:
        return b""
    return data[: data.find(b"\n") + 1]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _rising(
    rows: Sequence[Record], table: Columns, belongs: Callable[[Record], bool]
) -> Iterator[tuple[Sequence[Record], bool]]:
    """Rows cut before each row of `table` whose step does not rise, and whether a piece begins with such a row."""
    places = [place for place, row in enumerate(rows) if belongs(row)]
    newest = table.last("step") if len(table) else -math.inf
    falls = np.diff(np.array([newest, *(rows[place]["step"] for place in places)], dtype=np.float64)) <= 0
    cuts = [places[fall] for fall in np.flatnonzero(falls)]
    for first, end in pairwise([0, *cuts, len(rows)]):
        if end > first:
            yield rows[first:end], first in cuts


def _is_step(value: Any) -> bool:
    """Whether `value` is a step number, and not part of a damaged line."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53


def open_history(folder: RunFolder, cache_dir: Path | None = None) -> History:
    """The whole history of a run."""
    history = History(folder, cache_dir)
    history.refresh()
    return history


def open_recent(folder: RunFolder, limit_bytes: int = _RECENT_BYTES) -> History:
    """All events but only the newest metrics: enough for a verdict, quick for a list of many runs."""
    history = History(folder)
    history._offsets["metrics"] = max(0, _size(folder.metrics) - limit_bytes)
    history.refresh()
    return history


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/keepstep/runs`, or the same below the home folder."""
    return cache_folder() / "runs"


def _cache_path(folder: RunFolder, cache_dir: Path) -> Path:
    """Where a viewer stores its copy of a run's columns."""
    name = hashlib.sha256(str(folder.metrics.resolve()).encode()).hexdigest()[:24]
    return cache_dir / f"{name}.columns"


def _store(history: History, path: Path, offset: int) -> None:
    """Store the columns of the first `offset` bytes; a copy that cannot be written is left out."""
    tables = _tables(history)
    header = {
        "format": _FORMAT,
        "offset": offset,
        "fingerprint": _fingerprint(history.folder.metrics, offset),
        "tables": {kind: {"rows": len(table), "columns": table.names} for kind, table in tables.items()},
        "sources": history.sources,
    }
    body = b"".join(table.column(name).tobytes() for table in tables.values() for name in table.names)
    with suppress(OSError):
        write_atomic(path, json.dumps(header).encode() + b"\n" + body)


def _load(history: History, cache_dir: Path | None) -> int:
    """Fill an empty history and return how many bytes of metrics.jsonl it covers; 0 without a valid copy."""
    paths = [history.folder.columns, *([_cache_path(history.folder, cache_dir)] if cache_dir else [])]
    return next((offset for path in paths if (offset := _load_copy(history, path))), 0)


def _tables(history: History) -> dict[str, Columns]:
    return {"train": history.train, "valid": history.valid, "undone": history.rolled_back}


def _load_copy(history: History, path: Path) -> int:
    try:
        header_line, _, body = read_regular(path, 2**30).partition(b"\n")
        header = json.loads(header_line)
        if header["format"] != _FORMAT:
            return 0
        if header["fingerprint"] != _fingerprint(history.folder.metrics, header["offset"]):
            return 0
        numbers = np.frombuffer(body, dtype=np.float64)
        if len(numbers) != sum(table["rows"] * len(table["columns"]) for table in header["tables"].values()):
            return 0
        filled = []
        for kind, table in _tables(history).items():
            rows, names = header["tables"][kind]["rows"], header["tables"][kind]["columns"]
            arrays, numbers = np.split(numbers, [rows * len(names)])
            filled.append((table, dict(zip(names, arrays.reshape(len(names), rows), strict=True)), rows))
        offset, history.sources = int(header["offset"]), header["sources"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    for table, columns, rows in filled:
        table.append_arrays(columns, rows)
    return offset


def _fingerprint(path: Path, offset: int) -> str:
    """A hash of the first and last bytes up to `offset`: an append-only file that changed differs there."""
    first = read_regular(path, min(_ENDS_BYTES, offset))
    last = read_regular(path, min(_ENDS_BYTES, offset), max(0, offset - _ENDS_BYTES))
    return hashlib.sha256(first + last).hexdigest() if len(last) == min(_ENDS_BYTES, offset) else "short"
