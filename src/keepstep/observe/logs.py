"""Structured logs, one file per role and rank, and a merged view in time order with the first real error."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from keepstep.core.errors import StopRequested
from keepstep.core.verbosity import is_verbose
from keepstep.observe.run_folder import JsonLines, Record, number, read_from, tail

_FOLLOW_ON = re.compile(
    "ChildFailedError|SignalException|Connection closed by peer|Connection reset by peer|Broken pipe|ProcessGroup|"
    "watchdog|Timed out waiting|BrokenPipeError|ConnectionResetError"
)
"""Errors that a process raises because another one died. They are never the cause."""


class JsonLogHandler(logging.Handler):
    """A logging handler that writes `logs/ROLE-RANK.jsonl`: time, level, role, rank, logger, text, traceback."""

    def __init__(self, logs: Path, role: str, rank: int) -> None:
        super().__init__()
        self._file = JsonLines(logs / f"{role}-{rank:05d}.jsonl")
        self._who: Record = {"role": role, "rank": rank}

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line; an error is reported through `logging` and does not stop the run."""
        line: Record = {"time": record.created, "level": record.levelname.lower(), **self._who}
        line |= {"logger": record.name, "text": record.getMessage()}
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        # logging's own handleError would print a traceback for every line on a full disk.
        with suppress(OSError):
            self._file.append(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextmanager
def recording(logs: Path, role: str, rank: int) -> Iterator[logging.Logger]:
    """Write the log of this process, and the error that ends it, into the run folder."""
    handler, logger = JsonLogHandler(logs, role, rank), logging.getLogger("keepstep")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if is_verbose() else logging.INFO)
    try:
        yield logger
    except StopRequested:
        raise
    except Exception:
        logger.exception("this process failed")
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
    """The earliest error that is not a consequence of another process's death."""


def merged(logs: Path, newest: int | None = None) -> MergedLogs:
    """All lines, or the newest ones and the first traceback in the part of the files that was read for them."""
    paths = [] if logs.is_symlink() else sorted(logs.glob("*.jsonl"))
    files = [read_from(path)[0] if newest is None else tail(path, 2**18) for path in paths]
    lines = sorted(chain.from_iterable(files), key=lambda line: number(line.get("time")))
    errors = [line for line in lines if line.get("traceback")]
    causes = [line for line in errors if not _FOLLOW_ON.search(str(line["traceback"]))]
    return MergedLogs(lines[-newest:] if newest else lines, next(iter(causes or errors), None))


def format_line(line: Record) -> str:
    """One line for people."""
    who = f"{line.get('role', '?')}/{line.get('rank', '?')}"
    return f"{_moment(number(line.get('time')))}  {line.get('level', '')!s:<7}  {who:<12}  {line.get('text', '')}"


def _moment(time_s: float) -> str:
    """Time of day, or `?` if the time of the line is damaged."""
    try:
        return f"{time.strftime('%H:%M:%S', time.localtime(time_s))}.{int(time_s % 1 * 1000):03d}"
    except (ValueError, OverflowError, OSError):  # which one depends on how large the time is
        return f"{'?':<12}"
