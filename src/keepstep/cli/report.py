"""`keepstep report`: one file about a run, ready to share."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.core.files import write_atomic
from keepstep.observe import cache, report
from keepstep.observe.folder import find_run
from keepstep.observe.history import open_history


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, into which file."""
    parser.add_argument("run", help="a run's name or folder")
    parser.add_argument("--runs-dir", default="runs", help="where run folders live (default: runs)")
    parser.add_argument("-o", "--output", metavar="FILE", help="NAME.html, NAME.md, or - for Markdown on stdout")


def run(args: argparse.Namespace) -> int:
    """Write the report; the file's ending chooses its format."""
    history = open_history(find_run(args.run, Path(args.runs_dir)), cache.default_dir())
    now = time.time()
    if args.output == "-":
        print(report.markdown(history, now))
        return 0
    path = Path(args.output or f"{history.folder.name}.html")
    if path.suffix not in (".html", ".md"):
        raise UsageError(f"--output is {path}, but it must end in .html or .md", f"-o {path.with_suffix('.html')}")
    write_atomic(path, report.page(history, now) if path.suffix == ".html" else report.markdown(history, now))
    print(path)
    print(f"next: open {path} in a browser" if path.suffix == ".html" else f"next: share {path}", file=sys.stderr)
    return 0
