"""`keepstep bench storage`: every pair of data and checkpoint tiers, as a table."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.core.files import write_json
from keepstep.core.units import ByteSize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the action."""
    parser.add_argument(
        "--data", action="append", default=[], metavar="NAME=FOLDER", help="storage: a tier that holds data"
    )
    parser.add_argument(
        "--checkpoints", action="append", default=[], metavar="NAME=FOLDER", help="storage: a tier for checkpoints"
    )
    parser.add_argument("--size", default="1GiB", help="storage: bytes of one checkpoint (default: 1GiB)")
    parser.add_argument("--writers", type=int, default=8, help="storage: shards written at the same time (default: 8)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write it where asked."""
    import json

    from keepstep.launch.storage import CHECKPOINTS, Plan, markdown, measure, read_tiers

    try:
        size = ByteSize.parse(args.size).bytes
    except ValueError as error:
        raise UsageError(f"--size is {args.size!r}, but it {error}", "--size 4GiB") from None
    if args.writers < 1:
        raise UsageError(f"--writers is {args.writers}, but it must be at least 1", "--writers 8")
    if size < args.writers << 20:
        raise UsageError(f"--size {args.size} is less than 1 MiB for each of {args.writers} writers", "--size 1GiB")
    plan = Plan(read_tiers(args.data, "--data"), read_tiers(args.checkpoints, "--checkpoints"), size, args.writers)
    cells = measure(plan, lambda text: print(text, file=sys.stderr))
    rows = [
        {**asdict(cell), "save_minutes": {name: cell.save_minutes(bytes_) for name, bytes_ in CHECKPOINTS.items()}}
        for cell in cells
    ]
    if args.out:
        write_json(args.out, {"size_bytes": size, "writers": args.writers, "cells": rows})
        Path(args.out).with_suffix(".md").write_text(markdown(cells) + "\n")
        print(f"wrote {args.out} and {Path(args.out).with_suffix('.md')}", file=sys.stderr)
    print(json.dumps(rows, indent=2) if args.json else markdown(cells))
    return 0
