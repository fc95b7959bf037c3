"""Curves of one or several runs: as text for a terminal, as PNG for a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keepstep.core.terminal import paint
from keepstep.core.units import format_count
from keepstep.observe.columns import FloatArray, downsample, smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2f6fb5", "#c8553d", "#3f8f5f", "#8a5fb0", "#b0832b", "#3d8f9c", "#a8477e", "#6b6b6b")
"""Line colours that people with red-green blindness can distinguish."""
_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class Curve:
    """One named curve; values that are not finite are gaps."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    smooth_weight: float = 0.0
    """Weight of the moving average that a picture draws over the raw values; 0 draws the raw values alone."""


def text_plot(
    curves: Sequence[Curve], width: int = 80, height: int = 16, *, title: str = "loss", colour: bool = False
) -> str:
    """The curves in braille dots with labelled axes: `width` characters wide, `height` lines without the axes."""
    cleaned = [(curve.name, *_finite(curve)) for curve in curves]
    shown = [(name, steps, values) for name, steps, values in cleaned if len(values)]
    if not shown:
        return f"{title}: no values yet"
    low, high = _range(np.concatenate([values for _, _, values in shown]))
    first = min(float(steps[0]) for _, steps, _ in shown)
    last = max(float(steps[-1]) for _, steps, _ in shown)
    labels = [f"{high:.4g}", f"{(low + high) / 2:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(8, width - margin - 1)
    canvas = _Canvas(columns, height)
    for index, (_, steps, values) in enumerate(shown):
        canvas.line((steps - first) / max(last - first, 1e-9), (values - low) / (high - low), index)
    marks = {0: labels[0], (height - 1) // 2: labels[1], height - 1: labels[2]}
    labelled = [f"{marks.get(row, ''):>{margin - 1}} {'┤' if row in marks else '│'}" for row in range(height)]
    lines = [label + text for label, text in zip(labelled, canvas.rows(colour), strict=True)]
    left, right = format_count(first), f"step {format_count(last)}"
    axis = " " * margin + "└" + "─" * columns
    foot = " " * (margin + 1) + left + right.rjust(max(1, columns - len(left)))
    return "\n".join([_legend(title, [name for name, _, _ in shown], width, colour), *lines, axis, foot])


def _legend(title: str, names: Sequence[str], width: int, colour: bool) -> str:
    if len(names) == 1:
        return f"{title}: {names[0]}"[:width] if names[0] else title
    if not colour:
        return f"{title}: {', '.join(names)}"[:width]
    painted = (paint(name, _STYLES[index % len(_STYLES)]) for index, name in enumerate(names))
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
    """A canvas of braille characters, each two dots wide and four dots high."""

    def __init__(self, columns: int, rows: int) -> None:
        self._dots = np.zeros((rows, columns), dtype=np.uint8)
        self._owner = np.full((rows, columns), -1, dtype=np.int8)
        self._wide, self._high = columns * 2, rows * 4

    def line(self, across: FloatArray, upward: FloatArray, owner: int) -> None:
        """Draw a line through points given as shares of the canvas; a dot column with many points spans their range."""
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

    def rows(self, colour: bool) -> Iterator[str]:
        """The canvas as lines of text."""
        for dots, owners in zip(self._dots.tolist(), self._owner.tolist(), strict=True):
            marks = [chr(0x2800 + dot) if dot else " " for dot in dots]
            if colour:
                styles = [_STYLES[owner % len(_STYLES)] if dot else "" for dot, owner in zip(dots, owners, strict=True)]
                marks = list(map(paint, marks, styles))
            yield "".join(marks).rstrip()


def draw_figure(curves: Sequence[Curve], *, title: str = "loss") -> Figure:
    """The curves as a picture: each with its raw values, noisy ones pale below their average, which is labelled."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        steps, values = _finite(curve)
        tone, weight = COLOURS[index % len(COLOURS)], curve.smooth_weight
        pieces = downsample(steps, values, smooth(values, weight), 2000)
        if len(values) > len(pieces.steps):
            axes.fill_between(pieces.steps, pieces.low, pieces.high, color=tone, alpha=0.25, linewidth=0.4)
        elif weight:
            axes.plot(steps, values, color=tone, alpha=0.3, linewidth=0.8)
        label = f"{curve.name}, smoothed {weight:g}".removeprefix(", ") if weight else curve.name
        # Few values, such as validations, are marked: the line between them was not measured.
        marker = "" if weight or len(values) > 60 else "."
        axes.plot(pieces.steps, pieces.smooth, color=tone, linewidth=1.6, label=label, marker=marker)
    axes.set_xlabel("step")
    axes.set_ylabel(title)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if any(curve.name or curve.smooth_weight for curve in curves):
        axes.legend(frameon=False)
    return figure


def png_bytes(curves: Sequence[Curve], *, title: str = "loss") -> bytes:
    """The curves as a PNG image."""
    image = BytesIO()
    draw_figure(curves, title=title).savefig(image, format="png")
    return image.getvalue()


def png_plot(curves: Sequence[Curve], path: Path, *, title: str = "loss") -> None:
    """The curves as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png_bytes(curves, title=title))
