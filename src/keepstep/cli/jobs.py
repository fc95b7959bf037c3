"""`keepstep launch`: what a scheduler starts on each node. `jobs`, `logs`, `stop`, `resume`: jobs submitted to it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from keepstep.cli.parser import add_action, add_actions
from keepstep.cli.train import load_run, start_processes
from keepstep.config.load import split_words
from keepstep.config.schema import RunConfig
from keepstep.core.errors import EXIT_STOPPED, UsageError, malformed_as
from keepstep.core.messages import invalid_value
from keepstep.core.units import format_seconds
from keepstep.core.verbosity import progress
from keepstep.launch.job import ENDED, all_records, load_record, stop_mark
from keepstep.launch.quoting import node_names
from keepstep.launch.submit import resume, show_log, state, stop


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep jobs`."""
    _add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=_jobs)


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep logs`."""
    parser.add_argument("name", help="the run")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until the job ends")
    _add_runs_dir(parser)
    parser.set_defaults(call=_logs)


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep stop`."""
    parser.add_argument("name", help="the run")
    parser.add_argument("--now", action="store_true", help="end it immediately, without a save")
    _add_runs_dir(parser)
    parser.set_defaults(call=_stop)


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep resume`."""
    parser.add_argument("name", help="the run")
    parser.add_argument("--exclude", default="", metavar="NODE,NODE", help="nodes not to use")
    _add_runs_dir(parser)
    parser.set_defaults(call=_resume)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Actions of `keepstep launch` and their options."""
    actions = add_actions(parser)
    summary = "run this node's share of a job: launch node [options] -- train run.yaml ..."
    add = add_action(actions, "node", _node, summary).add_argument
    add("words", nargs="*", help="the command of every process, after --")
    add("--nodes", default="1", metavar="N | MIN:MAX", help="nodes of the job (default: 1)")
    add("--processes", type=int, default=1, metavar="N", help="processes on this node (default: 1)")
    add("--max-restarts", type=int, default=0, metavar="N", help="restarts in place (default: 0)")
    again = "run again after exit code 75, unless this node itself was asked to stop (Volcano)"
    add("--again", action="store_true", help=again)
    hold = "the same, and after N failures or at the end wait for a stop (LeaderWorkerSet)"
    add("--hold", type=int, metavar="N", help=hold)
    foundry = "an override by its LLM Foundry name"
    add("--foundry-update", action="append", default=[], metavar="KEY=VALUE", help=foundry)
    profiles = add_action(actions, "profiles", _profiles, "print a profile with every key explained")
    profiles.add_argument("words", nargs="*", metavar="slurm | k8s | ssh | sky", help="the system")
    add_action(actions, "host", _host, "for --on ssh: do on this host what standard input says")
    add_action(actions, "environments", _environments, "print the environment profiles (NCCL, UCX, SHARP)")


def _add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders live (default: runs)")


def _jobs(args: argparse.Namespace) -> int:
    found = [(record, state(record) or "forgotten") for record in all_records(args.runs_dir)]
    if args.json:
        print(json.dumps([{**asdict(record), "state": word} for record, word in found], indent=2))
        return 0
    if not found:
        print(f"no jobs in {args.runs_dir}")
        print("next: keepstep train run.yaml --on slurm:PROFILE --dry-run")
        return 0
    width = max(len(record.name) for record, _ in found)
    for record, word in found:
        where = f"{record.system}:{record.profile}" if record.profile else record.system
        age = format_seconds(time.time() - record.submitted)
        print(f"{record.name:<{width}}  {word:<10} {where:<20} {record.job_id:<12} {record.nodes:>4} nodes  {age} ago")
    print(f"next: keepstep logs {found[0][0].name} --follow")
    return 0


def _stop(args: argparse.Namespace) -> int:
    record = load_record(args.runs_dir, args.name)
    stop(record, args.now)
    print(f"{args.name}: {'ended' if args.now else 'asked to save and stop'} ({record.job_id})")
    print(f"next: keepstep resume {args.name} continues from there")
    return 0


def _resume(args: argparse.Namespace) -> int:
    record = resume(load_record(args.runs_dir, args.name), node_names(args.exclude))
    record.save(args.runs_dir / args.name)
    print(f"{args.name}: submitted again as {record.job_id}")
    print(f"next: keepstep logs {args.name} --follow")
    return 0


def _logs(args: argparse.Namespace) -> int:
    """Print the log of the run, with all its attempts."""
    record = load_record(args.runs_dir, args.name)
    if record.system != "slurm":
        return show_log(record, args.follow)
    path = Path(record.log)
    if not args.follow:
        if not path.exists():
            raise UsageError(f"{args.name} has not printed anything yet", f"keepstep logs {args.name} --follow waits")
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        return 0
    return _follow(args.runs_dir, args.name, path)


def _follow(runs_dir: Path, name: str, path: Path) -> int:
    offset, asked, over = 0, 0.0, False
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            offset += len(text)
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        if over:
            return 0
        if time.monotonic() - asked > 2:
            # The record is read again: a retry without failed nodes is a new job. After the end the log is read again.
            asked, over = time.monotonic(), state(load_record(runs_dir, name)) in ENDED
        else:
            time.sleep(float(os.environ.get("KEEPSTEP_POLL_S", "0.5")))


def _node(args: argparse.Namespace) -> int:
    from keepstep.core.ranks import group_from_environment
    from keepstep.launch.environments import VOLUMES_VARIABLE, check_volumes, missing_parts
    from keepstep.launch.foundry import not_used, translate
    from keepstep.launch.local import check_memory_here
    from keepstep.launch.slurm import record_exit

    if not args.words:
        raise UsageError("nothing to run", "keepstep launch node --nodes 2 -- train run.yaml")
    if args.again or args.hold is not None:
        return _supervised_node(args)
    group = group_from_environment(args.nodes, args.max_restarts, os.environ)
    words = [*args.words, *translate(args.foundry_update)]
    for sentence in not_used(args.foundry_update):
        print(f"notice: {sentence}", file=sys.stderr)
    folder = os.environ.get("KEEPSTEP_JOB_FOLDER")
    if folder is not None and stop_mark(Path(folder)).exists():
        print("stopped on request before it started", file=sys.stderr)
        return record_exit(Path(folder), EXIT_STOPPED)
    config: RunConfig | None = None
    if words[0] in ("train", "finetune"):
        config = load_run(*split_words(list(words[1:])))
        config = replace(config, resilience=replace(config.resilience, max_restarts=args.max_restarts))
        if os.environ.get(VOLUMES_VARIABLE):
            volumes = os.environ[VOLUMES_VARIABLE].split(":")
            remedy = f"a folder below {volumes[0]}; without checkpoint.folder, checkpoints are in the run's folder"
            check_volumes(config, volumes, os.getcwd(), remedy)  # noqa: PTH109 - joined with texts
        check_memory_here(config, args.processes * group.max_nodes, args.processes)
    for message, hint in missing_parts(os.environ):
        print(f"warning: {message}\n hint: {hint}", file=sys.stderr, flush=True)
    code = start_processes(words, args.processes, group, config)
    return code if folder is None else record_exit(Path(folder), code)


def _supervised_node(args: argparse.Namespace) -> int:
    from keepstep.launch.pod import supervise

    words = ["--nodes", args.nodes, "--processes", str(args.processes), "--max-restarts", str(args.max_restarts)]
    words += [word for update in args.foundry_update for word in ("--foundry-update", update)]
    return supervise([sys.executable, "-m", "keepstep", "launch", "node", *words, "--", *args.words], args.hold)


def _host(_: argparse.Namespace) -> int:
    from keepstep.launch.ssh_host import serve

    with malformed_as(UsageError, "standard input is not an order", "keepstep train run.yaml --on ssh:HOSTS sends one"):
        order = json.load(sys.stdin)
        found = order["action"], order["job_folder"], order["node"]
    assert found
    return serve(order)


def _profiles(args: argparse.Namespace) -> int:
    from keepstep.launch.profiles import PROFILES, commented

    system = " ".join(args.words)
    if system not in PROFILES:
        rule = f"must be one of {', '.join(PROFILES)}"
        wrong = invalid_value("the system", system, rule) if system else "the system is missing"
        raise UsageError(wrong, "keepstep launch profiles slurm")
    print(commented(PROFILES[system]), end="")
    progress(f"next: keepstep train run.yaml --on {system}:NAME --dry-run")
    return 0


def _environments(_: argparse.Namespace) -> int:
    from keepstep.launch.environments import all_environments

    for name, variables in all_environments().items():
        print(f"{name}:")
        for variable, value in variables.items():
            print(f"  {variable}={value}")
    return 0
