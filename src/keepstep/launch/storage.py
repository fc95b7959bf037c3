"""Measure storage tiers as a run uses them: data read while a checkpoint is written, for each pair of tiers."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import UsageError

BLOCK_BYTES = 1 << 20
CHECKPOINTS: Mapping[str, int] = {"mpt-30b": 336 << 30, "mpt-70b": 725 << 30}
"""Checkpoint sizes of the models people compare storage with: fp32 weights and Adam, 12 bytes a parameter."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    data: Mapping[str, Path]
    """Tier name → folder with training data; where it is empty a file is made first and removed after."""
    checkpoints: Mapping[str, Path]
    """Tier name → folder to write checkpoints to."""
    size_bytes: int
    """Bytes of one checkpoint written here."""
    writers: int
    """Shards written at the same time, as by so many processes."""


@dataclass(frozen=True)
class Cell:
    """One pair of tiers, speeds in GB/s (10^9 bytes)."""

    data: str
    checkpoint: str
    read_gb_s: float
    """Random reads of data, alone."""
    read_while_saving_gb_s: float
    write_gb_s: float
    """A checkpoint written and flushed, with data being read at the same time."""
    restore_gb_s: float

    def save_minutes(self, size_bytes: int) -> float:
        """Minutes to save a checkpoint of this size at the speed found."""
        return size_bytes / self.write_gb_s / 1e9 / 60


def read_tiers(words: Sequence[str], flag: str) -> dict[str, Path]:
    """Read `NAME=FOLDER` words."""
    tiers: dict[str, Path] = {}
    for word in words:
        name, separator, folder = word.partition("=")
        if not separator or not name or not folder:
            raise UsageError(f"{flag} is {word!r}, but it must be NAME=FOLDER", f"{flag} lustre=/lustre/checkpoints")
        if not Path(folder).is_dir():
            raise UsageError(f"{flag} {name}: there is no folder {folder}", "create it, or check the mount")
        tiers[name] = Path(folder)
    if not tiers:
        raise UsageError(f"no tier is given with {flag}", f"{flag} NAME=FOLDER, as often as there are tiers")
    return tiers


def measure(plan: Plan, progress: Callable[[str], None]) -> list[Cell]:
    """Every pair of tiers, one after the other."""
    cells = []
    for data_name, data_folder in plan.data.items():
        with _DataReader(data_folder, plan.size_bytes) as reader:
            alone = reader.measure(1.0)
            for name, folder in plan.checkpoints.items():
                progress(f"data {data_name}, checkpoints {name}")
                cells.append(_cell(plan, data_name, name, folder, reader, alone))
    return cells


def _cell(plan: Plan, data: str, name: str, folder: Path, reader: _DataReader, alone: float) -> Cell:
    target = folder / f".keepstep-bench-{os.getpid()}"
    target.mkdir()
    try:
        with reader.in_background() as beside:
            write_gb_s = _timed(plan, lambda shard: _write(target / f"{shard}", plan.size_bytes // plan.writers))
        restore_gb_s = _timed(plan, lambda shard: _read_whole(target / f"{shard}"))
    except OSError as error:
        raise UsageError(
            f"checkpoints {name}: {folder}: {error.strerror}", "give a folder that can be written"
        ) from None
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return Cell(data, name, alone, beside.gb_s, write_gb_s, restore_gb_s)


def _timed(plan: Plan, action: Callable[[int], None]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(plan.writers) as pool:
        list(pool.map(action, range(plan.writers)))
    return plan.size_bytes / (time.perf_counter() - started) / 1e9


def _write(path: Path, size_bytes: int) -> None:
    # Random bytes: some storage compresses or drops zeros.
    block = os.urandom(BLOCK_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size_bytes // BLOCK_BYTES)):
            file.write(block)
        os.fsync(file.fileno())


def _read_whole(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(BLOCK_BYTES):
            pass


def _size_bytes(path: Path) -> int:
    """0 for what is no file, or no longer there: shared storage changes while we look."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


class _Background:
    """Reads until it is told to stop."""

    def __init__(self, reader: _DataReader) -> None:
        self._reader, self._stop = reader, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.gb_s = 0.0

    def _run(self) -> None:
        self.gb_s = self._reader.measure_until(self._stop.is_set)

    def __enter__(self) -> _Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class _DataReader:
    """Random blocks of the largest file in a folder, as a shuffled loader reads them."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        size, path = max(((_size_bytes(path), path) for path in folder.rglob("*")), default=(0, folder))
        self._made: Path | None = None
        if size < BLOCK_BYTES:
            path = self._made = folder / f".keepstep-bench-data-{os.getpid()}"
            try:
                _write(path, size_bytes)
            except BaseException:
                # Gigabytes that nobody sees, on a disk that they may have filled.
                path.unlink(missing_ok=True)
                raise
            size = _size_bytes(path)
        self._path, self._blocks = path, size // BLOCK_BYTES

    def __enter__(self) -> _DataReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made:
            self._made.unlink(missing_ok=True)

    def in_background(self) -> _Background:
        """Read for the length of a `with` block."""
        return _Background(self)

    def measure(self, seconds: float) -> float:
        """GB/s over some seconds."""
        end = time.perf_counter() + seconds
        return self.measure_until(lambda: time.perf_counter() > end)

    def measure_until(self, done: Callable[[], bool]) -> float:
        """GB/s until told to stop."""
        order, read_bytes, started = random.Random(17), 0, time.perf_counter()
        with self._path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while True:
                read_bytes += len(os.pread(file.fileno(), BLOCK_BYTES, order.randrange(self._blocks) * BLOCK_BYTES))
                if done():
                    return read_bytes / (time.perf_counter() - started) / 1e9


def markdown(cells: Sequence[Cell]) -> str:
    """The results table."""
    sizes = [f"{name} save [min]" for name in CHECKPOINTS]
    heads = ["data", "checkpoints", "read", "read while saving", "write", "restore", *sizes]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for cell in cells:
        speeds = (cell.read_gb_s, cell.read_while_saving_gb_s, cell.write_gb_s, cell.restore_gb_s)
        minutes = [f"{cell.save_minutes(size):.2f}" for size in CHECKPOINTS.values()]
        lines.append(f"| {' | '.join([cell.data, cell.checkpoint, *(f'{speed:.3g}' for speed in speeds), *minutes])} |")
    return "\n".join(
        [*lines, "", "Speeds in GB/s (10^9 bytes), this node alone. Minutes are for one node at that speed."]
    )
