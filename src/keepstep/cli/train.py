"""`keepstep train`: check the configuration first, then start as many processes as wanted, or be one of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.config.load import load_config, split_words
from keepstep.config.schema import RunConfig
from keepstep.core.errors import EXIT_FAILED, ConfigError, KeepstepError, StopRequested, UsageError
from keepstep.core.ranks import Ranks, from_environment

if TYPE_CHECKING:
    from keepstep.train.facts import Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("words", nargs="*", metavar="run.yaml | section.field=value", help="the run and what differs")
    parser.add_argument("--procs", default="auto", metavar="N", help="processes on this machine (auto: one a GPU)")
    parser.add_argument("--ui", action="store_true", help="serve the live page while training, and print its link")
    parser.add_argument(
        "--on", default="local", metavar="WHERE", help="local, slurm:PROFILE or k8s:PROFILE (default: local)"
    )
    parser.add_argument("-N", "--nodes", type=int, metavar="N", help="nodes, with --on (default: the profile's)")
    parser.add_argument("--dry-run", action="store_true", help="with --on: print what would be submitted, and stop")


def run(args: argparse.Namespace) -> int:
    """Train: as one of several processes where a launcher started us, else by starting them."""
    path, overrides = split_words(args.words)
    ranks = from_environment()
    config = load_run(path, overrides, for_pods=args.on.startswith("k8s") and not ranks.launched)
    if ranks.launched:
        return _train_as_one_of(ranks, config)
    if args.on != "local" or args.nodes is not None or args.dry_run:
        from keepstep.launch.submit import submit_run

        _refuse_local_flags(args)
        return submit_run(args.on, path, overrides, config, args.nodes, args.dry_run)
    if args.ui:
        from keepstep.cli.ui import start_beside

        print(f"live page: {start_beside(Path(config.runs_dir), config.name)}", file=sys.stderr, flush=True)
    from keepstep.config.check import check_layout
    from keepstep.launch.local import process_count

    processes = process_count(args.procs, config.compute.device)
    # Told here once, before any process starts, rather than by each of them.
    check_layout(config, processes)
    if processes == 1 and not config.resilience.max_restarts:
        from keepstep.train.run import train

        train(config, _plan)
        code = 0
    else:
        from keepstep.cli.processes import start_processes

        code = start_processes(["train", *args.words], processes, config=config)
    if code == 0:
        print(f"done: {config.runs_dir}/{config.name}")
    return code


def _refuse_local_flags(args: argparse.Namespace) -> None:
    """Raise where a flag is given that a submitted run would not heed."""
    if args.procs != "auto":
        raise UsageError(
            f"--procs {args.procs} counts processes of this machine, and the run is for {args.on}",
            "processes_per_node (Slurm) or gpus_per_node in the profile",
        )
    if args.ui:
        raise UsageError(
            f"--ui shows a run of this machine, and the run is for {args.on}", "keepstep ui, once the run has begun"
        )


def load_run(path: Path | None, overrides: list[str], *, for_pods: bool = False) -> RunConfig:
    """The configuration; with the shape of the weights where it starts from some."""
    loaded = load_config(path, overrides)
    start = loaded.config.finetune.start_from
    # The volume of the pods need not be seen from the machine that submits: they look at the weights themselves.
    if not start or (for_pods and start.startswith("/") and not Path(start).exists()):
        return loaded.config
    from keepstep.train.start import adopt_start

    return adopt_start(loaded)


def _plan(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """The plan that is stored with the run; a plan that cannot be made must not keep a run from starting."""
    from keepstep.plan.plan import DeviceFacts, plan_for_run

    facts = DeviceFacts(
        name=machine.device,
        memory_bytes=machine.memory_bytes,
        peak_flops=machine.peak_flops,
        processes=machine.processes,
        processes_per_node=machine.processes_per_node,
    )
    try:
        plan = plan_for_run(config, facts, machine.precision)  # type: ignore[arg-type]
    except KeepstepError as error:
        return {"problem": error.message}
    speed, memory = plan["speed"], plan["memory"]
    headline = {name: speed[name] for name in ("step_s", "tokens_per_s", "mfu")}
    return {**headline, "memory_gib": memory["allocated_gib"], "details": plan}


def _train_as_one_of(ranks: Ranks, config: RunConfig) -> int:
    from keepstep.resilience.causes import classify, write_cause
    from keepstep.train.run import train

    try:
        train(config, _plan)
        return 0
    except KeepstepError as error:
        write_cause(error, ranks.rank)
        # What every process finds alike is said once; what one of them met, it says itself.
        if ranks.is_first or not isinstance(error, ConfigError | StopRequested):
            where = "" if ranks.is_first else f"[rank {ranks.rank}] "
            print("\n".join(where + line for line in error.lines()), file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        write_cause(error, ranks.rank)
        if classify(error) == "peer":
            # The process that is to blame says more than a page about a closed connection could.
            print(f"[rank {ranks.rank}] lost another process: {error}", file=sys.stderr, flush=True)
            return EXIT_FAILED
        raise
