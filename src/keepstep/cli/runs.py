"""`keepstep runs`, `watch`, `ui` and `report`: list, compare and follow runs, in the terminal, a browser or a file."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from keepstep.cli.parser import add_action, add_actions
from keepstep.cli.serve import add_access, read_access, serve_until_interrupted
from keepstep.core.errors import HardwareError, UsageError
from keepstep.core.files import write_atomic
from keepstep.core.messages import invalid_value
from keepstep.core.terminal import align, can_redraw, wants_colour
from keepstep.core.verbosity import progress
from keepstep.observe import report
from keepstep.observe.history import History, default_cache_dir, open_history, open_recent
from keepstep.observe.logs import format_line, merged
from keepstep.observe.plot import Curve, text_plot
from keepstep.observe.run_folder import RunFolder, find_run, find_runs
from keepstep.observe.screen import runs_table, screen
from keepstep.observe.verdict import judge
from keepstep.observe.view import compare as compare_runs
from keepstep.observe.view import damaged, jsonable, summary

if TYPE_CHECKING:
    from keepstep.observe.page.server import PageServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = add_actions(parser, default="list")
    listing = add_action(actions, "list", _list, "list the runs of a folder (default)")
    listing.add_argument("folder", nargs="?", metavar="RUNS_DIR", help="a folder of runs (default: --runs-dir)")
    compare = add_action(actions, "compare", _compare, "show what differs between two runs")
    compare.add_argument("left", metavar="A", help="the name or folder of a run")
    compare.add_argument("right", metavar="B", help="the name or folder of another run")
    logs = add_action(actions, "logs", _logs, "print the logs of all processes of a run in time order")
    logs.add_argument("name", metavar="RUN", help="the name or folder of a run")
    dashboards = add_action(actions, "dashboards", _dashboards, "write Grafana dashboards and Prometheus rules")
    dashboards.add_argument("folder", type=Path, metavar="FOLDER", help="where to write them")
    for action in (listing, compare, logs):
        action.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
        action.add_argument("--json", action="store_true", help="print JSON")


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Options of `keepstep watch`."""
    _add_run(parser)
    add = parser.add_argument
    add("--every", type=float, default=2.0, metavar="SECONDS", help="seconds between updates (default: 2)")
    add("--once", action="store_true", help="print once and exit")
    add("--json", action="store_true", help="print the verdict once, as JSON")
    parser.set_defaults(call=_watch)


def add_ui(parser: argparse.ArgumentParser) -> None:
    """Options of `keepstep ui`."""
    add = parser.add_argument
    add("runs_dir", nargs="?", default="runs", help="a folder of runs, or one run (default: runs)")
    add_access(parser, 8080)
    add("--no-cache", action="store_true", help="do not store parsed curves in your cache folder")
    add("--until-stdin-closes", action="store_true", help="stop when the process that started this one exits")
    parser.set_defaults(call=_ui)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of `keepstep report`."""
    _add_run(parser)
    destination = "a .html or .md file, or - for Markdown on stdout (default: RUN.html)"
    parser.add_argument("-o", "--output", metavar="FILE", help=destination)
    parser.set_defaults(call=_report)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the name or folder of a run")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")


def _open(run: str, runs_dir: Path) -> History:
    return open_history(find_run(run, runs_dir), default_cache_dir())


def _list(args: argparse.Namespace) -> int:
    runs_dir = Path(args.folder or args.runs_dir)
    now = time.time()
    rows = []
    for folder in find_runs(runs_dir):
        try:
            rows.append(summary(open_recent(folder), now))
        except OSError as error:
            # It was just deleted, or another user owns it: list the others.
            print(f"notice: {folder.root} is skipped: {error.strerror}", file=sys.stderr)
        except Exception as error:  # whatever one run holds, the others are listed
            rows.append(damaged(folder, error))
    rows.sort(key=lambda row: row["updated"], reverse=True)
    if args.json:
        print(json.dumps(jsonable(rows), indent=2))
        return 0
    if not rows:
        print(f"no runs in {runs_dir}")
        progress("next: keepstep demo")
        return 0
    print(runs_table(rows, now, wants_colour(sys.stdout)))
    progress(f"next: keepstep watch {runs_dir / rows[0]['name']}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    histories = [_open(name, args.runs_dir) for name in (args.left, args.right)]
    answer = compare_runs(*histories)
    if args.json:
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
    progress(f"next: keepstep ui {histories[0].folder.root.parent}")
    return 0


def _dashboards(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    for source in (resources.files("keepstep.observe") / "dashboards").iterdir():
        if source.name.endswith((".json", ".yaml")):
            write_atomic(folder / source.name, source.read_bytes())
            print(folder / source.name)
    progress(f"next: promtool check rules {folder / 'rules.yaml'}; import the .json files in Grafana")
    return 0


def _difference(part: str, rows: list[dict[str, Any]], left: str, right: str) -> str:
    if not rows:
        return f"{part}: no difference\n"
    cells = [(row["key"], str(row["left"]), str(row["right"])) for row in rows]
    return "\n".join(align([(part, left, right), *cells])) + "\n"


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
        parts.append(f"one loss is not finite at {gap['not_finite']:,} of {gap['common_steps']:,} steps")
    return "; ".join(parts)


def _logs(args: argparse.Namespace) -> int:
    folder = find_run(args.name, args.runs_dir)
    logs = merged(folder.logs)
    if args.json:
        print(json.dumps({"first_traceback": logs.first_traceback, "lines": logs.lines}, indent=2))
        return 0
    if logs.first_traceback:
        first = logs.first_traceback
        print(f"first error: {first.get('role')}/{first.get('rank')}\n{first['traceback'].rstrip()}\n")
    for line in logs.lines:
        print(format_line(line))
    progress(f"next: keepstep report {folder.root}" if logs.lines else f"notice: no logs in {folder.logs}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    """Redraw until the run ends; print once if stdout is not a terminal that can redraw."""
    if not args.every > 0:
        raise UsageError(invalid_value("--every", args.every, "must be more than 0 seconds"), "--every 2")
    history = _open(args.run, args.runs_dir)
    if args.json:
        print(json.dumps(jsonable(asdict(judge(history, time.time()))), indent=2))
        return 0
    colour = wants_colour(sys.stdout)
    live = can_redraw(sys.stdout) and not args.once
    while True:
        size = shutil.get_terminal_size((100, 36))
        # One line stays free for the prompt, and the last column so that no line wraps.
        text = screen(history, time.time(), size.columns - 1, size.lines - 2, colour)
        if live:
            # Clear line by line while drawing: clearing the whole screen first flickers.
            sys.stdout.write("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\n\x1b[J")
            sys.stdout.flush()
        else:
            print(text)
        if not live or not judge(history, time.time()).live:
            break
        try:
            time.sleep(args.every)
        except KeyboardInterrupt:
            break
        history.refresh()
    progress(f"next: keepstep report {history.folder.root}")
    return 0


def _report(args: argparse.Namespace) -> int:
    """Write the report; the suffix of the file chooses its format."""
    history = _open(args.run, args.runs_dir)
    now = time.time()
    if args.output == "-":
        print(report.markdown(history, now))
        return 0
    path = Path(args.output or f"{history.folder.name}.html")
    if path.suffix not in (".html", ".md"):
        raise UsageError(
            invalid_value("--output", str(path), "must end in .html or .md"), f"-o {path.with_suffix('.html')}"
        )
    write_atomic(path, report.page(history, now) if path.suffix == ".html" else report.markdown(history, now))
    print(path)
    progress(f"next: open {path} in a browser" if path.suffix == ".html" else f"next: share {path}")
    return 0


def _ui(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from keepstep.observe.page.server import PageServer

    runs_dir, chosen = Path(args.runs_dir), ""
    if not runs_dir.is_dir():
        raise UsageError(f"{runs_dir} is not a folder", "give the folder of your runs (runs_dir in run.yaml)")
    if RunFolder(runs_dir).is_run:
        runs_dir, chosen = runs_dir.resolve().parent, f"#run={quote(runs_dir.resolve().name)}"
    cache_dir = None if args.no_cache else default_cache_dir()
    server = PageServer(runs_dir, read_access(args), cache_dir)
    threading.Thread(target=server.warm, daemon=True).start()
    if args.until_stdin_closes:
        threading.Thread(target=_shut_down_when_stdin_closes, args=(server,), daemon=True).start()
    print(f"runs in {runs_dir}", flush=True)
    print(f"open {server.url}{chosen}", flush=True)
    print("next: Ctrl-C stops the page; runs are not affected", flush=True)
    return serve_until_interrupted(server)


def _shut_down_when_stdin_closes(server: PageServer) -> None:
    sys.stdin.buffer.read()
    server.shutdown()


def start_page_process(runs_dir: Path, name: str) -> str:
    """Serve the page from a process of its own, which ends with this one; return the link to run `name`.

    A process and not a thread: requests of visitors must not slow down training.
    """
    runs_dir.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "keepstep", "ui", str(runs_dir), "--port", "0", "--until-stdin-closes"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout
    for line in server.stdout:
        if line.startswith("open "):
            # The page stops when this pipe closes, so it must stay open until this process exits.
            _PAGE_PROCESSES.append(server)
            return f"{line.split()[1]}#run={quote(name)}"
    raise HardwareError("the live page did not start", "start it yourself: keepstep ui")


_PAGE_PROCESSES: list[subprocess.Popen[str]] = []
