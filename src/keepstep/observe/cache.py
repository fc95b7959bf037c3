"""Columns of long runs in binary, so that a page over five runs of 100,000 steps opens at once.

A run writes them beside its metrics every so often; where it did not, a viewer keeps its own copy in the user's cache
(a viewer never writes into a run folder). A copy is only ever of the first bytes of metrics.jsonl: it names how many,
and a fingerprint of them, and counts for nothing when they are not the same any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keepstep.core.files import write_atomic
from keepstep.core.home import cache_folder

if TYPE_CHECKING:
    from keepstep.observe.columns import Columns
    from keepstep.observe.folder import RunFolder
    from keepstep.observe.history import History

WORTH_BYTES = 2 * 2**20
"""Less than this parses faster than it is worth keeping."""
_FORMAT = "keepstep columns 3"
_ENDS_BYTES = 4096


def default_dir() -> Path:
    """`$XDG_CACHE_HOME/keepstep/runs`, or the same below the home folder."""
    return cache_folder() / "runs"


def place(folder: RunFolder, cache_dir: Path) -> Path:
    """Where a viewer keeps its copy of a run's columns."""
    name = hashlib.sha256(str(folder.metrics.resolve()).encode()).hexdigest()[:24]
    return cache_dir / f"{name}.columns"


def store(history: History, path: Path, offset: int) -> None:
    """Keep the columns as they are after the first `offset` bytes; a copy that cannot be written is none."""
    tables = _tables(history)
    header = {
        "format": _FORMAT,
        "offset": offset,
        "fingerprint": _fingerprint(history.folder.metrics, offset),
        "tables": {kind: {"rows": len(table), "columns": table.names} for kind, table in tables.items()},
        "sources": history.sources,
    }
    body = b"".join(table.column(name).tobytes() for table in tables.values() for name in table.names)
    with contextlib.suppress(OSError):
        write_atomic(path, json.dumps(header).encode() + b"\n" + body)


def load(history: History, cache_dir: Path | None) -> int:
    """Fill an empty history and return how many bytes of metrics.jsonl that covers; 0 where there is no good copy."""
    places = [history.folder.columns, *([place(history.folder, cache_dir)] if cache_dir else [])]
    return next((offset for path in places if (offset := _load(history, path))), 0)


def _tables(history: History) -> dict[str, Columns]:
    return {"train": history.train, "valid": history.valid, "undone": history.undone}


def _load(history: History, path: Path) -> int:
    try:
        header_line, _, body = path.read_bytes().partition(b"\n")
        header = json.loads(header_line)
        if header["format"] != _FORMAT:
            return 0
        if header["fingerprint"] != _fingerprint(history.folder.metrics, header["offset"]):
            return 0
        numbers = np.frombuffer(body, dtype=np.float64)
        if len(numbers) != sum(table["rows"] * len(table["columns"]) for table in header["tables"].values()):
            return 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    at = 0
    for kind, table in _tables(history).items():
        at = _fill(table, header["tables"][kind], numbers, at)
    history.sources = header["sources"]
    return int(header["offset"])


def _fill(table: Columns, shape: dict[str, object], numbers: np.ndarray, at: int) -> int:
    rows, names = int(str(shape["rows"])), list(map(str, shape["columns"]))  # type: ignore[call-overload]
    arrays = {name: numbers[at + index * rows : at + (index + 1) * rows] for index, name in enumerate(names)}
    table.append_arrays(arrays, rows)
    return at + rows * len(names)


def _fingerprint(path: Path, offset: int) -> str:
    """Of the first and last bytes of the first `offset`: an append-only file that differs elsewhere differs there."""
    with path.open("rb") as file:
        first = file.read(min(_ENDS_BYTES, offset))
        file.seek(max(0, offset - _ENDS_BYTES))
        last = file.read(min(_ENDS_BYTES, offset))
    return hashlib.sha256(first + last).hexdigest() if len(last) == min(_ENDS_BYTES, offset) else "short"
