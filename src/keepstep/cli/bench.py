"""`keepstep bench step`: tokens a second, MFU, memory and where the time goes, for any preset on this machine.

`keepstep bench storage` stands in bench_storage.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli import bench_storage
from keepstep.cli.arguments import check_place
from keepstep.config.load import load_config, split_words
from keepstep.core.errors import UsageError
from keepstep.core.files import write_json
from keepstep.core.units import format_count

if TYPE_CHECKING:
    from keepstep.train.bench import StepBench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("what", choices=["step", "storage"], help="what to measure")
    parser.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help="the run and what differs")
    parser.add_argument("--steps", type=int, default=10, help="measured steps (default: 10)")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    bench_storage.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    check_place(args.out)
    if args.what == "storage":
        return bench_storage.run(args)
    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}, but it must be at least 1")
    path, overrides = split_words(args.words)
    config = load_config(path, overrides).config
    from keepstep.core.ranks import from_environment
    from keepstep.train.bench import bench_step

    result = bench_step(config, args.steps)
    if not from_environment().is_first:
        return 0
    if args.out:
        write_json(args.out, result.as_dict())
    if args.json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _print_table(result)
        if args.out:
            print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _print_table(result: StepBench) -> None:
    print(f"model     {result.model}, {format_count(result.parameters)} parameters, rows of {result.seq_len} tokens")
    print(f"machine   {result.world_size} × {result.device}, torch {result.torch}, {result.precision}")
    print(f"step      {result.step_s * 1000:.1f} ms (median of {len(result.steps_s)})")
    print(f"speed     {result.tokens_per_s:,.0f} tokens/s, MFU {result.mfu:.1%}")
    print(f"memory    {result.peak_memory_gib:.1f} GiB at the peak")
    total = sum(result.breakdown.values()) or 1.0
    for kind, seconds in result.breakdown.items():
        print(f"  {kind:<14}{seconds * 1000:9.1f} ms  {seconds / total:6.1%}")
