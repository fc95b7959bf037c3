"""Calls callbacks in the caller's process, from what a run appends to its files.

There, and not in a worker: a callback is often a closure over a notebook's variables, which no other process has.
A slow or failing one stalls no rank, and it outlives the workers that a fault ends.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keepstep.core.callbacks import Callback
from keepstep.core.files import write_atomic
from keepstep.observe.run_folder import Record, RunFolder, is_validation, number, read_from, whole
from keepstep.observe.verdict import describe

STATE_FILE = "callbacks.json"
"""Inside the run's folder: the callbacks' states by step, for the newest saved steps."""
_STEPS_KEPT = 16


class Follower:
    """Reads new lines of a run, and calls the callbacks in the order of the lines' times."""

    def __init__(self, folder: RunFolder, callbacks: Sequence[Callback]) -> None:
        self._folder, self._callbacks = folder, callbacks
        # What earlier calls wrote is not repeated.
        self._offsets = {path: path.stat().st_size if path.exists() else 0 for path in (folder.events, folder.metrics)}
        self._states: dict[int, list[Any]] = _read_states(folder.root / STATE_FILE)
        self._saved = set(self._states)
        self._step = -1
        self._waiting: deque[Record] = deque()

    def poll(self) -> None:
        """Handle what was written since the last call."""
        if not self._callbacks:
            return
        lines: list[Record] = []
        # Events first: the steps before an event are on disk when the event is.
        for path, offset in self._offsets.items():
            found, self._offsets[path] = read_from(path, offset)
            lines += found
        self._waiting.extend(sorted(lines, key=lambda line: number(line.get("time"))))
        while self._waiting:
            # Taken out first: after an interrupt in a callback, the next call continues with the line behind it.
            self._handle(self._waiting.popleft())

    def _handle(self, line: Record) -> None:
        step, kind = whole(line.get("step")), line.get("kind")
        if kind is None:
            metrics = {name: number(value) for name, value in line.items() if isinstance(value, int | float | str)}
            if is_validation(line):
                for callback in self._callbacks:
                    callback.on_evaluation(step, metrics)
            else:
                self._follow_step(step, metrics)
        elif kind == "checkpoint_committed":
            self._store_states(step)
            for callback in self._callbacks:
                callback.on_save(step, str(self._folder.checkpoints / str(line.get("folder", ""))))
        elif kind in ("fault", "guard"):
            for callback in self._callbacks:
                callback.on_fault(step, describe(line))

    def _follow_step(self, step: int, metrics: dict[str, float]) -> None:
        if step != self._step + 1 and step - 1 in self._states:
            # The run resumed or rolled back: so do the callbacks.
            for callback, state in zip(self._callbacks, self._states[step - 1], strict=False):
                callback.load_state_dict(state)
        self._step = step
        for callback in self._callbacks:
            callback.on_step(step, metrics)
        self._states[step] = [callback.state_dict() for callback in self._callbacks]

    def _store_states(self, step: int) -> None:
        """Keep the states of a saved step; a save is committed some steps later, when the states are newer."""
        self._saved.add(step)
        kept = sorted(self._saved & self._states.keys())[-_STEPS_KEPT:]
        self._states = {known: state for known, state in self._states.items() if known in kept or known > step}
        if any(map(any, self._states.values())):
            text = json.dumps({known: self._states[known] for known in kept})
            write_atomic(self._folder.root / STATE_FILE, text + "\n")


def _read_states(path: Path) -> dict[int, list[Any]]:
    with suppress(OSError, ValueError, AttributeError):
        return {int(step): list(states) for step, states in json.loads(path.read_text()).items()}
    return {}
