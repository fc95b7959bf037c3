"""The run folder: the append-only files that a run writes and every viewer reads.

A viewer never talks to the run. So no page, exporter or report can stall training.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.core.files import read_regular

Record = dict[str, Any]
"""One line of a JSON Lines file."""

_TAIL_BYTES = 16384


class _Inside:
    """A path inside a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _: type[RunFolder]) -> Path:
        return folder.root / self._name


@dataclass(frozen=True)
class RunFolder:
    """The paths inside `RUNS_DIR/NAME`. Nothing is created before `create()`."""

    root: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.root.name

    config = _Inside("config.yaml")
    """The whole configuration as it was frozen at the start."""
    facts = _Inside("facts.json")
    """Facts about the run that are not in its configuration: plan, environment, data, total steps (JSON)."""
    metrics = _Inside("metrics.jsonl")
    """One line per step and one per validation."""
    columns = _Inside("metrics.columns")
    """The numbers of metrics.jsonl up to some line, in binary, so that a viewer opens a long run quickly."""
    events = _Inside("events.jsonl")
    """One line per event: start, checkpoint, fault, restart, finish."""
    ranks = _Inside("ranks.jsonl")
    """One line per sample of all ranks: step time and memory of each."""
    samples = _Inside("samples.jsonl")
    """One line per text that the model generated during the run."""
    skipped = _Inside("skipped.jsonl")
    """One line per range of training samples that the guard skipped; a resumed run skips them, too."""
    attempt_marker = _Inside("begun.json")
    """With `checkpoint.autoresume: false`: who started the run last, and which checkpoints were there before."""
    tensorboard = _Inside("tensorboard")
    """TensorBoard event files."""
    checkpoints = _Inside("checkpoints")
    """Step folders of the checkpointer."""
    profile = _Inside("profile")
    """Profiler traces and memory snapshots."""
    bfcl = _Inside("bfcl")
    """Answers and scores of `keepstep eval bfcl`."""
    logs = _Inside("logs")
    """Structured logs, one file per role and rank."""

    def create(self) -> RunFolder:
        """Create the folder and its subfolders."""
        for folder in (self.root, self.tensorboard, self.checkpoints, self.profile, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def is_run(self) -> bool:
        """Whether a run has written here, as far as this user may see."""
        # Not Path.is_file, which raises in folders of other users that we may not enter.
        return any(os.path.isfile(path) for path in (self.metrics, self.events, self.config))  # noqa: PTH113


def find_runs(runs_dir: Path) -> list[RunFolder]:
    """All run folders directly below `runs_dir`, by name; links to other places are skipped."""
    if not runs_dir.is_dir():
        return []
    inside = runs_dir.resolve()
    paths = (path for path in sorted(runs_dir.iterdir()) if path.is_dir() and not path.name.startswith("."))
    folders = [folder for folder in map(RunFolder, paths) if folder.is_run]
    return [folder for folder in folders if folder.root.resolve().is_relative_to(inside)]


def find_run(text: str, runs_dir: Path) -> RunFolder:
    """The run that `text` names: a folder, or a name below `runs_dir`."""
    for path in (Path(text), runs_dir / text):
        if RunFolder(path).is_run:
            return RunFolder(path.resolve())
    names = [folder.name for folder in find_runs(runs_dir)]
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"runs in {runs_dir}: {', '.join(names) or 'none'}"
    raise UsageError(f"no run {text!r}, neither as a folder nor in {runs_dir}", hint)


class JsonLines:
    """An append-only file with one JSON object per line.

    Each `append` is one `write` on a descriptor opened for appending: lines of several writers never mix, and the
    operating system has the whole line when the call returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        text = json.dumps(_plain(record), separators=(",", ":"), ensure_ascii=False)
        # A lone surrogate, which stands for a byte of a file name that is not UTF-8, becomes a JSON escape.
        line = text.encode(errors="backslashreplace") + b"\n"
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            # A writer that was killed, or met a full disk, left half a line: start a new one.
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written to {self.path}")

    def read(self) -> list[Record]:
        """All complete lines; damaged ones are skipped."""
        return read_from(self.path)[0]

    def close(self) -> None:
        """Close the descriptor; a later `append` opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_from(path: Path, offset: int = 0, limit_bytes: int = 2**40) -> tuple[list[Record], int]:
    """Complete lines of `path` from byte `offset`, and the offset after them. A missing file has no lines."""
    try:
        data = read_regular(path, limit_bytes, offset)
    except FileNotFoundError:
        return [], offset
    # A piece in which no line ends is damage, such as a hole after a power cut. Lines may follow it.
    end = data.rfind(b"\n") + 1 or (len(data) if len(data) == limit_bytes else 0)
    return parse_lines(data[:end]), offset + end


def tail(path: Path, limit_bytes: int) -> list[Record]:
    """The last complete lines of a file, without reading the rest."""
    try:
        size = path.stat().st_size
    except OSError:
        return []
    # The first piece may be the end of a longer line. It is not a JSON object, so it is skipped.
    return read_from(path, max(0, size - limit_bytes))[0]


def read_last_step(path: Path) -> int:
    """The newest step in a metrics file, from its last lines alone; -1 if there is none."""
    lines = tail(path, _TAIL_BYTES)
    # The last line, not the largest step: a run that rolled back has larger steps before it.
    return next((int(line["step"]) for line in reversed(lines) if isinstance(line.get("step"), int)), -1)


def parse_lines(data: bytes) -> list[Record]:
    """Objects of JSON Lines text; lines that are not JSON objects are skipped."""
    lines = [line for line in data.split(b"\n") if line]
    try:
        # One call for all lines is several times faster than one per line, and few files are damaged.
        values = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) != len(lines):
            raise ValueError
    except (ValueError, RecursionError):
        values = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


def split_kinds(lines: Iterable[Record]) -> dict[str, list[Record]]:
    """Metric lines as `train` and `valid`, each with rising steps.

    A run that resumed from an earlier step writes those steps again: the later line wins, and what the abandoned
    attempt wrote beyond it is dropped.
    """
    kinds: dict[str, list[Record]] = {"train": [], "valid": []}
    for line in lines:
        step = line.get("step")
        if not isinstance(step, int | float):
            continue
        kept = kinds["valid" if is_validation(line) else "train"]
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(line)
    return kinds


def is_validation(line: Record) -> bool:
    """Whether a metrics line is of a validation and not of a step."""
    return "valid_loss" in line and "loss" not in line


def number(value: Any) -> float:
    """A metric as a float; NaN if it is absent or not a number. `"NaN"` and `"Infinity"` are read back."""
    if isinstance(value, int | float):
        # An integer of hundreds of digits is a damaged line.
        return float(value) if abs(value) < 2**1023 or isinstance(value, float) else math.nan
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return math.nan
    return math.nan


def whole(value: Any, otherwise: int = 0) -> int:
    """A count or step from a file; `otherwise` if it is not a number."""
    count = number(value)
    return int(count) if abs(count) < 2**53 else otherwise


def _plain(value: Any) -> Any:
    """`value` as strict JSON: NaN and infinities become strings, numpy numbers plain ones, paths text."""
    if isinstance(value, bool | str | int | None):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)
