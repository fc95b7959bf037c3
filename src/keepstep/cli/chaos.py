"""`keepstep chaos`: rehearse faults on your own run, before they come by themselves, and get a verdict."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.cli.arguments import check_place
from keepstep.config.load import load_config, split_words
from keepstep.config.schema import RunConfig
from keepstep.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT, UsageError
from keepstep.core.files import write_json

if TYPE_CHECKING:
    from keepstep.launch.rehearsal import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help="the run and what differs")
    parser.add_argument("--procs", type=int, default=2, metavar="N", help="processes of the run (default: 2)")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="length of each rehearsal (default: 24)")
    parser.add_argument("--kinds", default="", metavar="A,B", help="faults to play (default: all; --list shows them)")
    parser.add_argument("--list", action="store_true", help="print the faults that can be played, and stop")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="instead: one run and N random faults")
    parser.add_argument("--mtbf", type=float, default=8.0, metavar="STEPS", help="--random: mean steps between faults")
    parser.add_argument("--seed", type=int, default=0, help="--random: the same seed plays the same faults")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="most for a run (default: 600)")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--out", type=Path, help="also write the JSON there")


def run(args: argparse.Namespace) -> int:
    """Play, print the table, and exit 0 only if every fault was survived."""
    from keepstep.launch.plays import all_plays
    from keepstep.launch.rehearsal import Stage

    path, overrides = split_words(args.words)
    config = load_config(path, overrides).config
    _check(args)
    check_place(args.out)
    folder = Path(config.runs_dir) / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    words = [*args.words, *same_threads(config, args.procs)]
    stage = Stage(words, folder.absolute(), args.steps, args.procs, args.timeout)
    if args.list:
        for kind in all_plays(stage):
            print(kind)
        return EXIT_DONE
    left_out: dict[str, str] = {}
    outcomes = _random(args, stage) if args.random else _one_by_one(args, stage, left_out)
    survived = all(outcome.passed for outcome in outcomes)
    # A fault that was asked for and could not be played says nothing about the run: that is no pass.
    unplayed = bool(left_out) and (not outcomes or bool(args.kinds))
    passed = survived and not unplayed
    told: dict[str, Any] = {
        "passed": passed,
        "faults": [asdict(outcome) for outcome in outcomes],
        "left_out": left_out,
    }
    if args.out:
        write_json(args.out, told)
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        _print_table(outcomes)
        for kind, why in left_out.items():
            print(f"not played: {kind}, {why}")
        verdict = "passed" if passed else "FAILED" if not survived else "NOT PLAYED"
        print(f"{verdict}: logs and runs are in {folder}")
    return EXIT_DONE if passed else EXIT_FAILED if not survived else EXIT_PREFLIGHT


def _check(args: argparse.Namespace) -> None:
    """Numbers that no rehearsal can be played with."""
    if args.steps < 12:
        raise UsageError(f"--steps is {args.steps}, but a rehearsal needs at least 12")
    for name, value in (("--procs", args.procs), ("--mtbf", args.mtbf), ("--timeout", args.timeout)):
        if not value > 0:
            raise UsageError(f"{name} is {value}, but it must be more than 0")
    if args.random < 0:
        raise UsageError(f"--random is {args.random}, but it is a number of faults", "--random 20")


def same_threads(config: RunConfig, processes: int) -> list[str]:
    """Sums of two threads are not those of one: all runs of a rehearsal, two hosts included, get the same number."""
    if config.compute.threads:
        return []
    return [f"compute.threads={max(1, len(os.sched_getaffinity(0)) // processes)}"]


def _one_by_one(args: argparse.Namespace, stage: Any, left_out: dict[str, str]) -> list[Outcome]:
    """Play each chosen fault in a run of its own; what cannot be played here goes to `left_out`, with the reason."""
    from keepstep.launch.plays import choose
    from keepstep.launch.rehearsal import play, undisturbed
    from keepstep.launch.two_hosts import UnavailableError

    chosen = choose(stage, [kind for kind in args.kinds.split(",") if kind])
    _say(f"an undisturbed run of {stage.steps} steps on {stage.processes} processes")
    wanted = undisturbed(stage)
    outcomes = []
    for number, (kind, make) in enumerate(chosen.items(), start=1):
        try:
            outcome = play(stage, make(), wanted)
        except UnavailableError as error:
            left_out[kind] = str(error)
            _say(f"{number}/{len(chosen)} {kind}: left out, {error}")
            continue
        _say(f"{number}/{len(chosen)} {kind}: {'survived' if outcome.passed else 'FAILED ' + outcome.note}")
        outcomes.append(outcome)
    return outcomes


def _random(args: argparse.Namespace, stage: Any) -> list[Outcome]:
    from keepstep.launch.soak import soak

    return soak(stage, args.random, args.mtbf, args.seed, _say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_table(outcomes: list[Outcome]) -> None:
    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f} s"

    print(f"{'fault':<44}{'detected':>10}{'recovered':>11}{'steps lost':>12}{'loss equal':>12}  verdict")
    for outcome in outcomes:
        print(
            f"{outcome.title:<44}{seconds(outcome.detected_s):>10}{seconds(outcome.recovered_s):>11}"
            f"{'–' if outcome.steps_lost is None else outcome.steps_lost:>12}"
            f"{'yes' if outcome.loss_equal else 'no':>12}  {'pass' if outcome.passed else 'FAIL ' + outcome.note}"
        )
