"""`keepstep watch`: one run, live, in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.observe import cache
from keepstep.observe.folder import find_run
from keepstep.observe.history import History
from keepstep.observe.progress import wants_colour
from keepstep.observe.terminal import screen
from keepstep.observe.verdict import judge
from keepstep.observe.view import jsonable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, how often."""
    parser.add_argument("run", help="a run's name or folder")
    parser.add_argument("--runs-dir", default="runs", help="where run folders live (default: runs)")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="seconds between looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="look once and end")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON, once")


def run(args: argparse.Namespace) -> int:
    """Redraw until the run ends; once where stdout is no terminal, or a dumb one."""
    if not args.every > 0:
        raise UsageError(f"--every is {args.every:g}, but it must be more than 0 seconds", "--every 2")
    history = History(find_run(args.run, Path(args.runs_dir)), cache.default_dir())
    history.refresh()
    if args.json:
        print(json.dumps(jsonable(asdict(judge(history, time.time()))), indent=2))
        return 0
    colour = wants_colour(sys.stdout)
    # A dumb terminal (an editor's, a log viewer's) shows what moves the cursor as rubbish.
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not args.once
    while True:
        size = shutil.get_terminal_size((100, 36))
        # One line is kept for the prompt that follows, and the last column free so that no line wraps.
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
    print(f"next: keepstep report {history.folder.root}", file=sys.stderr)
    return 0
