"""`keepstep runs`: list runs, compare two, merge the logs of one, write dashboards."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.core.files import write_atomic
from keepstep.observe import cache
from keepstep.observe.compare import compare
from keepstep.observe.folder import find_run, find_runs
from keepstep.observe.history import glance, open_history
from keepstep.observe.logs import format_line, merged
from keepstep.observe.plot import Curve, text_plot
from keepstep.observe.progress import wants_colour
from keepstep.observe.terminal import runs_table
from keepstep.observe.view import jsonable, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do with which runs."""
    parser.usage = "keepstep runs [RUNS_DIR] | compare A B | logs RUN | dashboards FOLDER"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUNS_DIR",
        help="a folder of runs to list; or `compare A B`; or `logs RUN` for all logs in time order; or `dashboards "
        "FOLDER` to write Grafana dashboards and Prometheus rules there",
    )
    parser.add_argument("--runs-dir", default="runs", help="where run names are looked up (default: runs)")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Dispatch on the first word."""
    match args.words:
        case ["compare", left, right]:
            return _compare(left, right, Path(args.runs_dir), args.json)
        case ["logs", name]:
            return _logs(name, Path(args.runs_dir), args.json)
        case ["dashboards", folder]:
            return _dashboards(Path(folder))
        case ["compare" | "logs" | "dashboards", *_]:
            hint = "runs compare A B, runs logs RUN, or runs dashboards FOLDER"
            raise UsageError(f"{' '.join(args.words)!r} does not say which", hint)
        case [folder]:
            return _list(Path(folder), args.json)
        case []:
            return _list(Path(args.runs_dir), args.json)
    raise UsageError(f"{' '.join(args.words)!r} is not understood", "keepstep runs --help")


def _list(runs_dir: Path, as_json: bool) -> int:
    now = time.time()
    rows = []
    for folder in find_runs(runs_dir):
        try:
            rows.append(summary(glance(folder), now))
        except OSError as error:
            # Deleted just now, or another user's and closed: no reason to list none of the others.
            print(f"notice: {folder.root} is left out: {error.strerror}", file=sys.stderr)
    rows.sort(key=lambda row: row["updated"], reverse=True)
    if as_json:
        print(json.dumps(jsonable(rows), indent=2))
        return 0
    if not rows:
        print(f"no runs in {runs_dir}")
        print("next: keepstep demo", file=sys.stderr)
        return 0
    print(runs_table(rows, now, wants_colour(sys.stdout)))
    print(f"next: keepstep watch {runs_dir / rows[0]['name']}", file=sys.stderr)
    return 0


def _compare(left: str, right: str, runs_dir: Path, as_json: bool) -> int:
    histories = [open_history(find_run(name, runs_dir), cache.default_dir()) for name in (left, right)]
    answer = compare(*histories)
    if as_json:
        print(json.dumps(jsonable(answer), indent=2))
        return 0
    for part in ("config", "data", "environment"):
        print(_difference(part, answer[part], answer["left"], answer["right"]))
    curves = [
        Curve(history.folder.name, history.train.column("step").tolist(), history.train.column("loss").tolist())
        for history in histories
    ]
    print(text_plot(curves, shutil.get_terminal_size((100, 24)).columns - 1, 12, colour=wants_colour(sys.stdout)))
    print(_curves(answer["curves"]))
    print(f"next: keepstep ui {histories[0].folder.root.parent}", file=sys.stderr)
    return 0


def _dashboards(folder: Path) -> int:
    for source in (resources.files("keepstep.observe") / "dashboards").iterdir():
        if source.name.endswith((".json", ".yaml")):
            write_atomic(folder / source.name, source.read_bytes())
            print(folder / source.name)
    print(f"next: promtool check rules {folder / 'rules.yaml'}; import the .json files in Grafana", file=sys.stderr)
    return 0


def _difference(part: str, rows: list[dict[str, Any]], left: str, right: str) -> str:
    if not rows:
        return f"{part}: no difference\n"
    cells = [(row["key"], str(row["left"]), str(row["right"])) for row in rows]
    widths = [max(len(line[place]) for line in [(part, left, right), *cells]) for place in range(2)]
    lines = [(part, left, right), *cells]
    return "\n".join(f"{key:<{widths[0]}}  {a:<{widths[1]}}  {b}" for key, a, b in lines) + "\n"


def _curves(gap: dict[str, Any]) -> str:
    if not gap:
        return "curves: no common steps"
    if gap["identical"]:
        return f"curves: identical over all {gap['common_steps']:,} common steps"
    parts = [f"curves: first differ at step {gap['first_difference_step']:,}"]
    if gap["largest_gap"] is not None:
        parts.append(f"largest gap {gap['largest_gap']:+.4g} at step {gap['largest_gap_step']:,}")
        parts.append(f"mean gap over the last tenth {gap['mean_gap_last_tenth']:+.4g}")
    if gap["not_finite"]:
        parts.append(f"only one of them has a finite loss at {gap['not_finite']:,} of {gap['common_steps']:,} steps")
    return "; ".join(parts)


def _logs(name: str, runs_dir: Path, as_json: bool) -> int:
    folder = find_run(name, runs_dir)
    logs = merged(folder.logs)
    if as_json:
        print(json.dumps({"first_traceback": logs.first_traceback, "lines": logs.lines}, indent=2))
        return 0
    if logs.first_traceback:
        first = logs.first_traceback
        print(f"first error: {first.get('role')}/{first.get('rank')}\n{first['traceback'].rstrip()}\n")
    for line in logs.lines:
        print(format_line(line))
    print(f"next: keepstep report {folder.root}" if logs.lines else f"no logs in {folder.logs}", file=sys.stderr)
    return 0
