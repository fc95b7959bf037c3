"""`keepstep chaos`: inject faults into your own run before they happen by themselves, and get a verdict."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli.parser import CONFIG_HELP, new_folder, run_name, writable
from keepstep.config.load import load_config, split_words
from keepstep.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT, UsageError
from keepstep.core.files import write_json
from keepstep.core.messages import invalid_value
from keepstep.core.verbosity import progress

if TYPE_CHECKING:
    from keepstep.chaos.experiment import Experiment
    from keepstep.chaos.verdict import Report

_MIN_STEPS = 12
"""Fewer leave no room for two checkpoints before the fault and some steps after it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help=CONFIG_HELP)
    parser.add_argument("--name", type=run_name, help="folder of the runs, below runs_dir (default: chaos-DATE-TIME)")
    parser.add_argument("--procs", type=int, default=2, metavar="N", help="processes of the run (default: 2)")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="length of each run (default: 24)")
    parser.add_argument("--kinds", default="", metavar="A,B", help="faults to inject (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="print the names of all faults with what they do, and stop")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="instead: one run with N random faults")
    parser.add_argument("--mtbf", type=float, default=8.0, metavar="STEPS", help="--random: mean steps between faults")
    parser.add_argument("--seed", type=int, default=0, help="--random: the same seed injects the same faults")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="time limit of a run (default: 600)")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--out", type=writable, help="also write the JSON to this file")


def run(args: argparse.Namespace) -> int:
    """Run the scenarios, print the table, and exit 0 only if the run survived every fault."""
    from keepstep.chaos.scenarios import choose_scenarios, describe_scenarios
    from keepstep.chaos.verdict import run_scenarios, soak

    experiment = _experiment(args)
    if args.list:
        print("\n".join(f"{name:<14} {what}" for name, what in describe_scenarios(experiment).items()))
        return EXIT_DONE
    if args.random:
        report = soak(experiment, args.random, args.mtbf, args.seed, progress)
    else:
        names = [kind for kind in args.kinds.split(",") if kind]
        report = run_scenarios(experiment, choose_scenarios(experiment, names), progress, asked_for=bool(names))
    if args.out:
        write_json(args.out, report.as_values())
    if args.json:
        print(json.dumps(report.as_values(), indent=2))
    else:
        _print_report(report, experiment.folder)
    return EXIT_DONE if report.passed else EXIT_FAILED if not report.survived else EXIT_PREFLIGHT


def _experiment(args: argparse.Namespace) -> Experiment:
    from keepstep.chaos.experiment import Experiment, same_threads

    config = load_config(*split_words(args.words)).config
    if args.steps < _MIN_STEPS:
        raise UsageError(
            invalid_value("--steps", args.steps, f"must be at least {_MIN_STEPS}"), f"--steps {_MIN_STEPS}"
        )
    for name, value in (("--procs", args.procs), ("--mtbf", args.mtbf), ("--timeout", args.timeout)):
        if not value > 0:
            raise UsageError(invalid_value(name, value, "must be more than 0"), f"leave {name} out for its default")
    if args.random < 0:
        raise UsageError(invalid_value("--random", args.random, "must be a number of faults"), "--random 20")
    folder = new_folder(Path(config.runs_dir), args.name or f"chaos-{time.strftime('%Y%m%d-%H%M%S')}")
    words = [*args.words, *same_threads(config, args.procs)]
    replica_size = max(1, config.parallel.shard)
    return Experiment(words, folder.absolute(), args.steps, args.procs, args.timeout, replica_size)


def _print_report(report: Report, folder: Path) -> None:
    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f} s"

    width = max(44, *(len(outcome.title) + 2 for outcome in report.outcomes), 0)
    print(f"{'fault':<{width}}{'detected':>10}{'recovered':>11}{'steps lost':>12}{'loss equal':>12}  verdict")
    for outcome in report.outcomes:
        print(
            f"{outcome.title:<{width}}{seconds(outcome.detected_s):>10}{seconds(outcome.recovered_s):>11}"
            f"{'–' if outcome.steps_lost is None else outcome.steps_lost:>12}"
            f"{'yes' if outcome.loss_equal else 'no':>12}  {'pass' if outcome.passed else 'FAIL ' + outcome.note}"
        )
    for kind, why in report.left_out.items():
        print(f"skipped: {kind}, {why}")
    verdict = "passed" if report.passed else "FAILED" if not report.survived else "NOT RUN"
    print(f"{verdict}: logs and runs are in {folder}")
