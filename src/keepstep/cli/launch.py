"""`keepstep launch`: what runs on a node, and a look at profiles and environments."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from keepstep.config.schema import RunConfig
from keepstep.core.errors import EXIT_HARDWARE, EXIT_STOPPED, UsageError

_ACTIONS = {
    "node": "run this node's share of a job: launch node [options] -- train run.yaml ... (schedulers start this)",
    "profiles": "print a profile with every key explained: launch profiles slurm|k8s",
    "environments": "print the environment profiles (NCCL, UCX, SHARP)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"  {name:<13} {text}" for name, text in _ACTIONS.items())
    parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do, see below")
    parser.add_argument("words", nargs="*", help="node: the words every process gets, after --")
    parser.add_argument("--nodes", default="1", metavar="N | MIN:MAX", help="node: nodes of the job (default: 1)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="node: processes here (default: 1)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="node: restarts in place (default: 0)")
    parser.add_argument(
        "--foundry-update",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="node: an override by its LLM Foundry name",
    )


def run(args: argparse.Namespace) -> int:
    """Do one of the actions."""
    match args.action:
        case "node":
            return _node(args)
        case "profiles":
            return _profiles(args.words)
        case _:
            from keepstep.launch.environments import all_environments

            for name, variables in all_environments().items():
                print(f"{name}:")
                for variable, value in variables.items():
                    print(f"  {variable}={value}")
            return 0


def _node(args: argparse.Namespace) -> int:
    from keepstep.cli.processes import start_processes
    from keepstep.core.nodes import group_from_environment
    from keepstep.launch.foundry import translate
    from keepstep.launch.job import stop_mark
    from keepstep.launch.kept import VOLUMES_VARIABLE, check_kept

    if not args.words:
        raise UsageError("nothing to run", "keepstep launch node --nodes 2 -- train run.yaml")
    group = group_from_environment(args.nodes, args.max_restarts, os.environ)
    words = [*args.words, *translate(args.foundry_update)]
    folder = os.environ.get("KEEPSTEP_JOB_FOLDER")
    if folder is not None and stop_mark(Path(folder)).exists():
        print("stopped on request before it began", file=sys.stderr)
        return _leave_word(Path(folder), EXIT_STOPPED)
    config = _run_config(words, args.max_restarts)
    if config is not None and os.environ.get(VOLUMES_VARIABLE):
        volumes = os.environ[VOLUMES_VARIABLE].split(":")
        remedy = f"a folder below {volumes[0]}; without checkpoint.folder steps are kept in the run's folder"
        check_kept(config, volumes, os.getcwd(), remedy)  # noqa: PTH109 - joined with texts
    code = start_processes(words, args.processes, group, config)
    return code if folder is None else _leave_word(Path(folder), code)


def _run_config(words: list[str], max_restarts: int) -> RunConfig | None:
    """The configuration of the run that the words train, if they do; the job's restart limit counts."""
    if words[0] not in ("train", "finetune"):
        return None
    from dataclasses import replace

    from keepstep.cli.train import load_run
    from keepstep.config.load import split_words

    config = load_run(*split_words(words[1:]))
    return replace(config, resilience=replace(config.resilience, max_restarts=max_restarts))


def _leave_word(folder: Path, code: int) -> int:
    """Tell the batch shell what srun cannot: that the run saved, or that this node's hardware failed."""
    try:
        if code == EXIT_STOPPED:
            (folder / "saved").touch()
            # A non-zero code would make srun end the other nodes, which may still be closing their files.
            return 0
        if code == EXIT_HARDWARE:
            with (folder / "failed-nodes").open("a") as file:
                file.write(os.environ.get("SLURMD_NODENAME", "") + "\n")
    except OSError as error:
        # A full or read-only disk: the code alone still says how the run ended, and that it is to go on.
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return code


def _profiles(words: list[str]) -> int:
    from keepstep.launch.profiles import KubernetesProfile, SlurmProfile, commented

    kinds = {"slurm": SlurmProfile, "k8s": KubernetesProfile}
    if len(words) != 1 or words[0] not in kinds:
        raise UsageError(f"profiles of what? {' '.join(words) or 'nothing'} is given", "keepstep launch profiles slurm")
    print(commented(kinds[words[0]]), end="")
    print(f"next: keepstep train run.yaml --on {words[0]}:NAME --dry-run", file=sys.stderr)
    return 0
