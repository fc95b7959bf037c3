"""How far a build is, in lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from keepstep.core.units import format_seconds


class Progress:
    """Lines on stderr: how far, how fast, how long still."""

    def __init__(self, task_bytes: Sequence[int], tasks: Sequence[int], *, at_most: bool = False) -> None:
        """`at_most` where a build may end before it has read everything."""
        self._eta = "eta at most" if at_most else "eta"
        self._task_bytes = task_bytes
        self._total = sum(task_bytes[task] for task in tasks)
        self._tasks = len(tasks)
        self._tasks_done = 0
        self._bytes_done = 0
        self._read_bytes = 0
        self._tokens = 0
        self._start_s = time.monotonic()
        self._last_s = self._start_s
        self._terminal = sys.stderr.isatty()
        self._notices: set[str] = set()

    def add(self, read_bytes: int, tokens: int) -> None:
        """Count what a worker has read and written."""
        self._read_bytes += read_bytes
        self._tokens += tokens
        now_s = time.monotonic()
        if now_s - self._last_s >= (0.5 if self._terminal else 10.0):
            self._last_s = now_s
            self._print(now_s, "\r" if self._terminal else "")

    def done(self, task: int) -> None:
        """Count a finished task."""
        self._tasks_done += 1
        self._bytes_done += self._task_bytes[task]

    def notice(self, text: str) -> None:
        """Say something once."""
        if text and text not in self._notices:
            self._notices.add(text)
            print(f"notice: {text}", file=sys.stderr)

    def end(self) -> None:
        """The last line."""
        if self._tasks:
            self._print(time.monotonic(), "\r" if self._terminal else "")
            if self._terminal:
                print(file=sys.stderr)

    def _print(self, now_s: float, start: str) -> None:
        elapsed_s = max(1e-3, now_s - self._start_s)
        # A task that was begun anew is read twice, and bytes of finished tasks may be known better than those read.
        read = min(self._total, max(self._read_bytes, self._bytes_done))
        left_s = (self._total - read) * elapsed_s / max(1, read)
        print(
            f"{start}{self._tasks_done}/{self._tasks} tasks  {read / elapsed_s / 1e6:.1f} MB/s  "
            f"{self._tokens / elapsed_s / 1e6:.2f} M tokens/s  {self._eta} {format_seconds(left_s)}",
            end="" if start else "\n",
            file=sys.stderr,
            flush=True,
        )
