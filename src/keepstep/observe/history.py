"""One run as its files tell it, read piece by piece: the only way anything in keepstep looks at a run."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keepstep.observe import cache
from keepstep.observe.columns import Columns
from keepstep.observe.folder import JsonLines, Record, RunFolder, is_validation, number, read_from

_T = TypeVar("_T")
_TAIL_BYTES = 4 * 2**20
_PIECE_BYTES = 2 * 2**20
_GLANCE_BYTES = 2**18


class History:
    """What a run has written so far. `refresh()` reads only what is new; threads that share one hold it to look."""

    def __init__(self, folder: RunFolder, cache_dir: Path | None = None) -> None:
        self.folder = folder
        self.version = 0
        """Changes whenever something new was read."""
        self._cache_dir = cache_dir
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.train, self.valid = Columns(), Columns()
        self.events: list[Record] = []
        self.undone = Columns()
        """Steps that were done and then gone back from, in no order: when each ended, its seconds, what it read."""
        self.sources: dict[str, Any] = {}
        self._offsets = {"metrics": 0, "events": 0}
        self._remembered: dict[Any, tuple[int, Any]] = {}
        self._first_lines = {"metrics": b"", "events": b""}

    def refresh(self) -> bool:
        """Read what was appended since; True when there was anything."""
        with self._lock:
            before = self.version
            self._start_over_if_replaced()
            if not self._offsets["metrics"]:
                self._offsets["metrics"] = cache.load(self, self._cache_dir)
                self.version += bool(self._offsets["metrics"])
            read_bytes = self._read_metrics()
            events, self._offsets["events"] = read_from(self.folder.events, self._offsets["events"])
            # Every event has a time: one without is a damaged line, which is worth nothing to anybody.
            self.events.extend(event for event in events if math.isfinite(number(event.get("time"))))
            self.version += bool(events)
            if self._cache_dir and read_bytes > cache.WORTH_BYTES:
                cache.store(self, cache.place(self.folder, self._cache_dir), self._offsets["metrics"])
            return self.version != before

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this lasts nothing new is read, so that all columns are of the same length."""
        with self._lock:
            yield

    def keep_columns(self) -> None:
        """Write the columns beside the metrics: what a run does for its viewers every so often."""
        self.refresh()
        with self._lock:
            cache.store(self, self.folder.columns, self._offsets["metrics"])

    def remember(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` gives, made once for what has been read so far."""
        version, value = self._remembered.get(key, (-1, None))
        if version != self.version:
            version, value = self.version, make()
            self._remembered[key] = (version, value)
        made: _T = value
        return made

    def skip_to_last(self, limit_bytes: int) -> None:
        """Leave out all but the last bytes of the metrics; before the first `refresh`."""
        if self.folder.metrics.is_file():
            self._offsets["metrics"] = max(0, self.folder.metrics.stat().st_size - limit_bytes)

    def _start_over_if_replaced(self) -> None:
        """A folder that was deleted and made anew, or a file cut short, is another history.

        The first lines tell, as they carry a time: file numbers are given to new files again.
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

    def _read_metrics(self) -> int:
        start, piece_bytes = self._offsets["metrics"], _PIECE_BYTES
        while True:
            at = self._offsets["metrics"]
            lines, self._offsets["metrics"] = read_from(self.folder.metrics, at, piece_bytes)
            if self._offsets["metrics"] == at:
                if _size(self.folder.metrics) - at <= piece_bytes:
                    return at - start
                # No end of a line in all of it: damage, such as a hole that a power cut left. Lines follow behind it.
                piece_bytes *= 2
                continue
            piece_bytes = _PIECE_BYTES
            self._take(lines)
            self.version += 1

    def _take(self, lines: Sequence[Record]) -> None:
        rows = [line for line in lines if _is_step(line.get("step"))]
        places = [place for place, row in enumerate(rows) if not is_validation(row)]
        steps = np.array([_newest_step(self.train), *(rows[place]["step"] for place in places)], dtype=np.float64)
        # Where the step does not rise the run resumed from before, and what it undid goes: validations, too.
        falls = [places[fall] for fall in np.flatnonzero(np.diff(steps) <= 0)]
        for first, end in pairwise([0, *falls, len(rows)]):
            if first in falls and end > first:
                self._go_back(float(rows[first]["step"]))
            piece = rows[first:end]
            if train := [row for row in piece if not is_validation(row)]:
                self.train.append(train)
            if valid := [row for row in piece if is_validation(row)]:
                self._take_validations(valid)
        self.sources = next((line["sources"] for line in reversed(lines) if "sources" in line), self.sources)

    def _go_back(self, step: float) -> None:
        """The run does `step` again."""
        gone, count = self.train.rewind(step, ("step", "time", "step_s", "tokens", "samples"))
        for name in ("tokens", "samples"):
            # Lines tell how many it were so far; a sum needs each step's own.
            before = self.train.last(name) if len(self.train) else 0.0
            gone[name] = np.diff(gone[name], prepend=before)
        self.undone.append_arrays(gone, count)
        self.valid.rewind(step, ())

    def _take_validations(self, rows: Sequence[Record]) -> None:
        """A run that resumes may validate the step it resumed at once more: the later one counts."""
        steps = np.array([_newest_step(self.valid), *(row["step"] for row in rows)], dtype=np.float64)
        falls = np.flatnonzero(np.diff(steps) <= 0).tolist()
        for first, end in pairwise([0, *falls, len(rows)]):
            if first in falls and end > first:
                self.valid.rewind(float(rows[first]["step"]), ())
            if end > first:
                self.valid.append(rows[first:end])

    def newest_ranks(self) -> Record:
        """The newest look at all ranks, or an empty record."""
        # A list of many runs asks each of them every few seconds, and a line tells of thousands of ranks.
        for limit_bytes in (2**16, 2**20, _TAIL_BYTES, 4 * _TAIL_BYTES):
            if lines := tail(self.folder.ranks, limit_bytes):
                return lines[-1]
        return {}

    def newest_samples(self, count: int = 20) -> list[Record]:
        """The newest texts the model wrote, newest first."""
        return tail(self.folder.samples)[: -count - 1 : -1]

    def facts(self) -> Record:
        """The run's facts: total steps, plan, environment, data."""
        try:
            value = json.loads(self.folder.facts.read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def config_text(self) -> str:
        """The configuration as written at the start."""
        try:
            return self.folder.config.read_text(errors="replace")
        except OSError:
            return ""


def _first_line(path: Path) -> bytes:
    """Empty where there is no whole line yet."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return b""
    return line if line.endswith(b"\n") else b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _newest_step(table: Columns) -> float:
    return table.last("step") if len(table) else -math.inf


def _is_step(value: Any) -> bool:
    """Whether this counts steps, and is not what is left of a damaged line."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53


def tail(path: Path, limit_bytes: int = _TAIL_BYTES) -> list[Record]:
    """The last whole lines of a file, without reading the rest of it."""
    try:
        size = path.stat().st_size
    except OSError:
        return []
    if size <= limit_bytes:
        return JsonLines(path).read()
    # The first piece is the end of a line that began earlier: not an object, so it is skipped.
    return read_from(path, size - limit_bytes)[0]


def open_history(folder: RunFolder, cache_dir: Path | None = None) -> History:
    """A history that has read everything there is."""
    history = History(folder, cache_dir)
    history.refresh()
    return history


def glance(folder: RunFolder, limit_bytes: int = _GLANCE_BYTES) -> History:
    """A history of all events but of the newest metrics only: enough for a verdict, quick for a list of many runs."""
    history = History(folder)
    history.skip_to_last(limit_bytes)
    history.refresh()
    return history
