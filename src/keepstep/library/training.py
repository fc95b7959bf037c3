"""`keepstep.train`: a run in processes of its own, followed from the caller's process.

The run is `keepstep train` as a child process. So the caller's `__main__` is never imported again, no signal handler or
environment variable of the caller changes, and a crash of the run is an exception here.

Callbacks are called in the caller's process, from what the run appends to its files: a callback is often a closure over
a notebook's variables, which no other process has. A slow or failing one stalls no rank, and it outlives the workers
that a fault ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keepstep.config.load import load_config
from keepstep.core.callbacks import Callback
from keepstep.core.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_HARDWARE,
    EXIT_STOPPED,
    DataError,
    HardwareError,
    KeepstepError,
    StopRequested,
    UsageError,
)
from keepstep.core.files import write_atomic
from keepstep.library.overrides import hints_in_traceback, words_of
from keepstep.library.run import Run
from keepstep.observe.run_folder import Record, RunFolder, is_validation, number, read_from, whole
from keepstep.observe.verdict import describe

STATE_FILE = "callbacks.json"
"""Inside the run's folder: the callbacks' states by step, for the newest saved steps."""
_STEPS_KEPT = 16
POLL_S = 0.2
_KINDS = {EXIT_CONFIG: UsageError, EXIT_DATA: DataError, EXIT_HARDWARE: HardwareError, EXIT_STOPPED: StopRequested}
_TAIL_LINES = 40
_OUTPUT_S = 5.0


def train(
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    processes: int | str = "auto",
    quiet: bool = False,
    **fields: Any,
) -> Run:
    """Train as `keepstep train` does, wait for the end, and return the run. Call it again to resume.

    `config` is a run.yaml. `overrides` and the keyword arguments change its settings: `lr=1e-3`,
    `optimizer={"lr": 1e-3}` and `{"optimizer.lr": 1e-3}` are the same. Each of `callbacks` is called in this process,
    in the order of the run. `processes` is the number of training processes on this machine, by default one for each
    GPU. `quiet` prints nothing.

    An interrupt (Ctrl-C, or the notebook's stop button) saves the current step, stops the processes and then raises
    KeyboardInterrupt. An error in a callback does the same and is raised. If the run fails, a KeepstepError says why.
    """
    with hints_in_traceback():
        words = words_of(overrides, fields)
        loaded = load_config(None if config is None else Path(config), words).config
        folder = RunFolder(Path(loaded.runs_dir) / loaded.name)
        command = ["train", *([] if config is None else [str(config)]), *words, "--procs", str(processes)]
        child = _Child(command, quiet=quiet)
        child.wait(Follower(folder, callbacks))
        return Run(folder.root)


class _Child:
    """A `keepstep` command in a process and a session of its own."""

    def __init__(self, words: Sequence[str], *, quiet: bool) -> None:
        self._quiet = quiet
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        # It imports from the same places as this process, and belongs to no launcher that started this one.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "keepstep.library.child", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # A terminal and a notebook interrupt the whole group: the child gets our signal alone.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._print_output, name="run-output", daemon=True)
        self._reader.start()

    def wait(self, follower: Follower) -> None:
        """Call back until the command has ended. Raises KeyboardInterrupt or the run's error."""
        try:
            interrupted = self._follow(follower)
        finally:
            # A helper that outlives the command may still hold its output.
            self._reader.join(_OUTPUT_S)
            assert self._process.stdin is not None
            self._process.stdin.close()
        code = self._process.returncode
        if interrupted and code in (0, EXIT_STOPPED, 128 + signal.SIGINT, -signal.SIGINT):
            raise KeyboardInterrupt("the run is stopped and its state is saved; call train again to resume")
        if code:
            raise self._error(code)

    def _follow(self, follower: Follower) -> bool:
        """Until the command has ended; whether there was an interrupt."""
        interrupted = False
        while True:
            try:
                while self._process.poll() is None:
                    follower.poll()
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(POLL_S)
                follower.poll()
                return interrupted
            except KeyboardInterrupt:
                # The second one ends the run without waiting for the save, as in a terminal.
                interrupted = True
                self._process.send_signal(signal.SIGINT)
            except BaseException:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait()
                raise

    def _print_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self._tail.append(line)
                if not self._quiet:
                    print(line, file=sys.stderr, flush=True)

    def _error(self, code: int) -> KeepstepError:
        """What the command printed last, as an exception."""
        lines = list(self._tail)
        starts = [place for place, line in enumerate(lines) if line.startswith("error: ")]
        found = lines[starts[-1] :] if starts else lines[-1:] or [f"the run ended with exit code {code}"]
        hint = next((line.removeprefix(" hint: ") for line in found if line.startswith(" hint: ")), None)
        error = _KINDS.get(code, KeepstepError)(found[0].removeprefix("error: "), hint)
        error.exit_code = code
        return error


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
