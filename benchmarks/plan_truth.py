"""Compares the plan with measurements on one GPU: twelve configurations, a few steps each of keepstep's own step.

    python benchmarks/plan_truth.py --out plan_truth.json [--only llama-1b]

Each configuration runs in its own process, so that they do not share memory. A thirteenth run,
of another model size, calibrates the speed. The output's "runs" is what `keepstep plan --measured` reads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

CALIBRATION = ("llama-3b", 4096, 2, "none")
CONFIGURATIONS = [
    *product(["llama-1b"], [4096], [4, 8], ["none", "full"]),
    *product(["mpt-1b"], [2048], [4, 16], ["none", "full"]),
    *product(["llama-8b"], [4096], [1, 2], ["selective", "full"]),
]


def words(model: str, seq_len: int, microbatch: int, recompute: str) -> list[str]:
    return [
        f"model={model}", f"model.seq_len={seq_len}", f"microbatch={microbatch}", f"global_batch={microbatch}",
        f"compute.recompute={recompute}", "precision=bf16", "data=synthetic",
    ]  # fmt: skip


def measure(shape: tuple[str, int, int, str], steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "keepstep", "bench", "step", *words(*shape), "--steps", str(steps), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": done.returncode}
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def compare(runs: list[dict[str, Any]], calibration: dict[str, Any], cluster_name: str) -> list[dict[str, Any]]:
    from keepstep.plan.calibrate import calibrate, measured_run
    from keepstep.plan.cluster import find_cluster, read_profiles
    from keepstep.plan.memory import plan_memory
    from keepstep.plan.speed import plan_speed

    cluster = find_cluster(cluster_name, read_profiles())
    factors = calibrate([measured_run(calibration)], cluster)
    lines = []
    for run in runs:
        work = measured_run(run).work
        predicted = {
            "memory_gib": (plan_memory(work).allocated / 2**30, run["peak_memory_gib"]),
            "step_s": (plan_speed(work, cluster, factors).step.total_s, run["step_s"]),
        }
        lines.append(
            {key: run[key] for key in ("model", "seq_len", "microbatch", "recompute")}
            | {
                name: {"predicted": planned, "measured": measured, "error": planned / measured - 1}
                for name, (planned, measured) in predicted.items()
            }
        )
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    rows = ["| Model | seq | rows | recompute | GiB planned | measured | error | s planned | measured | error |"]
    rows.append("|---" * 10 + "|")
    for line in lines:
        memory, step = line["memory_gib"], line["step_s"]
        rows.append(
            f"| {line['model']} | {line['seq_len']} | {line['microbatch']} | {line['recompute']} "
            f"| {memory['predicted']:.2f} | {memory['measured']:.2f} | {memory['error']:+.1%} "
            f"| {step['predicted']:.3f} | {step['measured']:.3f} | {step['error']:+.1%} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("plan_truth.json"))
    parser.add_argument("--cluster", default="h200:1")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", help="configurations whose model has this name")
    args = parser.parse_args()
    wanted = [shape for shape in CONFIGURATIONS if args.only in (None, shape[0])]
    calibration = measure(CALIBRATION, args.steps)
    if "failed" in calibration:
        raise SystemExit(f"the calibration run failed with exit code {calibration['failed']}")
    runs, failed = [], []
    for shape in wanted:
        measured = measure(shape, args.steps)
        (failed if "failed" in measured else runs).append(measured if "failed" not in measured else list(shape))
        lines = compare(runs, calibration, args.cluster)
        # Write after each run, so that results survive if the machine is taken away.
        written = {"calibration": calibration, "runs": runs, "failed": failed, "comparison": lines}
        args.out.write_text(json.dumps(written, indent=2))
        print(table(lines[-1:]).splitlines()[-1] if lines else shape, file=sys.stderr, flush=True)
    print(table(compare(runs, calibration, args.cluster)))


if __name__ == "__main__":
    main()
