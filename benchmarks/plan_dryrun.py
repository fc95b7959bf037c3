"""A dry run of GPT-3 175B on 512 processes on one CPU: its time, its memory, and the error of the formula.

    python benchmarks/plan_dryrun.py

TP 8 × PP 16 × DP 4, one step of 16 micro batches per process. Writes benchmarks/results/plan_dryrun.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

from keepstep.config.load import load_config
from keepstep.plan.workload import workload_of
from keepstep.train.dryrun.dryrun import dry_run

HERE = Path(__file__).parent
WORDS = "model=gpt3-175b microbatch=1 global_batch=64 compute.recompute=full precision=bf16"
AXES = "parallel.tensor=8 parallel.pipeline=16 parallel.shard=4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "plan_dryrun.json")
    args = parser.parse_args()
    config = load_config(None, f"{WORDS} {AXES}".split()).config
    started = time.perf_counter()
    traced = dry_run(config, workload_of(config, 512))
    seconds = time.perf_counter() - started
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "command": f"keepstep plan {WORDS} {AXES} --cluster h100:512 --dry-run",
        "cores": len(os.sched_getaffinity(0)),
        # On a shared machine `cpu_s` is meaningful and `seconds` is not.
        "load_average": os.getloadavg()[0],
        "seconds": seconds,
        "cpu_s": children.ru_utime + children.ru_stime,
        # One process per stage, as many in parallel as there are cores, at most three.
        "peak_gib": children.ru_maxrss / 2**20 * min(3, os.cpu_count() or 1),
        "memory_error": max((stage.memory_error for stage in traced.stages), key=abs),
        "traffic_error": max((stage.traffic_error or 0.0 for stage in traced.stages), key=abs),
        **traced.as_values(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print("\n".join(traced.lines()))
    print(f"{seconds:.0f} s, {found['cpu_s']:.0f} s of processor time, at most {found['peak_gib']:.1f} GiB")


if __name__ == "__main__":
    main()
