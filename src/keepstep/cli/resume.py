"""`keepstep resume`: a submitted run that stopped or failed goes on."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("name", help="the run")
    parser.add_argument("--exclude", default="", metavar="NODE,NODE", help="nodes to leave out")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders live (default: runs)")


def run(args: argparse.Namespace) -> int:
    """Submit it again."""
    from keepstep.launch.job import load_record
    from keepstep.launch.quoting import node_names
    from keepstep.launch.submit import resume

    record = resume(load_record(args.runs_dir, args.name), node_names(args.exclude))
    record.save(args.runs_dir / args.name)
    print(f"{args.name}: submitted again as {record.job_id}")
    print(f"next: keepstep logs {args.name} --follow")
    return 0
