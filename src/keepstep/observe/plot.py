"""Loss curves: as text for a terminal and as PNG for a report. Raw and smoothed, one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from keepstep.core.units import format_count
from keepstep.observe.columns import FloatArray, smooth, thin

COLOURS = ("#2f6fb5", "#c8553d", "#3f8f5f", "#8a5fb0", "#b0832b", "#3d8f9c", "#a8477e", "#6b6b6b")
"""Line colours, told apart by people who do not see red from green."""
_TERMINAL_COLOURS = ("\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m", "\x1b[34m", "\x1b[31m")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class Curve:
    """One named line; values that are not finite are gaps."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


def text_plot(
    curves: Sequence[Curve], width: int = 80, height: int = 16, *, title: str = "loss", colour: bool = False
) -> str:
    """The curves in braille dots with labelled axes, `width` characters wide, `height` lines for the field itself."""
    cleaned = [(curve.name, *_finite(curve)) for curve in curves]
    shown = [(name, steps, values) for name, steps, values in cleaned if len(values)]
    if not shown:
        return f"{title}: nothing to plot yet"
    low, high = _range(np.concatenate([values for _, _, values in shown]))
    first = min(float(steps[0]) for _, steps, _ in shown)
    last = max(float(steps[-1]) for _, steps, _ in shown)
    labels = [f"{high:.4g}", f"{(low + high) / 2:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(8, width - margin - 1)
    canvas = _Canvas(columns, height)
    for index, (_, steps, values) in enumerate(shown):
        across = (steps - first) / max(last - first, 1e-9)
        upward = (values - low) / (high - low)
        canvas.line(across, upward, index)
    rows = canvas.rows(_TERMINAL_COLOURS if colour else ())
    marks = {0: labels[0], (height - 1) // 2: labels[1], height - 1: labels[2]}
    lines = [
        f"{marks.get(row, ''):>{margin - 1}} {'┤' if row in marks else '│'}{text}" for row, text in enumerate(rows)
    ]
    left, right = format_count(first), f"step {format_count(last)}"
    axis = " " * margin + "└" + "─" * columns
    foot = " " * (margin + 1) + left + right.rjust(max(1, columns - len(left)))
    return "\n".join([_legend(title, [name for name, _, _ in shown], width, colour), *lines, axis, foot])


def _legend(title: str, names: Sequence[str], width: int, colour: bool) -> str:
    if len(names) == 1:
        return f"{title}: {names[0]}"[:width] if names[0] else title
    if not colour:
        return f"{title}: {', '.join(names)}"[:width]
    painted = (f"{_TERMINAL_COLOURS[i % len(_TERMINAL_COLOURS)]}{name}\x1b[0m" for i, name in enumerate(names))
    return f"{title}: " + ", ".join(painted)


def _finite(curve: Curve) -> tuple[FloatArray, FloatArray]:
    steps, values = np.asarray(curve.steps, np.float64), np.asarray(curve.values, np.float64)
    good = np.isfinite(values) & np.isfinite(steps)
    return steps[good], values[good]


def _range(values: FloatArray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        half = abs(low) * 0.05 or 0.5
        return low - half, high + half
    return low, high


class _Canvas:
    """A field of braille characters: each is two dots wide and four high."""

    def __init__(self, columns: int, rows: int) -> None:
        self._dots = np.zeros((rows, columns), dtype=np.uint8)
        self._owner = np.full((rows, columns), -1, dtype=np.int8)
        self._wide, self._high = columns * 2, rows * 4

    def line(self, across: FloatArray, upward: FloatArray, owner: int) -> None:
        """Draw a line through points given as shares of the field; dot columns with many points span their range."""
        columns = np.clip((across * (self._wide - 1)).round().astype(int), 0, self._wide - 1)
        rows = np.clip(((1 - upward) * (self._high - 1)).round().astype(int), 0, self._high - 1)
        previous: tuple[int, int] | None = None
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(columns)], strict=True):
            column, piece = int(columns[start]), rows[start:end]
            if previous is not None:
                self._segment(previous, (column, int(piece[0])), owner)
            for row in range(int(piece.min()), int(piece.max()) + 1):
                self._dot(column, row, owner)
            previous = (column, int(piece[-1]))

    def _segment(self, start: tuple[int, int], end: tuple[int, int], owner: int) -> None:
        count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for part in range(count + 1):
            column = start[0] + round((end[0] - start[0]) * part / count)
            self._dot(column, start[1] + round((end[1] - start[1]) * part / count), owner)

    def _dot(self, column: int, row: int, owner: int) -> None:
        self._dots[row // 4, column // 2] |= _DOTS[row % 4][column % 2]
        self._owner[row // 4, column // 2] = owner

    def rows(self, colours: Sequence[str]) -> list[str]:
        """The field as lines of text."""
        return [self._row(row, colours) for row in range(self._dots.shape[0])]

    def _row(self, row: int, colours: Sequence[str]) -> str:
        cells: list[str] = []
        for dots, owner in zip(self._dots[row].tolist(), self._owner[row].tolist(), strict=True):
            mark = chr(0x2800 + dots) if dots else " "
            cells.append(f"{colours[owner % len(colours)]}{mark}\x1b[0m" if colours and dots else mark)
        return "".join(cells).rstrip()


def png_bytes(curves: Sequence[Curve], *, title: str = "loss", smoothing: float = 0.9) -> bytes:
    """The curves as a PNG picture: raw pale, smoothed on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        steps, values = _finite(curve)
        tone = COLOURS[index % len(COLOURS)]
        pieces = thin(steps, values, smooth(values, smoothing), 2000)
        if len(values) > len(pieces.steps):
            axes.fill_between(pieces.steps, pieces.low, pieces.high, color=tone, alpha=0.25, linewidth=0.4)
        else:
            axes.plot(steps, values, color=tone, alpha=0.3, linewidth=0.8)
        axes.plot(pieces.steps, pieces.smooth, color=tone, linewidth=1.6, label=curve.name)
    axes.set_xlabel("step")
    axes.set_ylabel(title)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if any(curve.name for curve in curves):
        axes.legend(frameon=False)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def png_plot(curves: Sequence[Curve], path: Path, *, title: str = "loss", smoothing: float = 0.9) -> None:
    """The curves as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png_bytes(curves, title=title, smoothing=smoothing))
