"""Live progress of a run on a terminal: one line, redrawn in place; plain lines where there is no terminal."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from keepstep.core.units import format_count, format_seconds

REDRAW_S = 0.1
PLAIN_S = 10.0
"""Without a terminal a log would drown in lines: one in this many seconds."""
SMOOTHING = 0.9
_BOLD, _RED, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True)
class Snapshot:
    """What is known after a step. None is left out of the line."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Share of the peak, 0 to 1."""
    memory_gib: float | None = None
    checkpoint_age_s: float | None = None
    """Seconds since the last durable checkpoint; None before the first."""


def wants_colour(stream: TextIO) -> bool:
    """Whether escape sequences are welcome: a terminal, NO_COLOR unset, TERM not dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Progress:
    """Redraws one line on stderr. `tokens_per_step` turns tokens a second into the time that is left."""

    def __init__(self, total_steps: int, tokens_per_step: int, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._tokens_per_step = tokens_per_step
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = wants_colour(self._stream)
        self._drawn_at = -math.inf
        self._width_drawn = 0
        self._speed: float | None = None
        self._newest: Snapshot | None = None

    def update(self, snapshot: Snapshot) -> None:
        """Take one step's numbers and redraw when it is time."""
        if snapshot.tokens_per_s:
            before = snapshot.tokens_per_s if self._speed is None else self._speed
            self._speed = SMOOTHING * before + (1 - SMOOTHING) * snapshot.tokens_per_s
        self._newest = snapshot
        if time.monotonic() - self._drawn_at >= (REDRAW_S if self._live else PLAIN_S) or snapshot.step >= self._total:
            self._draw(snapshot)

    def note(self, text: str) -> None:
        """Print a line of its own above the progress line."""
        self._erase()
        print(text, file=self._stream, flush=True)
        if self._live and self._newest:
            self._draw(self._newest)

    def close(self) -> None:
        """Leave the last state on the screen and end its line."""
        if self._newest and self._live:
            self._draw(self._newest)
            print(file=self._stream, flush=True)
            self._width_drawn = 0

    def eta_s(self) -> float | None:
        """Seconds left at the smoothed speed."""
        if not self._speed or self._newest is None:
            return None
        return max(0, self._total - self._newest.step) * self._tokens_per_step / self._speed

    def _draw(self, snapshot: Snapshot) -> None:
        self._drawn_at = time.monotonic()
        # The last column stays free: a terminal that fills it wraps, and then the line is no longer one.
        width = shutil.get_terminal_size((100, 24)).columns - 1 if self._live else 200
        line = progress_line(snapshot, self._total, self.eta_s(), width)
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        self._erase()
        self._stream.write(self._paint(line))
        self._stream.flush()
        self._width_drawn = len(line)

    def _erase(self) -> None:
        if self._live and self._width_drawn:
            self._stream.write("\r" + " " * self._width_drawn + "\r" if not self._colour else "\r\x1b[K")
            self._width_drawn = 0

    def _paint(self, line: str) -> str:
        if not self._colour:
            return line
        head, mark, rest = line.partition("  ")
        rest = rest.replace("loss nan", f"{_RED}loss nan{_RESET}").replace("loss inf", f"{_RED}loss inf{_RESET}")
        return f"{_BOLD}{head}{_RESET}{mark}{rest}"


def progress_line(snapshot: Snapshot, total_steps: int, eta_s: float | None, width: int) -> str:
    """One line of at most `width` characters: the least important parts go first where it is narrow."""
    parts: list[tuple[int, str]] = [(0, _head(snapshot.step, total_steps, width))]

    def add(importance: int, text: str | None) -> None:
        if text is not None:
            parts.append((importance, text))

    add(1, None if snapshot.loss is None else f"loss {snapshot.loss:.4f}")
    add(6, None if snapshot.grad_norm is None else f"grad {snapshot.grad_norm:.3g}")
    add(3, None if snapshot.tokens_per_s is None else f"{format_count(snapshot.tokens_per_s)} tok/s")
    add(4, None if snapshot.mfu is None else f"MFU {snapshot.mfu:.1%}")
    add(7, None if snapshot.memory_gib is None else f"{snapshot.memory_gib:.1f} GiB")
    add(2, None if eta_s is None else f"ETA {format_seconds(eta_s)}")
    age = snapshot.checkpoint_age_s
    add(5, None if age is None else f"saved {format_seconds(age)} ago")
    while len(parts) > 1 and len("  ".join(text for _, text in parts)) > width:
        parts.remove(max(parts))
    return "  ".join(text for _, text in parts)[: max(width, 1)]


def _head(step: int, total_steps: int, width: int) -> str:
    counts = f"step {step}/{total_steps}" if total_steps else f"step {step}"
    if not total_steps or width < 100:
        return counts
    share = min(1.0, step / total_steps)
    cells = 16
    full = int(share * cells)
    return f"{counts} {'━' * full}{'─' * (cells - full)} {share:4.0%}"
