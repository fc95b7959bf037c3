"""One file about a run, ready to share: what it did, how well, what broke, and how the plan compares with the truth."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.core.units import format_count, format_seconds
from keepstep.observe.folder import number
from keepstep.observe.goodput import CAUSES, account
from keepstep.observe.history import History
from keepstep.observe.plot import Curve, png_bytes, text_plot
from keepstep.observe.terminal import clock, shown
from keepstep.observe.verdict import describe, judge
from keepstep.observe.view import evaluations, plan_beside_truth

PLOTS = (("loss", "Loss"), ("grad_norm", "Gradient norm"), ("tokens_per_s", "Tokens per second"))
_TOLD = ("start", "resume", "guard", "fault", "restart", "resize", "stop", "finish", "warning")
_ENVIRONMENT = ("keepstep", "torch", "python", "device", "host")
_UNITS = {
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "step_s": ("seconds a step", "{:.4g}"),
    "memory_gib": ("peak memory, GiB", "{:.1f}"),
    "checkpoint_s": ("seconds a checkpoint", "{:.3g}"),
}


@dataclass(frozen=True)
class Table:
    """A heading, column names and rows of text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(history: History, now: float) -> list[Table]:
    """Everything the report says in numbers, in reading order; empty tables are left out."""
    made = [_facts(history, now), _plan(history), _goodput(history, now), _faults(history), _evaluations(history)]
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
        ("newest checkpoint", f"step {verdict.checkpoint_step:,}" if verdict.checkpoint_step >= 0 else "none"),
        *((str(key), str(value)) for key, value in environment.items()),
    ]
    return Table("The run", ("", ""), rows)


def _plan(history: History) -> Table:
    rows = []
    for row in plan_beside_truth(history):
        name, pattern = _UNITS[row["what"]]
        planned, measured = row["planned"], row["measured"]
        ratio = measured / planned if planned and math.isfinite(planned) else math.nan
        rows.append((name, shown(planned, pattern), shown(measured, pattern), shown(ratio, "{:.2f}")))
    return Table("The plan beside the truth", ("", "planned", "measured", "ratio"), rows)


def _goodput(history: History, now: float) -> Table:
    goodput = account(history.events, history.train, history.undone, now)
    rows = [
        (cause, CAUSES[cause], format_seconds(spent), f"{spent / goodput.wall_s:.1%}")
        for cause, spent in goodput.seconds.items()
        if spent > 0
    ]
    if rows:
        rows.append(("all", "wall clock", format_seconds(goodput.wall_s), "100%"))
    return Table("Goodput by cause", ("cause", "", "time", "share"), rows)


def _faults(history: History) -> Table:
    rows = []
    for event in history.events:
        kind = event.get("kind")
        if kind not in _TOLD:
            continue
        about = describe(event) if kind in ("fault", "guard", "warning") else ""
        if kind == "resize":
            about = f"{event.get('before', '?')} to {event.get('world_size', '?')} ranks"
        rows.append((clock(number(event.get("time"))), str(kind), str(event.get("step") or "–"), about))
    return Table("What happened", ("time", "what", "step", ""), rows)


def _evaluations(history: History) -> Table:
    found = evaluations(history.valid)[-20:]
    names = [name for name in (found[0] if found else {}) if name != "step"]
    rows = [(f"{row['step']:,.0f}", *(shown(row[name], "{:.5g}") for name in names)) for row in found]
    return Table("Evaluations", ("step", *(name.replace("_", " ") for name in names)), rows)


def curves(history: History) -> list[tuple[str, list[Curve]]]:
    """The report's plots: title and lines."""
    steps = history.train.column("step").tolist()
    plots = []
    for name, title in PLOTS:
        lines = [Curve("training" if name == "loss" else "", steps, history.train.column(name).tolist())]
        if name == "loss" and len(history.valid):
            valid = history.valid
            lines.append(Curve("validation", valid.column("step").tolist(), valid.column("valid_loss").tolist()))
        if any(math.isfinite(value) for value in lines[0].values):
            plots.append((title, lines))
    return plots


def markdown(history: History, now: float) -> str:
    """The report as one Markdown file; its plots are text, so they show wherever the file does."""
    parts = [f"# {history.folder.name}\n"]
    for title, lines in curves(history):
        parts.append(f"## {title}\n\n```text\n{text_plot(lines, 96, 14, title=title.lower())}\n```\n")
    for table in tables(history, now):
        rows = [table.heads, ["---"] * len(table.heads), *table.rows]
        body = "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)
        parts.append(f"## {table.title}\n\n{body}\n")
    # A fence longer than any in the text cannot be closed by it.
    fence = "`" * (max((len(run) for run in _backticks(history.config_text())), default=2) + 1)
    parts.append(f"## Configuration\n\n{fence}yaml\n{history.config_text().rstrip()}\n{fence}\n")
    return "\n".join(parts)


def _backticks(text: str) -> list[str]:
    import re

    return re.findall(r"`{3,}", text)


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")


_STYLE = """
:root { --ink: #1c1e21; --paper: #fff; --muted: #686d76; --line: #e6e3de; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e7e4; --paper: #16181b; --muted: #979ca5; --line: #2b2f34; } }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 880px;
  margin: 40px auto; padding: 0 20px; font-variant-numeric: tabular-nums; }
h1 { letter-spacing: -.02em; }
h2 { font-size: 16px; margin-top: 36px; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th { text-align: left; color: var(--muted); font-weight: 500; }
td, th { padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); }
img { width: 100%; border-radius: 10px; background: #fff; }
pre { font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { h2, img, tr { break-inside: avoid; } }
"""


def page(history: History, now: float) -> str:
    """The report as one self-contained HTML file. Text from the run is escaped and no script is in it."""
    name = html.escape(history.folder.name)
    parts = [
        f"<h1>{name}</h1>",
        f"<p>Written {clock(now)}.</p>",
        *(_picture(title, lines) for title, lines in curves(history)),
        *map(_html_table, tables(history, now)),
        f"<h2>Configuration</h2><pre>{html.escape(history.config_text())}</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _picture(title: str, lines: list[Curve]) -> str:
    encoded = base64.b64encode(png_bytes(lines, title=title.lower())).decode()
    return (
        f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)} by step" src="data:image/png;base64,{encoded}">'
    )


def _html_table(table: Table) -> str:
    def row(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    heads = row("th", table.heads) if any(table.heads) else ""
    return (
        f"<h2>{html.escape(table.title)}</h2><table>{heads}{''.join(row('td', cells) for cells in table.rows)}</table>"
    )
