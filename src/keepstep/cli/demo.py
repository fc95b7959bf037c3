"""`keepstep demo`: the whole way once, offline, in minutes."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from keepstep.core.errors import EXIT_FAILED, UsageError
from keepstep.core.units import format_seconds

LEAST_STEPS = 50
"""With fewer the run may be over before it is interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the run is kept (default: runs)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")


def run(args: argparse.Namespace) -> int:
    """Run the demo and judge it: a model that does not clearly beat the baseline is a failure."""
    from keepstep.observe.plot import text_plot
    from keepstep.train.demo import run_demo

    if args.steps < LEAST_STEPS:
        raise UsageError(f"--steps is {args.steps}, but to be interrupted twice it needs {LEAST_STEPS}", "--steps 300")
    started = time.monotonic()
    result = run_demo(args.runs_dir, args.steps)
    width = min(100, shutil.get_terminal_size().columns)
    print()
    print(text_plot([result.curve], width=width, height=12, title="training loss"))
    print()
    for sample in result.samples:
        print("  | " + sample.replace("\n", "\n  | "))
        print()
    ratio = result.baseline_perplexity / result.perplexity
    print(f"interrupted     at step {result.stopped_at} by SIGTERM, resumed from the checkpoint it left")
    print(f"killed          one process at step {result.killed_at} by SIGKILL; the run went on by itself")
    print(f"perplexity      {result.perplexity:.1f} on held-out text")
    print(f"unigram         {result.baseline_perplexity:.1f}: the baseline is {ratio:.1f} times worse")
    print(f"loss curve      {result.picture}")
    print(f"took            {format_seconds(time.monotonic() - started)}")
    if ratio < 3:
        print("error: the model is not three times better than the unigram baseline", file=sys.stderr)
        return EXIT_FAILED
    print()
    print("next:")
    print("  keepstep new my-run                        # a run.yaml of your own")
    print("  keepstep train my-run/run.yaml --procs 2   # train it; Ctrl-C saves, the same command goes on")
    print("  keepstep models                            # shapes from 125m to 405b")
    print(f"  keepstep config show {result.config_path}        # every setting and where it came from")
    return 0
