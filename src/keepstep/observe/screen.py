"""A run as text: the screen of `keepstep watch`, the table of `keepstep runs`, and the progress line of training."""

from __future__ import annotations

import math
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from keepstep.core.terminal import StatusLine, align, bar, paint
from keepstep.core.units import format_count, format_seconds
from keepstep.observe.goodput import Goodput, account
from keepstep.observe.history import History
from keepstep.observe.plot import Curve, text_plot
from keepstep.observe.run_folder import Record, number
from keepstep.observe.verdict import Verdict, judge

REDRAW_S = 0.1
PLAIN_S = 10.0
"""Seconds between two lines where there is no terminal, so that a log does not fill with them."""
SMOOTHING = 0.9
_STYLES = {
    "healthy": "bold green",
    "degraded": "bold yellow",
    "recovering": "bold cyan",
    "starting": "bold cyan",
    "stalled": "bold red",
    "failed": "bold red",
}
LISTED_EVENTS = (
    "start", "resume", "guard", "fault", "restart", "resize", "left", "joined", "paused", "stop", "finish",
    "warning",
)  # fmt: skip


def _painted(state: str, colour: bool) -> str:
    return paint(state, _STYLES.get(state, "bold")) if colour else state


def screen(history: History, now: float, width: int, height: int, colour: bool = False) -> str:
    """Verdict, figures, loss curve, goodput and the latest events in `width` × `height` characters."""
    verdict = judge(history, now)
    goodput = account(history, now)
    head = [_headline(history, verdict, width, colour)]
    if verdict.reasons:
        head.append(f"  {'; '.join(verdict.reasons)}"[:width])
    head += ["", *_figures(history, verdict, goodput, width), ""]
    events = [event for event in history.events if event.get("kind") in LISTED_EVENTS][-5:]
    foot = ["", *goodput_lines(goodput, width), "", *(event_line(event, now)[:width] for event in reversed(events))]
    rows = max(5, min(24, height - len(head) - len(foot) - 4))
    train = history.train
    curve = Curve("", train.column("step").tolist(), train.column("loss").tolist())
    return "\n".join([*head, text_plot([curve], width, rows, colour=colour), *foot])


def _headline(history: History, verdict: Verdict, width: int, colour: bool) -> str:
    counts = f"step {verdict.step:,}" + (f" of {verdict.total_steps:,}" if verdict.total_steps else "")
    plain = f"{verdict.state}  {history.folder.name}  {counts}"
    cells = min(30, width - len(plain) - 9)
    progress = ""
    if verdict.total_steps and cells > 4:
        progress = "  " + bar(verdict.step / verdict.total_steps, cells)
    return f"{_painted(verdict.state, colour)}  {history.folder.name}  {counts}{progress}"


def _figures(history: History, verdict: Verdict, goodput: Goodput, width: int) -> list[str]:
    train = history.train
    saved = "nothing yet"
    if verdict.saved_step >= 0:
        saved = f"step {verdict.saved_step:,}, {format_seconds(max(0.0, verdict.checkpoint_age_s))} ago"
    pairs = [
        ("loss", shown(verdict.loss, "{:.4f}")),
        ("grad norm", shown(train.last("grad_norm"), "{:.3g}")),
        ("lr", shown(train.last("lr"), "{:.3g}")),
        ("tokens/s", format_count(train.last("tokens_per_s")) if math.isfinite(train.last("tokens_per_s")) else "–"),
        *([("MFU", f"{train.last('mfu'):.1%}")] if math.isfinite(train.last("mfu")) else []),
        ("memory", shown(train.last("memory_gib"), "{:.1f} GiB")),
        ("validation", shown(history.valid.last("valid_loss"), "{:.4f}")),
        ("time left", format_seconds(verdict.eta_s) if math.isfinite(verdict.eta_s) else "–"),
        ("goodput", f"{goodput.share:.1%}"),
        ("on disk", saved),
        *([("skipped saves", str(verdict.skipped_saves))] if verdict.skipped_saves else []),
        ("lost if killed now", f"{format_seconds(verdict.at_risk_s)}, {verdict.at_risk_steps:,} steps"),
        ("ranks", f"{verdict.ranks or '–'}, {verdict.restarts} restart{'' if verdict.restarts == 1 else 's'}"),
    ]
    columns = max(1, min(3, width // 36))
    rows = -(-len(pairs) // columns)
    lines = []
    for row in range(rows):
        cells = [pairs[place] for place in range(row, len(pairs), rows)]
        lines.append("".join(f"{label + ' ' + value:<{width // columns}}" for label, value in cells).rstrip()[:width])
    return lines


def shown(value: float, pattern: str) -> str:
    """A number formatted with `pattern`; a dash for NaN."""
    return "–" if math.isnan(value) else pattern.format(value)


def goodput_lines(goodput: Goodput, width: int) -> list[str]:
    """Shares of the wall clock by cause."""
    if not goodput.wall_s:
        return ["goodput: the run has not started yet"]
    parts = [f"{cause} {spent / goodput.wall_s:.1%}" for cause, spent in goodput.seconds.items() if spent > 0]
    return textwrap.wrap(f"wall clock {format_seconds(goodput.wall_s)}: {', '.join(parts)}", max(20, width))


def event_line(event: Record, now: float) -> str:
    """One event as a line of text."""
    facts = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in event.items()
        if key not in ("time", "kind", "step", "traceback") and not (key == "rank" and value == 0)
    )
    ago = format_seconds(max(0.0, now - number(event.get("time"))))
    step = f"step {event['step']}" if event.get("step") is not None else ""
    return f"{ago + ' ago':>12}  {str(event.get('kind')).replace('_', ' '):<20}  {step:<12}  {facts}".rstrip()


def runs_table(rows: Sequence[dict[str, Any]], now: float, colour: bool) -> str:
    """Runs as aligned columns."""
    heads = ("RUN", "STATE", "STEP", "ON DISK", "LOSS", "VALID", "TOK/S", "LEFT", "UPDATED")
    cells = [
        (
            row["name"],
            _painted(row["state"], colour),
            f"{row['step']:,}" + (f"/{row['total_steps']:,}" if row["total_steps"] else ""),
            _on_disk(row["saved_step"], row["skipped_saves"]),
            shown(row["loss"], "{:.4f}"),
            shown(row["valid_loss"], "{:.4f}"),
            format_count(row["tokens_per_s"]) if math.isfinite(row["tokens_per_s"]) else "–",
            format_seconds(row["eta_s"]) if math.isfinite(row["eta_s"]) else "–",
            format_seconds(max(0.0, now - row["updated"])) + " ago" if math.isfinite(row["updated"]) else "–",
        )
        for row in rows
    ]
    return "\n".join(align([heads, *cells]))


def _on_disk(saved_step: int, skipped_saves: int) -> str:
    return (f"{saved_step:,}" if saved_step >= 0 else "–") + (f" ({skipped_saves} skipped)" if skipped_saves else "")


def clock(moment: float) -> str:
    """Local date and time, or `?` for a time that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return "?"


@dataclass(frozen=True)
class StepMetrics:
    """What is known after a step. None is left out of the line."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Share of the peak, 0 to 1; None where the device's peak is unknown."""
    memory_gib: float | None = None
    checkpoint_age_s: float | None = None
    """Seconds since the last committed checkpoint; None before the first."""


class Progress:
    """Draws the progress line. `tokens_per_step` turns tokens per second into the time that is left."""

    def __init__(self, total_steps: int, tokens_per_step: int, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._tokens_per_step = tokens_per_step
        self._line = StatusLine(stream)
        self._drawn_at = -math.inf
        self._speed: float | None = None
        self._newest: StepMetrics | None = None

    def update(self, metrics: StepMetrics) -> None:
        """Take one step's numbers and redraw when it is time."""
        if metrics.tokens_per_s:
            before = metrics.tokens_per_s if self._speed is None else self._speed
            self._speed = SMOOTHING * before + (1 - SMOOTHING) * metrics.tokens_per_s
        self._newest = metrics
        interval_s = REDRAW_S if self._line.live else PLAIN_S
        if time.monotonic() - self._drawn_at >= interval_s or metrics.step >= self._total:
            self._draw(metrics)

    def note(self, text: str) -> None:
        """Print a line of its own above the progress line."""
        self._line.note(text)

    def close(self) -> None:
        """Leave the last state on the screen and end its line."""
        if self._newest and self._line.live:
            self._draw(self._newest)
        self._line.close()

    def eta_s(self) -> float | None:
        """Seconds left at the smoothed speed."""
        if not self._speed or self._newest is None:
            return None
        return max(0, self._total - self._newest.step) * self._tokens_per_step / self._speed

    def _draw(self, metrics: StepMetrics) -> None:
        self._drawn_at = time.monotonic()
        # The last column stays free: a terminal wraps a line that fills it.
        width = shutil.get_terminal_size((100, 24)).columns - 1 if self._line.live else 200
        line = progress_line(metrics, self._total, self.eta_s(), width)
        self._line.draw(_painted_line(line) if self._line.colour else line)


def _painted_line(line: str) -> str:
    head, gap, rest = line.partition("  ")
    for bad in ("loss nan", "loss inf"):
        rest = rest.replace(bad, paint(bad, "red"))
    return paint(head, "bold") + gap + rest


def progress_line(metrics: StepMetrics, total_steps: int, eta_s: float | None, width: int) -> str:
    """One line of at most `width` characters: a narrow terminal loses the least important parts first."""
    values: tuple[tuple[int, float | None, Callable[[float], str]], ...] = (
        (1, metrics.loss, "loss {:.4f}".format),
        (6, metrics.grad_norm, "grad {:.3g}".format),
        (3, metrics.tokens_per_s, lambda speed: f"{format_count(speed)} tok/s"),
        (4, metrics.mfu, "MFU {:.1%}".format),
        (7, metrics.memory_gib, "{:.1f} GiB".format),
        (2, eta_s, lambda left_s: f"ETA {format_seconds(left_s)}"),
        (5, metrics.checkpoint_age_s, lambda age_s: f"saved {format_seconds(age_s)} ago"),
    )
    parts = [(importance, write(value)) for importance, value, write in values if value is not None]
    parts.insert(0, (0, _head(metrics.step, total_steps, width)))
    while len(parts) > 1 and len("  ".join(text for _, text in parts)) > width:
        parts.remove(max(parts))
    return "  ".join(text for _, text in parts)[: max(width, 1)]


def _head(step: int, total_steps: int, width: int) -> str:
    counts = f"step {step}/{total_steps}" if total_steps else f"step {step}"
    if not total_steps or width < 100:
        return counts
    return f"{counts} {bar(step / total_steps, 16)}"
