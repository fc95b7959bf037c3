"""The run folder: where a run writes what it does, and the append-only files that everything else reads.

A viewer never talks to the run: it reads these files. So no page, no exporter and no report can stall training.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError

Record = dict[str, Any]
"""One line of a JSON Lines file."""


_TAIL_BYTES = 16384


@dataclass(frozen=True)
class RunFolder:
    """The paths inside `RUNS_DIR/NAME`. Nothing is created before `create()`."""

    root: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.root.name

    @property
    def config(self) -> Path:
        """The whole configuration as it was frozen at the start."""
        return self.root / "config.yaml"

    @property
    def facts(self) -> Path:
        """What is true of the run beside its configuration: plan, environment, data, total steps (JSON)."""
        return self.root / "facts.json"

    @property
    def metrics(self) -> Path:
        """A line for each step, and one for each validation."""
        return self.root / "metrics.jsonl"

    @property
    def columns(self) -> Path:
        """The same numbers as metrics.jsonl up to some line, in binary, so that a viewer opens a long run at once."""
        return self.root / "metrics.columns"

    @property
    def events(self) -> Path:
        """A line for each thing that happened: start, checkpoint, fault, restart, finish."""
        return self.root / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """A line for each look at all ranks: step time and memory of every one."""
        return self.root / "ranks.jsonl"

    @property
    def samples(self) -> Path:
        """A line for each text the model wrote during the run."""
        return self.root / "samples.jsonl"

    @property
    def skipped(self) -> Path:
        """A line for each range of training samples that the guard took out; a resumed run leaves them out too."""
        return self.root / "skipped.jsonl"

    @property
    def begun(self) -> Path:
        """With `checkpoint.autoresume: false`: who started the run last, and which checkpoints were there before."""
        return self.root / "begun.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Step folders of the checkpointer."""
        return self.root / "checkpoints"

    @property
    def profile(self) -> Path:
        """Profiler traces and memory snapshots."""
        return self.root / "profile"

    @property
    def logs(self) -> Path:
        """Structured logs, a file for each role and rank."""
        return self.root / "logs"

    def create(self) -> RunFolder:
        """Make the folder and those inside it."""
        for folder in (self.root, self.tensorboard, self.checkpoints, self.profile, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def is_run(self) -> bool:
        """Whether a run has written here, as far as this user may see."""
        # Not Path.is_file, which raises for a folder that is closed to us: others' runs lie in shared folders too.
        return any(os.path.isfile(path) for path in (self.metrics, self.events, self.config))  # noqa: PTH113


def find_runs(runs_dir: Path) -> list[RunFolder]:
    """All run folders directly below `runs_dir`, by name; links that lead out of it are left out."""
    if not runs_dir.is_dir():
        return []
    inside = runs_dir.resolve()
    folders = (
        RunFolder(path) for path in sorted(runs_dir.iterdir()) if path.is_dir() and not path.name.startswith(".")
    )
    return [folder for folder in folders if folder.is_run and folder.root.resolve().is_relative_to(inside)]


def find_run(text: str, runs_dir: Path) -> RunFolder:
    """The run that `text` means: a folder, or a name below `runs_dir`."""
    for path in (Path(text), runs_dir / text):
        if RunFolder(path).is_run:
            return RunFolder(path.resolve())
    names = [folder.name for folder in find_runs(runs_dir)]
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"runs in {runs_dir}: {', '.join(names) or 'none'}"
    raise UsageError(f"no run {text!r}, neither as a folder nor in {runs_dir}", hint)


class JsonLines:
    """An append-only file with one JSON object a line, whole lines only.

    Each `append` is one `write` on a descriptor opened for appending, so lines of several writers never mix and a line
    is with the operating system when the call returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        if self._descriptor is None:
            self._descriptor = self._open()
        text = json.dumps(_plain(record), separators=(",", ":"), ensure_ascii=False)
        # Half a surrogate pair, which stands for a byte of a file name that is no UTF-8, becomes JSON's own escape.
        line = text.encode(errors="backslashreplace") + b"\n"
        if not _ends_with_a_line(self._descriptor):
            # A writer that was killed, or found the disk full, left half a line: start ours on a fresh one.
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes fitted into {self.path}")

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> list[Record]:
        """All whole lines; one that is torn or damaged is skipped."""
        return read_from(self.path)[0]

    def close(self) -> None:
        """Give the descriptor back; a later `append` opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _ends_with_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return not size or os.pread(descriptor, 1, size - 1) == b"\n"


def read_from(path: Path, offset: int = 0, limit_bytes: int = -1) -> tuple[list[Record], int]:
    """Whole lines of `path` from byte `offset` on, and the offset to go on from. A missing file has no lines."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(limit_bytes)
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    return parse_lines(data[:end]), offset + end


def read_last_step(path: Path) -> int:
    """The newest step that a metrics file tells of, from its last lines alone; -1 where it has none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = parse_lines(file.read().rpartition(b"\n")[0])
    except FileNotFoundError:
        return -1
    # The last line, not the largest step: a run that went back to a checkpoint has larger ones before it.
    return next((int(line["step"]) for line in reversed(lines) if isinstance(line.get("step"), int)), -1)


def parse_lines(data: bytes) -> list[Record]:
    """Objects of JSON Lines text; what is not a JSON object is skipped."""
    lines = [line for line in data.split(b"\n") if line]
    try:
        # One call for all lines is several times faster than a call for each, and nearly all files are undamaged.
        values = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) != len(lines):
            raise ValueError
    except ValueError:
        values = [_parse_or_none(line) for line in lines]
    return [value for value in values if isinstance(value, dict)]


def _parse_or_none(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def split_kinds(lines: Iterable[Record]) -> dict[str, list[Record]]:
    """Metric lines as `train` and `valid`, each with rising steps.

    A run that resumed from an earlier step writes those steps again: the later line wins, and what the abandoned
    attempt had written beyond it is dropped, because the run never was there.
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
    """Whether a metrics line tells of a validation rather than of a step."""
    return "valid_loss" in line and "loss" not in line


def number(value: Any) -> float:
    """A metric as a float; what is absent or no number is NaN. `"NaN"` and `"Infinity"` are read back."""
    if isinstance(value, int | float):
        # An integer of hundreds of digits is damage, not a number.
        return float(value) if abs(value) < 2**1023 or isinstance(value, float) else math.nan
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return math.nan
    return math.nan


def _plain(value: Any) -> Any:
    """`value` as strict JSON knows it: NaN and infinities become strings, numpy numbers plain ones, paths text."""
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
