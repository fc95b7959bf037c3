"""Structured logs, a file for each role and rank, and one merged view in time order, the first real error on top."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from keepstep.core.errors import StopRequested
from keepstep.observe.folder import JsonLines, Record, number
from keepstep.observe.history import tail

_FOLLOW_ON = (
    "ChildFailedError",
    "SignalException",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ProcessGroup",
    "watchdog",
    "Timed out waiting",
    "BrokenPipeError",
    "ConnectionResetError",
)
"""What processes raise because another one died: never the cause itself."""


class JsonLogHandler(logging.Handler):
    """A logging handler that writes `logs/ROLE-RANK.jsonl`: time, level, role, rank, logger, text, traceback."""

    def __init__(self, logs: Path, role: str, rank: int) -> None:
        super().__init__()
        self._file = JsonLines(logs / f"{role}-{rank:05d}.jsonl")
        self._who: Record = {"role": role, "rank": rank}

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line; a log that cannot be written is not a reason to stop."""
        line: Record = {"time": record.created, "level": record.levelname.lower(), **self._who}
        line |= {"logger": record.name, "text": record.getMessage()}
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        try:
            self._file.append(line)
        except OSError:
            self.handleError(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextmanager
def recording(logs: Path, role: str, rank: int) -> Iterator[logging.Logger]:
    """Write what this process logs, and the error it ends with, into the run's folder."""
    handler, logger = JsonLogHandler(logs, role, rank), logging.getLogger("keepstep")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield logger
    except StopRequested:
        raise
    except Exception:
        logger.exception("this process ends with an error")
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


@dataclass(frozen=True)
class MergedLogs:
    """Lines of all roles and ranks in time order."""

    lines: list[Record]
    first_traceback: Record | None
    """The earliest error that is not merely the echo of another process's death."""


def merged(logs: Path) -> MergedLogs:
    """All lines."""
    return _merge([JsonLines(path).read() for path in sorted(logs.glob("*.jsonl"))])


def merged_tail(logs: Path, count: int) -> MergedLogs:
    """The newest `count` lines, and the first traceback of all that was looked at."""
    everything = _merge([tail(path, 2**18) for path in sorted(logs.glob("*.jsonl"))])
    return MergedLogs(everything.lines[-count:], everything.first_traceback)


def _merge(files: list[list[Record]]) -> MergedLogs:
    lines = sorted(chain.from_iterable(files), key=lambda line: number(line.get("time")))
    errors = [line for line in lines if line.get("traceback")]
    causes = [line for line in errors if not any(sign in str(line["traceback"]) for sign in _FOLLOW_ON)]
    return MergedLogs(lines, next(iter(causes or errors), None))


def format_line(line: Record) -> str:
    """One line for people."""
    who = f"{line.get('role', '?')}/{line.get('rank', '?')}"
    return f"{_moment(number(line.get('time')))}  {line.get('level', '')!s:<7}  {who:<12}  {line.get('text', '')}"


def _moment(time_s: float) -> str:
    """Time of day; a line whose time is damaged may still say what matters."""
    try:
        return f"{time.strftime('%H:%M:%S', time.localtime(time_s))}.{int(time_s % 1 * 1000):03d}"
    except (ValueError, OverflowError):
        return f"{'?':<12}"
