"""`keepstep jobs`: every submitted run and how it stands."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from keepstep.core.units import format_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders live (default: runs)")
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Ask each job's scheduler and print one line a job."""
    from keepstep.launch.job import all_records
    from keepstep.launch.submit import state

    found = [(record, state(record) or "forgotten") for record in all_records(args.runs_dir)]
    if args.json:
        print(json.dumps([{**asdict(record), "state": word} for record, word in found], indent=2))
        return 0
    if not found:
        print(f"no jobs in {args.runs_dir}")
        print("next: keepstep train run.yaml --on slurm:PROFILE --dry-run")
        return 0
    width = max(len(record.name) for record, _ in found)
    for record, word in found:
        where = f"{record.system}:{record.profile}" if record.profile else record.system
        age = format_seconds(time.time() - record.submitted)
        print(f"{record.name:<{width}}  {word:<10} {where:<20} {record.job_id:<12} {record.nodes:>4} nodes  {age} ago")
    print(f"next: keepstep logs {found[0][0].name} --follow")
    return 0
