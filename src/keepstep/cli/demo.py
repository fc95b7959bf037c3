"""`keepstep demo`: prepare, train, interrupt, resume and evaluate a small model, offline, in minutes."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from keepstep.cli.parser import new_folder, run_name
from keepstep.core.errors import EXIT_FAILED, UsageError
from keepstep.core.units import format_seconds

MIN_STEPS = 50
"""With fewer steps the run may finish before it is interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("--name", type=run_name, help="the run's name (default: demo, or demo-2 and so on)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")


def run(args: argparse.Namespace) -> int:
    """Run the demo; it fails if the model does not clearly beat the baseline."""
    from keepstep.observe.plot import text_plot
    from keepstep.train.demo import free_name, run_demo

    if args.steps < MIN_STEPS:
        raise UsageError(f"--steps is {args.steps}, but two interruptions need at least {MIN_STEPS}", "--steps 300")
    started = time.monotonic()
    name = new_folder(args.runs_dir, args.name).name if args.name else free_name(args.runs_dir)
    result = run_demo(args.runs_dir, name, args.steps)
    width = min(100, shutil.get_terminal_size().columns)
    print()
    print(text_plot([result.curve], width=width, height=12, title="training loss"))
    print()
    for sample in result.samples:
        print("  | " + sample.replace("\n", "\n  | "))
        print()
    ratio = result.baseline_perplexity / result.perplexity
    print(f"interrupted     at step {result.stopped_at} by SIGTERM; resumed from the checkpoint that it saved")
    print(f"killed          one process at step {result.killed_at} by SIGKILL; the run resumed by itself")
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
    print("  keepstep train my-run/run.yaml --procs 2   # train it; Ctrl-C saves, the same command resumes")
    print("  keepstep models                            # presets from 125M to 405B")
    print(f"  keepstep config show {result.config_path}        # every setting and where it came from")
    return 0
