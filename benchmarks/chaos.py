"""Measures faults and recoveries: the chaos suite, a recovery compared with torchrun's, and restarts in a row.

    python benchmarks/chaos.py [--restarts 200] [--soak 200]

Writes benchmarks/results/chaos.json: an entry for each fault, `recovery_ratio_torchrun` (ours over theirs, medians of
alternating runs of the same model), `restarts` and how many of them succeeded at the first attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from keepstep.observe.run_folder import JsonLines, RunFolder
from keepstep.resilience.fault_injection import Fault, happened_at, to_environment

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
    "global_batch=8", "microbatch=2", "optimizer.lr=1e-2", "schedule.warmup=2ba", "evaluate.batches=1",
    "compute.threads=1", "compute.device=cpu",
]  # fmt: skip
MODEL = [
    "model=gpt3-125m", "model.layers=6", "model.hidden=512", "model.heads=8", "model.vocab=16384", "model.seq_len=32",
    "data=synthetic", "global_batch=2", "microbatch=1", "optimizer.lr=1e-4", "schedule.warmup=2ba",
    "evaluate.interval=0ba", "evaluate.at_end=false", "checkpoint.at_end=false", "compute.threads=1",
    "compute.device=cpu",
]  # fmt: skip
GROUPS = ["parallel.shard=2", "parallel.replicate=-1", "--procs", "4"]
"""Replicas of two processes each."""
SURVIVE = "kill-replica,stop-replica,kill-two-replicas,kill-joining,kill-spare,split-network"
KILL_AT, STEPS = 12, 20
MARK, END = "<!-- chaos: written by benchmarks/chaos.py -->", "<!-- /chaos -->"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--soak", type=int, default=0, help="random faults in one run; 0 skips this part")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--docs-only", action="store_true", help="only rewrite the table in docs/faults.md")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "chaos.json")
    args = parser.parse_args()
    if args.docs_only:
        write_docs(json.loads(args.output.read_text()))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results: dict[str, Any] = suite(folder)
        results |= recoveries(folder, args.repeats)
        results |= restarts_in_a_row(folder, args.restarts)
        if args.soak:
            results["soak"] = soak(folder, args.soak)
    # One verdict for all of it: a failed soak or restart must not hide behind a passed suite.
    results["passed"] = (
        results["passed"]
        and results.get("restarts_at_first_attempt", 0) == args.restarts
        and results.get("soak", {"passed": True})["passed"]
    )
    results["machine"] = f"{os.cpu_count()} cores, {platform.system()}"
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    write_docs(results)
    print(json.dumps({key: value for key, value in results.items() if key not in ("faults", "soak")}, indent=1))
    return 0 if results["passed"] else 1


def suite(folder: Path) -> dict[str, Any]:
    """Every fault that `keepstep chaos` knows, and those that others survive also where replicas are groups."""
    started = time.monotonic()
    result = chaos(folder, "suite")
    groups = chaos(folder, "groups", *GROUPS, "--kinds", SURVIVE)
    result["faults"] += groups["faults"]
    result["left_out"] |= {f"{kind} of groups": why for kind, why in groups["left_out"].items()}
    result["passed"] = result["passed"] and all(fault["passed"] for fault in groups["faults"])
    return {**result, "suite_s": round(time.monotonic() - started, 1)}


def chaos(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """The verdict of `keepstep chaos`."""
    out = folder / f"{name}.json"
    command = keepstep("chaos", *TINY, f"runs_dir={folder}", "--name", name, *words, "--out", str(out))
    subprocess.run(command, env=ENVIRONMENT, check=False)
    verdict: dict[str, Any] = json.loads(out.read_text())
    return verdict


def soak(folder: Path, faults: int) -> dict[str, Any]:
    """Random faults in one run; only the summary is kept."""
    started = time.monotonic()
    report = chaos(folder, "soak", "observe.tensorboard=false", "--random", str(faults), "--mtbf", "6")
    seconds = [fault["recovered_s"] for fault in report["faults"] if fault["recovered_s"] is not None]
    return {
        "faults": faults,
        "passed": report["passed"],
        "loss_equal": all(fault["loss_equal"] for fault in report["faults"]),
        "median_recovered_s": round(statistics.median(seconds), 2),
        "seconds": round(time.monotonic() - started, 1),
    }


def recoveries(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds from SIGKILL of one of two workers until the next step can start; ours and torchrun's alternate."""
    ours, theirs = [], []
    for number in range(repeats):
        ours.append(our_recovery(folder, f"ours-{number}"))
        theirs.append(their_recovery(folder / f"theirs-{number}"))
        print(f"recovery: keepstep {ours[-1]:.2f} s, torchrun {theirs[-1]:.2f} s", file=sys.stderr, flush=True)
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {"recovery_s": ours, "recovery_torchrun_s": theirs, "recovery_ratio_torchrun": round(ratio, 3)}


def our_recovery(folder: Path, name: str) -> float:
    fault, marks = Fault("kill", KILL_AT, 1), folder / f"{name}-marks"
    marks.mkdir()
    words = [*MODEL, f"runs_dir={folder}", f"name={name}", f"max_duration={STEPS}ba", "checkpoint.interval=5ba"]
    subprocess.run(
        keepstep("train", *words, "--procs", "2"),
        env={**ENVIRONMENT, **to_environment([fault], marks)}, check=True, capture_output=True,
    )  # fmt: skip
    struck_at = happened_at(fault, marks)
    events = JsonLines(RunFolder(folder / name).events).read()
    assert struck_at is not None
    return next(event["time"] for event in events if event["kind"] == "resume") - struck_at


def their_recovery(folder: Path) -> float:
    folder.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3",
        str(ROOT / "benchmarks" / "torchrun_resume.py"), "--folder", str(folder), "--kill-at", str(KILL_AT),
        "--steps", str(STEPS), "--", *MODEL,
    ]  # fmt: skip
    environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    times = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    struck_at = next(line["time"] for line in times if line["what"] == "killed")
    return next(line["time"] for line in times if line["what"] == "ready" and line["time"] > struck_at) - struck_at


def restarts_in_a_row(folder: Path, count: int) -> dict[str, Any]:
    """One run that loses a process every other step."""
    if not count:
        return {}
    faults = [Fault("kill", 3 + 2 * number, number % 2) for number in range(count)]
    marks = folder / "row-marks"
    marks.mkdir()
    words = [*TINY, "observe.tensorboard=false", f"runs_dir={folder}", "name=row", f"max_duration={2 * count + 8}ba"]
    started = time.monotonic()
    done = subprocess.run(
        keepstep("train", *words, "--procs", "2"),
        env={**ENVIRONMENT, **to_environment(faults, marks)}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    kinds = [event["kind"] for event in JsonLines(RunFolder(folder / "row").events).read()]
    # A failed restart shows as a fault without a resume before it.
    order = [kind for kind in kinds if kind in ("fault", "resume")]
    first_attempts = sum(pair == ("fault", "resume") for pair in pairwise(order))
    seconds = time.monotonic() - started
    print(f"{first_attempts} of {count} restarts at the first attempt, {seconds:.0f} s", file=sys.stderr, flush=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return {"restarts": count, "restarts_at_first_attempt": first_attempts, "restarts_exit_code": done.returncode}


def write_docs(results: dict[str, Any]) -> None:
    """Write the table in docs/faults.md from the results."""

    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f} s"

    lines = ["| Fault | detected after | ready again after | steps repeated | losses equal |", "|---|---|---|---|---|"]
    for fault in results["faults"]:
        times = f"{seconds(fault['detected_s'])} | {seconds(fault['recovered_s'])}"
        equal = "yes" if fault["loss_equal"] else "no"
        lines.append(f"| {fault['title']} | {times} | {fault['steps_lost']} | {equal} |")
    ours, theirs = (statistics.median(results[key]) for key in ("recovery_s", "recovery_torchrun_s"))
    lines += [
        "",
        "From SIGKILL of one of two processes until the run is ready for the next step, with a model of 28M "
        f"parameters: **{ours:.2f} s**. torchrun with a DCP resume takes {theirs:.2f} s; the ratio is "
        f"{results['recovery_ratio_torchrun']:.2f}. "
        f"{results['restarts_at_first_attempt']} of {results['restarts']} restarts in a row succeeded at the first "
        f"attempt.",
    ]
    if results.get("soak"):
        soaked = results["soak"]
        passed = "passed, with the losses of the undisturbed run and nothing left behind"
        verdict = passed if soaked["passed"] else "FAILED"
        minutes = soaked["seconds"] / 60
        lines += ["", f"{soaked['faults']} random faults in one run took {minutes:.0f} minutes: {verdict}."]
    page = ROOT / "docs" / "faults.md"
    before, _, rest = page.read_text().partition(MARK + "\n")
    page.write_text(before + MARK + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


def keepstep(*words: str) -> list[str]:
    return [sys.executable, "-m", "keepstep", *words]


if __name__ == "__main__":
    sys.exit(main())
