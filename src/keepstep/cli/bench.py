"""`keepstep bench`: measure a training step (speed, MFU, memory, time by kind of kernel) or storage."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from keepstep.cli.parser import CONFIG_HELP, add_action, add_actions, positive, run_name, writable
from keepstep.cli.train import load_run
from keepstep.config.load import split_words
from keepstep.core.errors import UsageError
from keepstep.core.files import write_atomic, write_json
from keepstep.core.messages import invalid_value
from keepstep.core.units import ByteSize, format_count
from keepstep.core.verbosity import progress

if TYPE_CHECKING:
    from keepstep.config.schema import RunConfig
    from keepstep.train.bench import StepBench
    from keepstep.train.tune import Trial


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = add_actions(parser)
    step = add_action(actions, "step", _step, "measure a training step of any preset on this machine")
    step.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help=CONFIG_HELP)
    step.add_argument("--steps", type=positive, default=10, help="measured steps (default: 10)")
    step.add_argument("--tune", action="store_true", help="try settings from the plan and print the fastest")
    step.add_argument("--trials", type=positive, default=6, help="with --tune: settings from the plan (default: 6)")
    step.add_argument("--settings", type=writable, metavar="FILE", help="with --tune: write the fastest as YAML")
    storage = add_action(actions, "storage", _storage, "measure every pair of data and checkpoint storage")
    add = storage.add_argument
    add("--data", action="append", default=[], metavar="NAME=FOLDER", help="a tier with training data")
    add("--checkpoints", action="append", default=[], metavar="NAME=FOLDER", help="a tier for checkpoints")
    add("--size", default="1GiB", help="bytes of one checkpoint (default: 1GiB)")
    add("--writers", type=positive, default=8, help="shards written at the same time (default: 8)")
    add("--price", metavar="NAME", help="also count and price the requests of a save (azure-blob-hot, s3-standard)")
    add("--profiles", type=Path, metavar="FILE", help="your own request prices (YAML)")
    for action in (step, storage):
        action.add_argument("--name", type=run_name, help="a name for this measurement, kept in the JSON")
        action.add_argument("--out", type=writable, metavar="FILE", help="also write the JSON to this file")
        action.add_argument("--json", action="store_true", help="print JSON")


def _step(args: argparse.Namespace) -> int:
    if args.tune:
        return _tune(args)
    if args.settings:
        raise UsageError("--settings is for --tune", "add --tune, or leave it out")
    config = load_run(*split_words(args.words))
    from keepstep.core.ranks import from_environment
    from keepstep.train.bench import bench_step

    result = bench_step(config, args.steps)
    if not from_environment().is_first:
        return 0
    values = _named(args, asdict(result))
    if args.out:
        write_json(args.out, values)
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        _print_table(result)
        if args.out:
            progress(f"wrote {args.out}")
    return 0


def _tune(args: argparse.Namespace) -> int:
    from keepstep.train.tune import Settings, fastest, tune

    path, words = split_words(args.words)
    if path is not None and args.settings and path.resolve() == args.settings.resolve():
        raise UsageError(f"--settings {path} would replace the run's own file", "--settings fast.yaml")

    def configured(settings: Settings) -> RunConfig:
        return load_run(path, [*words, *(f"{name}={value}" for name, value in settings.items())])

    trials: list[Trial] = []
    try:
        for trial in tune(configured, args.trials, args.steps, progress):
            trials.append(trial)
            best = fastest(trials)
            # At once: the next trial may end this process, and whoever stops here keeps what is known.
            if args.settings and best is not None:
                write_atomic(args.settings, _as_yaml(best))
    except KeyboardInterrupt:
        if fastest(trials) is not None:
            progress(f"stopped after {len(trials)} trials; the fastest of them:")
            _print_trials(args, trials)
        raise
    _print_trials(args, trials)
    return 0


def _print_trials(args: argparse.Namespace, trials: Sequence[Trial]) -> None:
    """The trials, fastest first, and how to train with the best; also into the files that were asked for."""
    from keepstep.train.tune import fastest

    best = fastest(trials)
    assert best is not None
    trials = sorted(trials, key=lambda trial: -trial.tokens_per_s)
    if args.settings:
        progress(f"wrote {args.settings}")
    values = _named(args, {"settings": dict(best.settings), "trials": [asdict(trial) for trial in trials]})
    if args.out:
        write_json(args.out, values)
    if args.json:
        print(json.dumps(values, indent=2))
        return
    print("tokens/s      GiB  planned  settings")
    for trial in trials:
        speed = trial.failure or f"{trial.tokens_per_s:,.0f}"
        mark = "  fastest" if trial is best else ""
        measured = f"{trial.peak_memory_gib:8.1f}" if not trial.failure else f"{'':8}"
        print(f"{speed:<13}{measured}{trial.planned_gib:9.1f}  {' '.join(trial.overrides)}{mark}")
    kept = [word for word in args.words if word.partition("=")[0] not in best.settings]
    print(f"next: keepstep train {shlex.join([*kept, *best.overrides])}")


def _as_yaml(best: Trial) -> str:
    """Settings as a part of a run's file."""
    nested: dict[str, Any] = {}
    for name, value in best.settings.items():
        section, _, field = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[field] = yaml.safe_load(value)
    note = f"# {best.tokens_per_s:,.0f} tokens/s, {best.peak_memory_gib:.1f} GiB: `keepstep bench step --tune`"
    return f"{note}\n{yaml.safe_dump(nested, sort_keys=False)}"


def _named(args: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    return {"name": args.name, **values} if args.name else values


def _print_table(result: StepBench) -> None:
    print(f"model     {result.model}, {format_count(result.parameters)} parameters, rows of {result.seq_len} tokens")
    print(f"machine   {result.world_size} × {result.device}, torch {result.torch}, {result.precision}")
    print(f"step      {result.step_s * 1000:.1f} ms (median of {len(result.steps_s)})")
    mfu = "" if result.mfu is None else f", MFU {result.mfu:.1%}"
    print(f"speed     {result.tokens_per_s:,.0f} tokens/s{mfu}")
    print(f"memory    {result.peak_memory_gib:.1f} GiB at the peak")
    total = sum(result.breakdown.values()) or 1.0
    for kind, seconds in result.breakdown.items():
        print(f"  {kind:<14}{seconds * 1000:9.1f} ms  {seconds / total:6.1%}")


def _storage(args: argparse.Namespace) -> int:
    from keepstep.plan.cluster import read_profiles
    from keepstep.plan.requests import find_prices, save_table
    from keepstep.preflight.storage_benchmark import (
        CHECKPOINTS,
        StorageTest,
        markdown,
        measure,
        read_tiers,
        request_table,
    )

    try:
        size = ByteSize.parse(args.size).bytes
    except ValueError as error:
        raise UsageError(invalid_value("--size", args.size, str(error)), "--size 4GiB") from None
    if size < args.writers << 20:
        raise UsageError(f"--size {args.size} is less than 1 MiB for each of {args.writers} writers", "--size 1GiB")
    prices = find_prices(args.price, read_profiles(args.profiles))
    data, checkpoints = read_tiers(args.data, "--data"), read_tiers(args.checkpoints, "--checkpoints")
    cells = measure(StorageTest(data, checkpoints, size, args.writers), progress)
    rows, text = [cell.as_values() for cell in cells], markdown(cells)
    found: dict[str, Any] = {"size_bytes": size, "writers": args.writers, "cells": rows}
    if prices is not None:
        requests = save_table(prices, {args.size: size, **CHECKPOINTS}, args.writers)
        found |= {"prices": asdict(prices), "requests": requests}
        text = f"{text}\n\n{request_table(requests, prices)}"
    if args.out:
        write_json(args.out, _named(args, found))
        args.out.with_suffix(".md").write_text(text + "\n")
        progress(f"wrote {args.out} and {args.out.with_suffix('.md')}")
    # Without prices the output is the list that scripts know.
    print(json.dumps(rows if prices is None else found, indent=2) if args.json else text)
    return 0
