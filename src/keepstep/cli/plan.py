"""`keepstep plan`: memory, speed, storage and goodput of a run on a cluster, before a single GPU is rented."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli.parser import CONFIG_HELP, positive
from keepstep.config.load import LoadedConfig, load_config, split_words
from keepstep.config.schema import RunConfig
from keepstep.core.errors import EXIT_DONE, EXIT_PREFLIGHT, ConfigError, UsageError
from keepstep.core.messages import invalid_value
from keepstep.core.units import Duration
from keepstep.core.verbosity import progress
from keepstep.plan.calibrate import calibrate, read_runs, shipped_runs
from keepstep.plan.choose import not_given, plan_or_choose
from keepstep.plan.cluster import Cluster, Machine, Profiles, cluster_from, find_cluster, read_profiles
from keepstep.plan.goodput import Recovery, known_recoveries
from keepstep.plan.plan import Assumptions, Plan
from keepstep.plan.report import as_values, next_command, plan_lines, search_lines, search_values, verdict
from keepstep.plan.requests import find_prices, request_lines, request_values

if TYPE_CHECKING:
    from keepstep.plan.search import Candidate
    from keepstep.train.dryrun.dryrun import DryRun

_TOP = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help=CONFIG_HELP)
    cluster = (
        "COUNT machines of a profile (azure-nd-h100-v5:16) or bare GPUs (h200:1); `list`: all names; none: this machine"
    )
    parser.add_argument("--cluster", metavar="NAME:COUNT", help=cluster)
    parser.add_argument(
        "--profiles", type=Path, metavar="FILE", help="your own gpus, clusters, storage and request prices (YAML)"
    )
    parser.add_argument("--measured", type=Path, metavar="FILE", help="measured runs (JSON) that calibrate the speed")
    price = (
        "count requests to an object store and price them (azure-blob-hot, s3-standard; default: the run's own store)"
    )
    parser.add_argument("--price", metavar="NAME", help=price)
    parser.add_argument("--save-within", default="60s", metavar="TIME", help="find storage that saves this fast (60s)")
    parser.add_argument("--recovery", default="keepstep", metavar="NAME", help="assumed save and restart times")
    parser.add_argument("--stall", metavar="TIME", help="how long a save stops the run (0.3s)")
    parser.add_argument("--restart", metavar="TIME", help="from a failure to the next step (60s)")
    parser.add_argument("--search", action="store_true", help="rank all valid layouts on the cluster")
    parser.add_argument("--top", type=positive, metavar="N", help=f"--search: layouts to print ({_TOP})")
    parser.add_argument("--png", type=Path, metavar="FILE", help="--search: time against memory as a picture")
    parser.add_argument("--dry-run", action="store_true", help="build and step the real model on fake tensors (torch)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Plan, and exit with 3 where the run does not fit."""
    for option, value in (("--png", args.png), ("--top", args.top)):
        if value and not args.search:
            raise UsageError(f"{option} {value} is for the layouts of a search", "add --search")
    profiles = read_profiles(args.profiles)
    if args.cluster == "list" or (args.cluster is None and not args.words):
        return _list(profiles, args)
    loaded = _load(args.words)
    machine = _this_machine(loaded.config) if args.cluster is None else None
    cluster = cluster_from(machine) if machine else find_cluster(args.cluster, profiles)
    precision = machine.precision if machine else "bf16"
    plan = plan_or_choose(loaded.config, not_given(loaded), cluster, _assumptions(args, cluster), precision)
    values = as_values(plan)
    lines = list(plan_lines(plan))
    prices = find_prices(args.price, profiles, plan.config)
    if prices is not None:
        values["requests"] = request_values(plan, prices)
        lines += ["", *request_lines(values["requests"], prices)]
    if args.search:
        candidates, seconds = _search(plan, args)
        top = args.top or _TOP
        values["search"] = search_values(candidates, seconds, top)
        lines += ["", *search_lines(candidates, seconds, top)]
    if args.dry_run:
        traced = _dry_run(plan)
        values["dry_run"] = traced.as_values()
        lines += ["", *traced.lines()]
    values["verdict"] = verdict(plan)
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        profile_words = ["--profiles", str(args.profiles)] if args.profiles else []
        where = f"--cluster {args.cluster}" if args.cluster else ""
        next_line = next_command(plan, shlex.join([*args.words, *plan.chosen]), where, shlex.join(profile_words))
        print("\n".join([*lines, "", verdict(plan), next_line]))
    return EXIT_DONE if plan.fits else EXIT_PREFLIGHT


def _load(words: Sequence[str]) -> LoadedConfig:
    """The configuration, with the shape of the weights that the run starts from; they are not downloaded for a plan."""
    loaded = load_config(*split_words(words))
    start = loaded.config.finetune.start_from
    if not start:
        return loaded
    if Path(start).exists():
        from keepstep.interop.run_source import adopt_initial_shape

        return replace(loaded, config=adopt_initial_shape(loaded))
    if not any(name.startswith("model.") and origin.kind != "default" for name, origin in loaded.origins.items()):
        raise UsageError(
            f"finetune.start_from is {start}, which is not on this machine, so its model's shape is unknown",
            "model=PRESET, or model=PATH/config.json of that model",
        )
    progress(f"{start} is not on this machine: the plan is for the given model ({loaded.config.model.preset})")
    return loaded


def _this_machine(config: RunConfig) -> Machine:
    """This machine as training sees it, with the matmul rate measured where no table has it."""
    from keepstep.launch.local import process_count

    try:
        import torch

        from keepstep.train.device import describe_machine
    except ModuleNotFoundError as error:
        wrong = f"a plan for this machine needs {error.name}, which is not installed"
        raise UsageError(wrong, "--cluster h100:8 needs nothing; --cluster list prints all names") from None
    processes = process_count("auto", config.compute.device)
    on_gpu = config.compute.device != "cpu" and torch.cuda.is_available()
    return describe_machine(config, torch.device("cuda:0" if on_gpu else "cpu"), processes, processes)


def _assumptions(args: argparse.Namespace, cluster: Cluster) -> Assumptions:
    runs = shipped_runs() if args.measured is None else read_runs(args.measured)
    usable = [each for each in runs if cluster.gpu.is_named(each.device)]
    if args.measured is not None and not usable:
        devices = ", ".join(sorted({each.device for each in runs})) or "nothing"
        print(f"note: {args.measured} was measured on {devices}, not on {cluster.gpu.name}", file=sys.stderr)
    return Assumptions(
        factors=calibrate(usable, cluster),
        calibrated_by=len(usable),
        recovery=_recovery(args),
        save_within_s=_seconds("--save-within", args.save_within),
    )


def _recovery(args: argparse.Namespace) -> Recovery:
    known = known_recoveries()
    if args.recovery not in known:
        raise UsageError(f"--recovery is {args.recovery!r}, which is not known", f"known: {', '.join(known)}")
    recovery = known[args.recovery]
    if args.stall:
        recovery = replace(recovery, stall_s=_seconds("--stall", args.stall), source="command line")
    if args.restart:
        recovery = replace(recovery, restart_s=_seconds("--restart", args.restart), source="command line")
    return recovery


def _seconds(option: str, text: str) -> float:
    try:
        duration = Duration.parse(text)
    except ValueError:
        duration = None
    if duration is None or duration.unit != "s" or duration.value <= 0:
        raise UsageError(invalid_value(option, text, "must be a time"), f"{option} 30s, 2min or 1h")
    return duration.value


def _search(plan: Plan, args: argparse.Namespace) -> tuple[list[Candidate], float]:
    from keepstep.plan.search import pareto_picture, precisions, search

    started = time.perf_counter()
    chosen = precisions(plan.work, plan.cluster, is_open=plan.config.precision == "auto")
    candidates = search(plan.work, plan.cluster, plan.assumptions.factors, chosen)
    seconds = time.perf_counter() - started
    if not candidates:
        raise ConfigError(
            f"no layout of {plan.cluster.gpus} ranks fits global_batch {plan.work.global_batch}",
            "a global batch with more divisors has more layouts",
        )
    if args.png:
        pareto_picture(candidates, plan.cluster, args.png, f"{plan.config.model.preset} on {args.cluster}")
        progress(f"wrote {args.png}")
    return candidates, seconds


def _dry_run(plan: Plan) -> DryRun:
    try:
        from keepstep.train.dryrun.dryrun import dry_run
    except ModuleNotFoundError as error:
        raise UsageError(f"--dry-run needs {error.name}, which is not installed", "pip install keepstep") from None

    return dry_run(plan.config, plan.work)


def _list(profiles: Profiles, args: argparse.Namespace) -> int:
    if args.json:
        names = {"clusters": list(profiles.clusters), "gpus": list(profiles.gpus), "storage": list(profiles.storage)}
        print(json.dumps(names, indent=2))
        return EXIT_DONE
    for name, cluster in profiles.clusters.items():
        price = f"${cluster.price_per_node_hour:.2f} an hour" if cluster.price_per_node_hour else "no price"
        print(f"{name:<20} {cluster.gpus_per_node} × {cluster.gpu.name:<8} {price:<18} {cluster.sku}")
    for name, gpu in profiles.gpus.items():
        print(f"{name:<20} {gpu.memory_gib:.0f} GiB, {gpu.tflops.get('bf16', 0):.0f} TFLOP/s bf16, bare")
    print("\nnext: keepstep plan run.yaml --cluster azure-nd-h100-v5:16")
    return EXIT_DONE
