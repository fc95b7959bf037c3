"""A run as text: what `keepstep watch` redraws and `keepstep runs` lists."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from keepstep.core.units import format_count, format_seconds
from keepstep.observe.folder import Record, number
from keepstep.observe.goodput import Goodput, account
from keepstep.observe.history import History
from keepstep.observe.plot import Curve, text_plot
from keepstep.observe.verdict import Verdict, judge

_COLOURS = {
    "healthy": "\x1b[32m",
    "degraded": "\x1b[33m",
    "recovering": "\x1b[36m",
    "starting": "\x1b[36m",
    "stalled": "\x1b[31m",
    "failed": "\x1b[31m",
}
_SHOWN_EVENTS = ("start", "resume", "guard", "fault", "restart", "resize", "stop", "finish", "warning")


def paint_state(state: str, colour: bool) -> str:
    """The state word, coloured where that is welcome."""
    return f"{_COLOURS.get(state, '')}\x1b[1m{state}\x1b[0m" if colour else state


def screen(history: History, now: float, width: int, height: int, colour: bool = False) -> str:
    """The whole view: verdict, figures, loss curve, goodput and the latest events, in `width` × `height` characters."""
    verdict = judge(history, now)
    goodput = account(history.events, history.train, history.undone, now)
    head = [_headline(history, verdict, width, colour)]
    if verdict.reasons:
        head.append(f"  {'; '.join(verdict.reasons)}"[:width])
    head += ["", *_figures(history, verdict, goodput, width), ""]
    events = [event for event in history.events if event.get("kind") in _SHOWN_EVENTS][-5:]
    foot = ["", *goodput_lines(goodput, width), "", *(event_line(event, now)[:width] for event in reversed(events))]
    rows = max(5, min(24, height - len(head) - len(foot) - 4))
    train = history.train
    curve = Curve("", train.column("step").tolist(), train.column("loss").tolist())
    return "\n".join([*head, text_plot([curve], width, rows, colour=colour), *foot])


def _headline(history: History, verdict: Verdict, width: int, colour: bool) -> str:
    counts = f"step {verdict.step:,}" + (f" of {verdict.total_steps:,}" if verdict.total_steps else "")
    plain = f"{verdict.state}  {history.folder.name}  {counts}"
    cells = min(30, width - len(plain) - 9)
    bar = ""
    if verdict.total_steps and cells > 4:
        share = min(1.0, verdict.step / verdict.total_steps)
        bar = f"  {'━' * int(share * cells)}{'─' * (cells - int(share * cells))} {share:4.0%}"
    return f"{paint_state(verdict.state, colour)}  {history.folder.name}  {counts}{bar}"


def _figures(history: History, verdict: Verdict, goodput: Goodput, width: int) -> list[str]:
    train = history.train
    saved = "none yet"
    if verdict.checkpoint_step >= 0:
        saved = f"step {verdict.checkpoint_step:,}, {format_seconds(verdict.checkpoint_age_s)} ago"
    pairs = [
        ("loss", shown(verdict.loss, "{:.4f}")),
        ("grad norm", shown(train.last("grad_norm"), "{:.3g}")),
        ("lr", shown(train.last("lr"), "{:.3g}")),
        ("tokens/s", format_count(train.last("tokens_per_s")) if math.isfinite(train.last("tokens_per_s")) else "–"),
        ("MFU", shown(train.last("mfu"), "{:.1%}")),
        ("memory", shown(train.last("memory_gib"), "{:.1f} GiB")),
        ("validation", shown(history.valid.last("valid_loss"), "{:.4f}")),
        ("time left", format_seconds(verdict.eta_s) if math.isfinite(verdict.eta_s) else "–"),
        ("goodput", f"{goodput.share:.1%}"),
        ("checkpoint", saved),
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
    """A number through `pattern`, a dash where there is none, `nan` and `inf` as they are."""
    return "–" if math.isnan(value) else pattern.format(value)


def goodput_lines(goodput: Goodput, width: int) -> list[str]:
    """Shares of the wall clock by cause."""
    if not goodput.wall_s:
        return ["goodput: nothing to account for yet"]
    parts = [f"{cause} {spent / goodput.wall_s:.1%}" for cause, spent in goodput.seconds.items() if spent > 0]
    return textwrap.wrap(f"wall clock {format_seconds(goodput.wall_s)}: {', '.join(parts)}", max(20, width))


def event_line(event: Record, now: float) -> str:
    """One event for people."""
    facts = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in event.items()
        if key not in ("time", "kind", "step", "traceback") and not (key == "rank" and value == 0)
    )
    ago = format_seconds(max(0.0, now - number(event.get("time"))))
    step = f"step {event['step']}" if event.get("step") is not None else ""
    return f"{ago + ' ago':>12}  {str(event.get('kind')).replace('_', ' '):<20}  {step:<12}  {facts}".rstrip()


def runs_table(rows: Sequence[dict[str, Any]], now: float, colour: bool) -> str:
    """Runs as aligned columns, newest first."""
    heads = ("RUN", "STATE", "STEP", "LOSS", "VALID", "TOK/S", "LEFT", "UPDATED")
    cells = [
        (
            row["name"],
            row["state"],
            f"{row['step']:,}" + (f"/{row['total_steps']:,}" if row["total_steps"] else ""),
            shown(row["loss"], "{:.4f}"),
            shown(row["valid_loss"], "{:.4f}"),
            format_count(row["tokens_per_s"]) if math.isfinite(row["tokens_per_s"]) else "–",
            format_seconds(row["eta_s"]) if math.isfinite(row["eta_s"]) else "–",
            format_seconds(max(0.0, now - row["updated"])) + " ago" if math.isfinite(row["updated"]) else "–",
        )
        for row in rows
    ]
    widths = [max(len(line[place]) for line in [heads, *cells]) for place in range(len(heads))]
    lines = ["  ".join(f"{text:<{wide}}" for text, wide in zip(heads, widths, strict=True)).rstrip()]
    for line in cells:
        padded = [f"{text:<{wide}}" for text, wide in zip(line, widths, strict=True)]
        padded[1] = paint_state(line[1], colour) + " " * (widths[1] - len(line[1]))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def clock(moment: float) -> str:
    """A time of day with its date, local."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
