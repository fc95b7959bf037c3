"""`keepstep doctor`: is this machine, or every node of a cluster, fit to train?"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keepstep.cli.parser import CONFIG_HELP
from keepstep.core.errors import EXIT_DONE, EXIT_PREFLIGHT, HardwareError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add = parser.add_argument
    add("words", nargs="*", metavar="run.yaml | section.field=value", help=f"{CONFIG_HELP} to check as well")
    add("--runs-dir", type=Path, default=Path("runs"), help="where run folders live (default: runs)")
    add("--cluster", action="store_true", help="measure every node with a job")
    add(
        "--on",
        default="local",
        metavar="WHERE",
        help="--cluster: local, slurm:PROFILE, k8s:PROFILE, sky:PROFILE or ssh:HOSTS",
    )
    nodes = "--cluster: nodes (default: all idle ones, or the profile's)"
    add("-N", "--nodes", type=int, metavar="N", help=nodes)
    add("--storage", type=Path, metavar="FOLDER", help="--cluster: shared storage to write to and read from")
    add("--data", type=Path, metavar="PATH", help="--cluster: training data that every node must read")
    add("--timeout-s", type=int, default=600, help="--cluster: give up after this long (default: 600)")
    add("--dry-run", action="store_true", help="--cluster: print the job, and stop")
    add("--json", action="store_true", help="print JSON")
    add("--probe", action="store_true", help=argparse.SUPPRESS)
    add("--report", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check, print a table, and exit with 3 where something failed."""
    if args.probe:
        return _probe(args)
    _check_flags(args)
    if args.cluster:
        return _cluster(args)
    from keepstep.launch.local import visible_gpus
    from keepstep.preflight.health import table, worst
    from keepstep.preflight.machine import config_checks, machine_checks, torch_checks

    checks = [*machine_checks(args.runs_dir, visible_gpus()), *torch_checks(), *config_checks(args.words)]
    failed = worst(checks) == "fail"
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print("\n".join(table(checks)))
        print("next: fix what failed" if failed else "next: keepstep demo, or keepstep doctor --cluster")
    return EXIT_PREFLIGHT if failed else EXIT_DONE


def _check_flags(args: argparse.Namespace) -> None:
    """Raise where an option would have no effect: a user who names a cluster does not ask about this machine."""
    elsewhere = {"--on": args.on != "local", "-N": args.nodes is not None, "--dry-run": args.dry_run}
    cluster = {**elsewhere, "--storage": args.storage is not None, "--data": args.data is not None}
    if not args.cluster and any(cluster.values()):
        given = ", ".join(flag for flag, is_given in cluster.items() if is_given)
        raise UsageError(f"{given} without --cluster: only this machine would be checked", "keepstep doctor --cluster")
    if args.cluster and args.on == "local" and any(elsewhere.values()):
        given = " and ".join(flag for flag, is_given in elsewhere.items() if is_given)
        raise UsageError(
            f"{given} needs a cluster, and --on names none", "--on slurm:PROFILE, k8s:PROFILE, sky:PROFILE or ssh:HOSTS"
        )
    if args.nodes is not None and args.nodes < 1:
        raise UsageError(f"-N is {args.nodes}, but a job has at least one node", "-N 1")


def _probe(args: argparse.Namespace) -> int:
    """One process of the measuring job."""
    from keepstep.launch.submit import REPORT_MARK
    from keepstep.preflight.node_probe import run_probe

    reports = run_probe(args.storage, args.data)
    if reports is not None:
        text = json.dumps(reports)
        if args.report:
            args.report.write_text(text)
        else:
            print(REPORT_MARK + text, flush=True)
    return EXIT_DONE


def _cluster(args: argparse.Namespace) -> int:
    from keepstep.launch.job import read_target
    from keepstep.launch.submit import render, report_job, run_report_job
    from keepstep.preflight.health import cluster_lines, judge_cluster
    from keepstep.preflight.machine import config_checks

    target = read_target(args.on)
    checks = tuple(config_checks(args.words))
    if target.system == "local":
        health = judge_cluster(_measure_here(args))
    else:
        chosen = report_job(target, _probe_words(args), args.runs_dir, args.nodes, ask_cluster=not args.dry_run)
        if args.dry_run:
            print(render(chosen.job, chosen.profile), end="")
            return EXIT_DONE
        health = judge_cluster(run_report_job(chosen, args.timeout_s), chosen.expected)
    health = replace(health, shared=(*checks, *health.shared))
    if args.json:
        print(json.dumps({**asdict(health), "drain": health.drain, "sound": health.sound}, indent=2))
    else:
        print("\n".join(cluster_lines(health, target.system)))
    return EXIT_DONE if health.sound else EXIT_PREFLIGHT


def _measure_here(args: argparse.Namespace) -> list[dict[str, Any]]:
    from keepstep.cli.train import start_processes
    from keepstep.launch.local import process_count

    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        code = start_processes([*_probe_words(args), "--report", str(report)], process_count("auto", "auto"))
        if code or not report.exists():
            raise HardwareError(f"the measuring job failed with exit code {code}", "its messages are above")
        reports: list[dict[str, Any]] = json.loads(report.read_text())
        return reports


def _probe_words(args: argparse.Namespace) -> list[str]:
    words = ["doctor", "--probe"]
    for flag, path in (("--storage", args.storage), ("--data", args.data)):
        if path is not None:
            words += [flag, str(path.absolute())]
    return words
