"""One file about a run, to share: state, curves, goodput, events, and the plan compared with measurements."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from keepstep.core.requests import KINDS
from keepstep.core.units import format_bytes, format_count, format_seconds
from keepstep.observe.goodput import CAUSES, account
from keepstep.observe.history import History
from keepstep.observe.leaderboard import leaderboard
from keepstep.observe.plot import Curve, png_bytes, text_plot
from keepstep.observe.run_folder import number, whole
from keepstep.observe.screen import LISTED_EVENTS, clock, shown
from keepstep.observe.verdict import describe, judge
from keepstep.observe.view import SMOOTHED, evaluations, plan_and_measured

PLOTS = (
    ("loss", "Loss"),
    ("reward_margin", "Reward margin"),
    ("reward_mean", "Mean reward"),
    ("kl", "KL divergence from the start"),
    ("response_length", "Tokens of an answer"),
    ("grad_norm", "Gradient norm"),
    ("lr", "Learning rate"),
    ("tokens_per_s", "Tokens per second"),
    ("mfu", "Model FLOPs utilisation"),
    ("memory_gib", "Peak memory in GiB"),
)
_SMOOTH_WEIGHT = 0.9
_ENVIRONMENT = ("keepstep", "torch", "python", "device", "host")
_UNITS = {
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "step_s": ("seconds per step", "{:.4g}"),
    "memory_gib": ("peak memory, GiB", "{:.1f}"),
    "checkpoint_s": ("seconds per checkpoint", "{:.3g}"),
}


@dataclass(frozen=True)
class Table:
    """A heading, column names and rows of text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(history: History, now: float) -> list[Table]:
    """All tables of the report, in reading order; empty ones are left out."""
    made = [_facts(history, now), _plan(history), _goodput(history, now), _requests(history)]
    scores = leaderboard(history.folder)
    made += [_events(history), _evaluations(history)]
    made += [Table("Berkeley Function Calling Leaderboard", scores.heads, scores.rows), _samples(history)]
    return [table for table in made if table.rows]


def _facts(history: History, now: float) -> Table:
    verdict, train = judge(history, now), history.train
    facts = history.facts()
    environment = facts.get("environment") or {key: facts[key] for key in _ENVIRONMENT if key in facts}
    rows = [
        ("state", verdict.state + (f" ({'; '.join(verdict.reasons)})" if verdict.reasons else "")),
        ("step", f"{verdict.step:,}" + (f" of {verdict.total_steps:,}" if verdict.total_steps else "")),
        ("loss", shown(verdict.loss, "{:.4f}")),
        ("validation loss", shown(history.valid.last("valid_loss"), "{:.4f}")),
        ("tokens", format_count(train.last("tokens")) if math.isfinite(train.last("tokens")) else "–"),
        ("ranks", str(verdict.ranks or "–")),
        ("restarts", str(verdict.restarts)),
        ("on disk", f"step {verdict.saved_step:,}" if verdict.saved_step >= 0 else "nothing"),
        *([("skipped saves", str(verdict.skipped_saves))] if verdict.skipped_saves else []),
        *((str(key), str(value)) for key, value in environment.items()),
    ]
    return Table("The run", ("", ""), rows)


def _plan(history: History) -> Table:
    rows = []
    for row in plan_and_measured(history):
        name, pattern = _UNITS[row["what"]]
        planned, measured = row["planned"], row["measured"]
        ratio = measured / planned if planned and math.isfinite(planned) else math.nan
        rows.append((name, shown(planned, pattern), shown(measured, pattern), shown(ratio, "{:.2f}")))
    return Table("Predicted, then measured", ("", "predicted", "measured", "ratio"), rows)


def _goodput(history: History, now: float) -> Table:
    goodput = account(history, now)
    rows = [
        (cause, CAUSES[cause], format_seconds(spent), f"{spent / goodput.wall_s:.1%}")
        for cause, spent in goodput.seconds.items()
        if spent > 0
    ]
    if rows:
        rows.append(("all", "wall clock", format_seconds(goodput.wall_s), "100%"))
    return Table("Goodput by cause", ("cause", "", "time", "share"), rows)


def _requests(history: History) -> Table:
    """What the run asked of object stores, to compare with the bill."""
    found = [event for event in history.events if event.get("kind") == "storage_requests"]
    sums = {kind: sum(whole(event.get(kind), 0) for event in found) for kind in KINDS}
    rows = [
        (kind, format_bytes(count) if kind.endswith("bytes") else f"{count:,}") for kind, count in sums.items() if count
    ]
    return Table("Requests to object stores", ("", ""), rows)


def _events(history: History) -> Table:
    rows = []
    for event in history.events:
        kind = event.get("kind")
        if kind not in LISTED_EVENTS:
            continue
        about = describe(event) if kind in ("fault", "guard", "warning") else ""
        if kind == "resize":
            about = f"{event.get('before', '?')} to {event.get('world_size', '?')} ranks"
        if kind in ("left", "joined"):
            stall = format_seconds(number(event.get("stall_s")))
            about = f"replica {event.get('replica')}, {event.get('ranks')} train, stalled for {stall}"
        if kind == "paused":
            about = f"{event.get('ranks')} replicas wait until there are {event.get('min_nodes')} nodes"
        rows.append((clock(number(event.get("time"))), str(kind), str(event.get("step") or "–"), about))
    return Table("Events", ("time", "event", "step", ""), rows)


def _evaluations(history: History) -> Table:
    found = evaluations(history.valid)[-20:]
    names = [name for name in (found[0] if found else {}) if name != "step"]
    rows = [(f"{row['step']:,.0f}", *(shown(row[name], "{:.5g}") for name in names)) for row in found]
    return Table("Evaluations", ("step", *(name.replace("_", " ") for name in names)), rows)


def _samples(history: History) -> Table:
    rows = [
        (f"{number(line.get('step')):,.0f}", str(line.get("prompt", "")), str(line.get("text", "")))
        for line in history.newest_samples()
    ]
    return Table("Samples", ("step", "prompt", "text"), rows)


def curves(history: History) -> list[tuple[str, list[Curve]]]:
    """The report's plots: title and curves."""
    steps = history.train.column("step").tolist()
    plots = []
    for name, title in PLOTS:
        weight = _SMOOTH_WEIGHT if name in SMOOTHED else 0.0
        lines = [Curve("training" if name == "loss" else "", steps, history.train.column(name).tolist(), weight)]
        if name == "loss" and len(history.valid):
            valid = history.valid
            lines.append(Curve("validation", valid.column("step").tolist(), valid.column("valid_loss").tolist()))
        if any(math.isfinite(value) for value in lines[0].values):
            plots.append((title, lines))
    return plots


def markdown(history: History, now: float) -> str:
    """The report as one Markdown file; its plots are text."""
    parts = [f"# {_cell(history.folder.name)}\n"]
    for title, lines in curves(history):
        parts.append(f"## {title}\n\n```text\n{text_plot(lines, 96, 14, title=title.lower())}\n```\n")
    for table in tables(history, now):
        rows = [table.heads, ["---"] * len(table.heads), *table.rows]
        body = "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)
        parts.append(f"## {table.title}\n\n{body}\n")
    # A fence longer than any in the text cannot be closed by the text.
    fence = "`" * (max(map(len, re.findall(r"`{3,}", history.config_text())), default=2) + 1)
    parts.append(f"## Configuration\n\n{fence}yaml\n{history.config_text().rstrip()}\n{fence}\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Text from a run in one line, so that it is neither HTML nor a link, an image or another cell."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(text, quote=False)).replace("\n", " ")


def page(history: History, now: float) -> str:
    """The report as one self-contained HTML file without scripts. Text from the run is escaped."""
    name = html.escape(history.folder.name)
    parts = [
        f"<h1>{name}</h1>",
        f"<p>Written {clock(now)}.</p>",
        *(_image(title, lines) for title, lines in curves(history)),
        *map(_html_table, tables(history, now)),
        f"<h2>Configuration</h2><pre>{html.escape(history.config_text())}</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    style = (resources.files("keepstep.observe.page") / "static" / "report.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _image(title: str, lines: list[Curve]) -> str:
    encoded = base64.b64encode(png_bytes(lines, title=title.lower())).decode()
    name = html.escape(title)
    return f'<h2>{name}</h2><img alt="{name} by step" src="data:image/png;base64,{encoded}">'


def _html_table(table: Table) -> str:
    def row(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    heads = row("th", table.heads) if any(table.heads) else ""
    rows = "".join(row("td", cells) for cells in table.rows)
    return f"<h2>{html.escape(table.title)}</h2><table>{heads}{rows}</table>"
