"""`keepstep stop`: a submitted run saves and stops."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("name", help="the run")
    parser.add_argument("--now", action="store_true", help="end it at once, without a save")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders live (default: runs)")


def run(args: argparse.Namespace) -> int:
    """Ask it to stop."""
    from keepstep.launch.job import load_record
    from keepstep.launch.submit import stop

    record = load_record(args.runs_dir, args.name)
    stop(record, args.now)
    print(f"{args.name}: {'ended' if args.now else 'asked to save and stop'} ({record.job_id})")
    print(f"next: keepstep resume {args.name} goes on where it was")
    return 0
