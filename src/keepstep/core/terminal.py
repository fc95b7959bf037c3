"""What every command prints: colour, aligned columns, one status line that is redrawn in place.

Printing must not stop a run: terminals close, pipes break, disks fill up.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast
from unicodedata import east_asian_width

from keepstep.core.verbosity import is_shown

_CODES = {"bold": "1", "faint": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}
_CODES |= {"magenta": "35", "cyan": "36"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def can_redraw(stream: TextIO) -> bool:
    """Whether the cursor can be moved. A dumb terminal (an editor's, a log viewer's) shows the escapes as text."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def wants_colour(stream: TextIO) -> bool:
    """Whether to print colour: on a terminal, or with FORCE_COLOR; never with NO_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return can_redraw(stream) or bool(os.environ.get("FORCE_COLOR"))


def paint(text: str, style: str) -> str:
    """`text` in a style such as `bold red`; an empty style leaves it as it is."""
    return f"\x1b[{';'.join(_CODES[word] for word in style.split())}m{text}\x1b[0m" if style else text


def bar(share: float, cells: int) -> str:
    """A progress bar of `cells` characters and its percentage."""
    full = int(min(1.0, share) * cells)
    return f"{'━' * full}{'─' * (cells - full)} {min(1.0, share):4.0%}"


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines with aligned columns; the columns in `right` are aligned to the right. Cells may be painted."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - _width(cell))
            cells.append(space + cell if place in right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return lines


def _width(text: str) -> int:
    """Terminal cells that `text` takes: escapes take none, Chinese, Japanese and Korean characters two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in _ESCAPE.sub("", text))


class StatusLine:
    """One line on stderr that is redrawn in place; plain lines where the stream is not a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.live = can_redraw(self._stream)
        self.colour = wants_colour(self._stream)
        self._text = ""

    def draw(self, text: str) -> None:
        """Replace the line; with -q, draw nothing."""
        if not is_shown(text):
            return
        if not self.live:
            print(text, file=self._stream, flush=True)
            return
        self._stream.write(self._erasure() + text)
        self._stream.flush()
        self._text = text

    def note(self, text: str) -> None:
        """Print a line of its own above the status line; with -q, only warnings and errors."""
        if not is_shown(text):
            return
        print(self._erasure() + text, file=self._stream)
        if self._text:
            self._stream.write(self._text)
        self._stream.flush()

    def close(self) -> None:
        """Leave the last state on the screen and end its line."""
        if self._text:
            print(file=self._stream, flush=True)
            self._text = ""

    def _erasure(self) -> str:
        if not self._text:
            return ""
        return "\r\x1b[K" if self.colour else "\r" + " " * _width(self._text) + "\r"


class _Unbreakable:
    """A text stream that drops what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write if possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unbreakable_output() -> Iterator[None]:
    """Inside this block, a broken stdout or stderr loses its lines but raises nothing."""
    before: tuple[TextIO | None, TextIO | None] = sys.stdout, sys.stderr
    # A stream that was closed before the start is None, which print() accepts.
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Unbreakable(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], before)
        for stream in before:
            if stream:
                _silence_if_broken(stream)


def _silence_if_broken(stream: TextIO) -> None:
    """Python flushes both streams at exit, and an error there would replace the exit code."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
