"""`keepstep doctor`: is this machine, or every node of a cluster, fit to train?"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.core.errors import EXIT_DONE, EXIT_PREFLIGHT, HardwareError, KeepstepError, UsageError

if TYPE_CHECKING:
    from keepstep.launch.health import Check, ClusterHealth
    from keepstep.launch.job import Job, JobRecord

_MARK = "keepstep-report "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "words", nargs="*", metavar="run.yaml | section.field=value", help="a configuration to check as well"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders live (default: runs)")
    parser.add_argument("--cluster", action="store_true", help="measure every node with a job of its own")
    parser.add_argument("--on", default="local", metavar="WHERE", help="--cluster: local, slurm:PROFILE or k8s:PROFILE")
    parser.add_argument(
        "-N", "--nodes", type=int, metavar="N", help="--cluster: nodes (default: all idle ones, or the profile's)"
    )
    parser.add_argument(
        "--storage", type=Path, metavar="FOLDER", help="--cluster: shared storage to write to and read from"
    )
    parser.add_argument("--data", type=Path, metavar="PATH", help="--cluster: training data that every node must read")
    parser.add_argument("--timeout-s", type=int, default=600, help="--cluster: give up after this long (default: 600)")
    parser.add_argument("--dry-run", action="store_true", help="--cluster: print the job, and stop")
    parser.add_argument("--json", action="store_true", help="answer as JSON")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check, print a table, and exit with 3 where something failed."""
    if args.probe:
        return _probe(args)
    _check_flags(args)
    if args.cluster:
        return _cluster(args)
    from keepstep.launch.health import table, worst
    from keepstep.launch.local import visible_gpus
    from keepstep.launch.machine import machine_checks

    checks = [*machine_checks(args.runs_dir, visible_gpus()), *_torch_checks(), *_config_checks(args.words)]
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print("\n".join(table(checks)))
        print(
            "next: mend what failed" if worst(checks) == "fail" else "next: keepstep demo, or keepstep doctor --cluster"
        )
    return EXIT_PREFLIGHT if worst(checks) == "fail" else EXIT_DONE


def _check_flags(args: argparse.Namespace) -> None:
    """Raise where a flag would be ignored: who names a cluster must not be told that all is well with this machine."""
    beside = {"--on": args.on != "local", "-N": args.nodes is not None, "--dry-run": args.dry_run}
    beside_cluster = {**beside, "--storage": args.storage is not None, "--data": args.data is not None}
    if not args.cluster and any(beside_cluster.values()):
        given = ", ".join(flag for flag, is_given in beside_cluster.items() if is_given)
        raise UsageError(f"{given} without --cluster: only this machine would be checked", "keepstep doctor --cluster")
    if args.cluster and args.on == "local" and any(beside.values()):
        given = " and ".join(flag for flag, is_given in beside.items() if is_given)
        raise UsageError(f"{given}: this machine is all there is", "--on slurm:PROFILE or --on k8s:PROFILE")
    if args.nodes is not None and args.nodes < 1:
        raise UsageError(f"-N is {args.nodes}, but a job has at least one node", "-N 1")


def _torch_checks() -> list[Check]:
    from keepstep.launch.health import Check

    try:
        import torch
    except ImportError as error:
        return [Check("torch", "fail", f"cannot be imported: {error}", "pip install 'torch>=2.11,<2.14'")]
    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    known = (2, 11) <= number < (2, 14)
    checks = [Check("torch", "pass" if known else "warn", torch.__version__, "tested with 2.11 to 2.13")]
    if torch.version.cuda:
        found = torch.cuda.is_available()
        value = (
            f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"
            if found
            else f"built for CUDA {torch.version.cuda}"
        )
        hint = "nvidia-smi must work here, and its driver be new enough for this CUDA"
        checks.append(Check("cuda", "pass" if found else "fail", value, hint))
    return checks


def _config_checks(words: list[str]) -> list[Check]:
    from keepstep.config.load import load_config, split_words
    from keepstep.launch.health import Check

    if not words:
        return []
    try:
        config = load_config(*split_words(words)).config
    except KeepstepError as error:
        return [Check("config", "fail", line.removeprefix("error: ").strip()) for line in error.lines()]
    return [Check("config", "pass", f"run {config.name}, model {config.model.preset}")]


def _probe(args: argparse.Namespace) -> int:
    """One process of the measuring job."""
    from keepstep.core.ranks import from_environment
    from keepstep.launch.machine import inactive_links
    from keepstep.parallel.probe import ProbeSettings, probe
    from keepstep.parallel.world import choose_device, joined_world

    ranks = from_environment()
    with joined_world(ranks, choose_device("auto", ranks.local_rank), timeout_s=120) as world:
        settings = ProbeSettings(storage=args.storage, data=args.data)
        reports = probe(world, settings, {"inactive_links": inactive_links()})
    if reports is not None:
        text = json.dumps(reports)
        if args.report:
            args.report.write_text(text)
        else:
            print(_MARK + text, flush=True)
    return EXIT_DONE


def _cluster(args: argparse.Namespace) -> int:
    from keepstep.launch.health import judge_cluster
    from keepstep.launch.job import read_target

    target = read_target(args.on)
    checks = tuple(_config_checks(args.words))
    if target.system == "local":
        health = judge_cluster(_measure_here(args))
    else:
        job, profile, expected = _job(args)
        if args.dry_run:
            from keepstep.launch.submit import render

            print(render(job, profile), end="")
            return EXIT_DONE
        health = judge_cluster(*_measure_there(args, job, profile, expected))
    health = replace(health, shared=(*checks, *health.shared))
    if args.json:
        print(json.dumps({**asdict(health), "drain": health.drain, "sound": health.sound}, indent=2))
    else:
        _print_cluster(health, target.system)
    return EXIT_DONE if health.sound else EXIT_PREFLIGHT


def _measure_here(args: argparse.Namespace) -> list[dict[str, Any]]:
    import tempfile

    from keepstep.cli.processes import start_processes
    from keepstep.launch.local import process_count

    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        words = [*_probe_words(args), "--report", str(report)]
        code = start_processes(words, process_count("auto", "auto"))
        if code or not report.exists():
            raise HardwareError(f"the measuring job ended with {code}", "its messages are above")
        reports: list[dict[str, Any]] = json.loads(report.read_text())
        return reports


def _probe_words(args: argparse.Namespace) -> list[str]:
    words = ["doctor", "--probe"]
    for flag, path in (("--storage", args.storage), ("--data", args.data)):
        if path is not None:
            words += [flag, str(path.absolute())]
    return words


def _job(args: argparse.Namespace) -> tuple[Job, Any, list[str]]:
    from keepstep.launch import slurm
    from keepstep.launch.job import Job, read_target
    from keepstep.launch.profiles import SlurmProfile
    from keepstep.launch.submit import profile_of

    # A measurement that fails is an answer; it is not tried again.
    target = read_target(args.on)
    profile = replace(profile_of(target), max_restarts=0, min_nodes=0)
    expected: list[str] = []
    nodes = profile.nodes if args.nodes is None else args.nodes
    if isinstance(profile, SlurmProfile):
        profile = replace(profile, max_requeues=0)
        if args.nodes is None and not args.dry_run:
            expected = slurm.idle_nodes(profile)
            nodes = len(expected)
            if not nodes:
                raise UsageError("no node is idle", "sinfo shows why; -N asks for a number and waits")
    else:
        profile = replace(profile, backoff_limit=0, tensorboard=False)
    name = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    job = Job(name, tuple(_probe_words(args)), args.runs_dir / ".doctor" / name, nodes, working_dir=Path.cwd())
    return job, profile, expected


def _measure_there(
    args: argparse.Namespace, job: Job, profile: Any, expected: list[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    from keepstep.launch.job import read_target
    from keepstep.launch.submit import stop, submit

    record = submit(job, profile, read_target(args.on))
    print(f"measuring {job.nodes} nodes as job {record.job_id}", file=sys.stderr)
    try:
        reports = _wait_for_report(record, args.timeout_s)
    except KeyboardInterrupt:
        # Nobody waits for it any more, and it would hold every node that is idle when its turn comes.
        with suppress(KeepstepError):
            stop(record, at_once=True)
        raise
    if record.system == "k8s":
        # What Helm has installed stays there, unlike a job of Slurm's.
        with suppress(KeepstepError):
            stop(record, at_once=False)
    return reports, expected


def _wait_for_report(record: JobRecord, timeout_s: int) -> list[dict[str, Any]]:
    from keepstep.launch.submit import log_text, state, stop

    deadline = time.monotonic() + timeout_s
    while True:
        over = state(record) in ("", "finished", "failed", "stopped")
        text = log_text(record)
        line, ended, _ = text.partition(_MARK)[2].partition("\n")
        # The report of many nodes is long, and the log may have been read while it was being written.
        if ended:
            reports: list[dict[str, Any]] = json.loads(line)
            return reports
        if over or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if not over:
        stop(record, at_once=True)
    why = "it ended without a report" if over else f"it was not done after {timeout_s} s"
    raise HardwareError(
        f"job {record.job_id}: {why}\n{text[-2000:]}", f"-N {max(1, record.nodes // 2)} finds the half at fault"
    )


def _print_cluster(health: ClusterHealth, system: str) -> None:
    from keepstep.launch.health import table

    for line in table(health.shared):
        print(line)
    width = max(len(node.node) for node in health.nodes)
    for node in health.nodes:
        print("\n".join(table(node.checks, f"{node.node:<{width}}  ")))
    for name in health.absent:
        print(f"fail  {name}  did not take part")
    if not health.drain:
        print("next: all nodes may train" if health.sound else "next: mend what failed; no single node is to blame")
        return
    print(f"drain: {','.join(health.drain)}")
    if system == "slurm":
        names, reason = ",".join(health.drain), shlex.quote("keepstep doctor")
        print(f"next: scontrol update nodename={names} state=drain reason={reason}")
    elif system == "k8s":
        print(f"next: kubectl cordon {' '.join(health.drain)}")
