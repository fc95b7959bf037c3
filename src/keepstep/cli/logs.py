"""`keepstep logs`: what a submitted run printed, from all its attempts."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from keepstep.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("name", help="the run")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders live (default: runs)")


def run(args: argparse.Namespace) -> int:
    """Print the log."""
    from keepstep.launch import kubernetes
    from keepstep.launch.job import load_record

    record = load_record(args.runs_dir, args.name)
    if record.system == "k8s":
        return subprocess.run(kubernetes.logs_command(record, args.follow), check=False).returncode
    path = Path(record.log)
    if not args.follow:
        if not path.exists():
            raise UsageError(f"{args.name} has not printed anything yet", f"keepstep logs {args.name} --follow waits")
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        return 0
    return _follow(args.runs_dir, args.name, path)


def _follow(runs_dir: Path, name: str, path: Path) -> int:
    from keepstep.launch.job import load_record
    from keepstep.launch.submit import state

    offset, asked, over = 0, 0.0, False
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            offset += len(text)
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        if over:
            return 0
        if time.monotonic() - asked > 2:
            # Read again: a retry without failed nodes is a new job. One more look at the file follows the last word.
            asked, over = time.monotonic(), state(load_record(runs_dir, name)) in ("", "finished", "failed", "stopped")
        else:
            time.sleep(float(os.environ.get("KEEPSTEP_POLL_S", "0.5")))
