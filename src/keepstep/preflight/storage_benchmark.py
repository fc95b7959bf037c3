"""Measure storage tiers as a run uses them: read data while a checkpoint is written, for each pair of tiers."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.core.messages import invalid_value
from keepstep.plan.cluster import RequestPrices
from keepstep.plan.requests import metrics_lines, priced_with

BLOCK_BYTES = 1 << 20
CHECKPOINTS: Mapping[str, int] = {"mpt-30b": 336 << 30, "mpt-70b": 725 << 30}
"""Checkpoint sizes of the models people compare storage with: fp32 weights and Adam, 12 bytes a parameter."""


@dataclass(frozen=True)
class StorageTest:
    """What to measure."""

    data: Mapping[str, Path]
    """Tier name → folder with training data; in an empty folder a file is written first and removed afterwards."""
    checkpoints: Mapping[str, Path]
    """Tier name → folder to write checkpoints to."""
    size_bytes: int
    """Bytes of one checkpoint written here."""
    writers: int
    """Shards written at the same time, as by this many processes."""


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

    def as_values(self) -> dict[str, Any]:
        """The cell as JSON, with the minutes of well-known checkpoints."""
        return {**asdict(self), "save_minutes": {name: self.save_minutes(size) for name, size in CHECKPOINTS.items()}}

    def save_minutes(self, size_bytes: int) -> float:
        """Minutes to save a checkpoint of this size at the speed found."""
        return size_bytes / self.write_gb_s / 1e9 / 60


def read_tiers(words: Sequence[str], flag: str) -> dict[str, Path]:
    """Read `NAME=FOLDER` words."""
    tiers: dict[str, Path] = {}
    for word in words:
        name, separator, folder = word.partition("=")
        if not separator or not name or not folder:
            raise UsageError(invalid_value(flag, word, "must be NAME=FOLDER"), f"{flag} lustre=/lustre/checkpoints")
        if not Path(folder).is_dir():
            raise UsageError(f"{flag} {name}: there is no folder {folder}", "create it, or check the mount")
        tiers[name] = Path(folder)
    if not tiers:
        raise UsageError(f"no tier is given with {flag}", f"{flag} NAME=FOLDER, as often as there are tiers")
    return tiers


def measure(test: StorageTest, progress: Callable[[str], None]) -> list[Cell]:
    """Measure every pair of tiers, one after another."""
    cells = []
    for data_name, data_folder in test.data.items():
        with _data_reader(data_folder, test.size_bytes) as reader:
            alone = reader.measure(1.0)
            for name, folder in test.checkpoints.items():
                progress(f"data {data_name}, checkpoints {name}")
                cells.append(_cell(test, data_name, name, folder, reader, alone))
    return cells


def _cell(test: StorageTest, data: str, name: str, folder: Path, reader: _DataReader, alone: float) -> Cell:
    target = folder / f".keepstep-bench-{os.getpid()}"
    target.mkdir()
    try:
        with reader.in_background() as speeds:
            write_gb_s = _timed(test, lambda shard: _write(target / f"{shard}", test.size_bytes // test.writers))
        restore_gb_s = _timed(test, lambda shard: _read_whole(target / f"{shard}"))
    except OSError as error:
        message = f"checkpoints {name}: {folder}: {error.strerror}"
        raise UsageError(message, "give a folder that can be written") from None
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return Cell(data, name, alone, speeds[-1], write_gb_s, restore_gb_s)


def _timed(test: StorageTest, action: Callable[[int], None]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(test.writers) as pool:
        list(pool.map(action, range(test.writers)))
    return test.size_bytes / (time.perf_counter() - started) / 1e9


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
    """0 for what is no file or no longer there: shared storage changes meanwhile."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


@contextmanager
def _data_reader(folder: Path, size_bytes: int) -> Iterator[_DataReader]:
    """Reads the largest file of a folder, or one that is written first and removed afterwards."""
    size, path = max(((_size_bytes(path), path) for path in folder.rglob("*")), default=(0, folder))
    made = folder / f".keepstep-bench-data-{os.getpid()}" if size < BLOCK_BYTES else None
    try:
        if made:
            _write(made, size_bytes)
        yield _DataReader(made or path, _size_bytes(made or path) // BLOCK_BYTES)
    finally:
        if made:
            # It may be gigabytes, on a disk that it may have filled.
            made.unlink(missing_ok=True)


@dataclass(frozen=True)
class _DataReader:
    """Random blocks of a file, as a shuffled loader reads them."""

    path: Path
    blocks: int

    @contextmanager
    def in_background(self) -> Iterator[list[float]]:
        """Read in a thread for the length of a block, which then finds the GB/s in the list."""
        stop, speeds = threading.Event(), [0.0]
        thread = threading.Thread(target=lambda: speeds.append(self.measure_until(stop.is_set)))
        thread.start()
        try:
            yield speeds
        finally:
            stop.set()
            thread.join()

    def measure(self, seconds: float) -> float:
        """GB/s over some seconds."""
        end = time.perf_counter() + seconds
        return self.measure_until(lambda: time.perf_counter() > end)

    def measure_until(self, done: Callable[[], bool]) -> float:
        """GB/s until `done()`."""
        order, read_bytes, started = random.Random(17), 0, time.perf_counter()
        with self.path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while True:
                read_bytes += len(os.pread(file.fileno(), BLOCK_BYTES, order.randrange(self.blocks) * BLOCK_BYTES))
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
    foot = "Speeds in GB/s (10^9 bytes), this node alone. Minutes are for one node at that speed."
    return "\n".join([*lines, "", foot])


def request_table(rows: Sequence[Mapping[str, Any]], prices: RequestPrices) -> str:
    """What a save and a restore cost in requests, by block size."""
    lines = [f"One save and one restore on {priced_with(prices)}:", ""]
    lines += ["| checkpoint | block [MiB] | writes | save [$] | reads | restore [$] |", "|" + "---|" * 6]
    for row in rows:
        save, restore = f"{row['writes']:,} | {row['save_cost']:.4f}", f"{row['reads']:,} | {row['restore_cost']:.4f}"
        lines.append(f"| {row['checkpoint']} | {row['block_mib']} | {save} | {restore} |")
    return "\n".join([*lines, "", *metrics_lines(prices)])
