"""`keepstep plan`: memory, speed, storage and goodput of a run on a cluster, before a single GPU is rented."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.config.load import load_config, split_words
from keepstep.core.errors import EXIT_DONE, EXIT_PREFLIGHT, ConfigError, UsageError
from keepstep.core.units import Duration
from keepstep.plan.calibrate import calibrate, read_runs, same_device
from keepstep.plan.cluster import Cluster, Profiles, find_cluster, read_profiles
from keepstep.plan.goodput import Recovery, known_recoveries
from keepstep.plan.plan import Assumptions, Plan, as_values, make_plan, shipped_runs
from keepstep.plan.text import plan_lines, search_lines, verdict

if TYPE_CHECKING:
    import torch

    from keepstep.config.schema import RunConfig
    from keepstep.data.loader import Batch
    from keepstep.parallel.mesh import Grid
    from keepstep.plan.dryrun import DryRun, Step
    from keepstep.plan.search import Candidate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help="the run and what differs")
    parser.add_argument(
        "--cluster",
        metavar="NAME:N",
        help="N machines of a profile (azure-nd-h100-v5:16) or N bare GPUs (h200:1); `list` names all",
    )
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="your own gpus, clusters and storage (YAML)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="measured runs (JSON) that calibrate the speed")
    parser.add_argument("--save-within", default="60s", metavar="TIME", help="find storage that saves so fast (60s)")
    parser.add_argument("--recovery", default="keepstep", metavar="NAME", help="assumed save and restart times")
    parser.add_argument("--stall", metavar="TIME", help="how long a save stops the run (0.3s)")
    parser.add_argument("--restart", metavar="TIME", help="from a failure to the next step (60s)")
    parser.add_argument("--search", action="store_true", help="rank all sound layouts on the cluster")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="layouts shown by --search (10)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="with --search: time against memory as a picture")
    parser.add_argument("--dry-run", action="store_true", help="build and step the real model on fake tensors (torch)")
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Plan, and say with the exit code whether the run fits."""
    _check_options(args)
    profiles = read_profiles(args.profiles)
    if args.cluster is None or args.cluster == "list":
        return _list(profiles, args)
    cluster = find_cluster(args.cluster, profiles)
    path, overrides = split_words(args.words)
    config = load_config(path, overrides).config
    plan = make_plan(config, cluster, _assumptions(args, cluster))
    answer = as_values(plan)
    lines = list(plan_lines(plan))
    if args.search:
        candidates, seconds = _search(plan, args)
        answer["search"] = _search_values(candidates, seconds, args.top)
        lines += ["", *search_lines(candidates, seconds, args.top)]
    if args.dry_run:
        traced = _dry_run(plan)
        answer["dry_run"] = traced.as_values()
        lines += ["", *traced.lines()]
    answer["verdict"] = verdict(plan)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join([*lines, "", verdict(plan), _next(plan, args)]))
    return EXIT_DONE if plan.fits else EXIT_PREFLIGHT


def _check_options(args: argparse.Namespace) -> None:
    if args.png and not args.search:
        raise UsageError(f"--png {args.png} draws the layouts of a search, and there is none", "add --search")
    if args.top < 1:
        raise UsageError(f"--top is {args.top}, but it must be at least 1", "--top 10")


def _assumptions(args: argparse.Namespace, cluster: Cluster) -> Assumptions:
    runs = shipped_runs() if args.measured is None else read_runs(args.measured)
    usable = [each for each in runs if same_device(each.device, cluster.gpu)]
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
        raise UsageError(f"{option} is {text!r}, but it must be a time", f"{option} 30s, 2min or 1h")
    return duration.value


def _search(plan: Plan, args: argparse.Namespace) -> tuple[list[Candidate], float]:
    from keepstep.plan.search import pareto_picture, precisions, search

    started = time.perf_counter()
    open_precision = plan.config.precision == "auto"
    candidates = search(
        plan.work, plan.cluster, plan.assumptions.factors, precisions(plan.work, plan.cluster, open_precision)
    )
    seconds = time.perf_counter() - started
    if not candidates:
        raise ConfigError(
            f"no layout of {plan.cluster.gpus} GPUs suits global_batch {plan.work.global_batch}",
            "a global batch with more divisors has more layouts",
        )
    if args.png:
        pareto_picture(candidates, plan.cluster, args.png, f"{plan.config.model.preset} on {args.cluster}")
        print(f"wrote {args.png}", file=sys.stderr)
    return candidates, seconds


def _search_values(candidates: list[Candidate], seconds: float, top: int) -> dict[str, Any]:
    from keepstep.plan.search import pareto

    def values(each: Candidate) -> dict[str, Any]:
        return {
            "words": each.words(),
            "step_s": each.step_s,
            "needed_gib": each.needed_bytes / 2**30,
            "tokens_per_s": each.tokens_per_s,
            "mfu": each.mfu,
            "fits": each.fits,
        }

    return {
        "layouts": len(candidates),
        "fitting": sum(each.fits for each in candidates),
        "seconds": seconds,
        "best": [values(each) for each in candidates[:top]],
        "pareto": [values(each) for each in pareto(candidates)],
    }


def _dry_run(plan: Plan) -> DryRun:
    """Needs torch, and says so where it is missing."""
    try:
        from keepstep.plan.dryrun import dry_run
    except ModuleNotFoundError as error:
        raise UsageError(f"--dry-run needs {error.name}, which is not installed", "pip install keepstep") from None

    return dry_run(plan.config, plan.work, _spread_step)


def _spread_step(config: RunConfig, grid: Grid, device: torch.device) -> Callable[[], Step]:
    """The training step in two halves, as a dry run needs it."""
    from unittest import mock

    from keepstep.train import master, scaler
    from keepstep.train.build import fill_learner, spread_model

    model = spread_model(config, grid, device)

    def fill() -> Step:
        learner = fill_learner(config, grid, device, model)

        def step(batches: list[Batch]) -> object:
            # A GPU updates in one kernel that allocates nothing, and counts steps by values that fakes lack.
            # Nor do they say whether a step in fp16 overflowed.
            finite = mock.patch.object(scaler.LossScaler, "is_finite", return_value=True)
            with mock.patch.object(master.SplitAdamW, "update"), finite:
                return learner.step.run(batches, lr_share=1.0)

        return step

    return fill


def _list(profiles: Profiles, args: argparse.Namespace) -> int:
    if args.cluster is None and args.words:
        raise UsageError("--cluster is missing: a plan needs to know where", "--cluster h100:8, or --cluster list")
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


def _machines_for_host(plan: Plan) -> int:
    """Machines that share the state so that each has room for its part: doubled, so that batches still divide."""
    machines, wanted = plan.cluster.nodes, plan.cluster.nodes * plan.host.needed / 2**30 / plan.host.available_gib
    while machines < wanted:
        machines *= 2
    return machines


def _next(plan: Plan, args: argparse.Namespace) -> str:
    words = shlex.join(args.words)
    if plan.fits:
        return f"next: keepstep train {words}".rstrip()
    profiles = ["--profiles", str(args.profiles)] if args.profiles else []
    if plan.fits_device:
        more = shlex.join([*profiles, "--cluster", f"{plan.cluster.name}:{_machines_for_host(plan)}"])
        return f"next: keepstep plan {words} {more}, or machines with more memory"
    where = shlex.join([*profiles, "--cluster", args.cluster])
    if plan.remedies:
        return f"next: keepstep plan {words} {' '.join(plan.remedies[0].words)} {where}"
    return f"next: keepstep plan {words} {where} --search, or more or larger GPUs"
