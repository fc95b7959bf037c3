"""Every sound layout of experts within 8 processes trains like one process; writes benchmarks/results/expert_grid.json.

    python -m benchmarks.expert_grid

Expert parallelism 1, 2 and 4 with tensor, pipeline and hybrid sharding, ten steps each on this machine's CPUs. What
counts is the largest relative difference of loss and gradient norm from those of one process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

from keepstep.core.files import write_json
from tests.parallel.test_equality import MODELS, TINY
from tests.parallel.worlds import run_world

RESULTS = Path(__file__).parent / "results" / "expert_grid.json"
MODEL = "balanced"
ROWS = ("global_batch=16", "microbatch=2")


def layouts(processes: int) -> Iterator[dict[str, int]]:
    """Sound layouts of exactly this many processes."""
    for pipeline, tensor, replicate, expert in product((1, 2), (1, 2), (1, 2), (1, 2, 4)):
        shard, left_over = divmod(processes, pipeline * tensor * replicate)
        if not left_over and shard and shard % expert == 0:
            yield {"pipeline": pipeline, "tensor": tensor, "replicate": replicate, "shard": shard, "expert": expert}


def case(degrees: dict[str, int]) -> dict[str, Any]:
    words = [f"parallel.{axis}={degree}" for axis, degree in degrees.items()]
    name = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
    return {"name": name or "one process", "words": [*TINY, *MODELS[MODEL], *ROWS, *words]}


def difference(numbers: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(chain.from_iterable(numbers), chain.from_iterable(expected), strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        (alone,) = run_world(1, [case({"shard": 1})], Path(folder)).values()
        for processes in args.processes:
            results = run_world(processes, [case(degrees) for degrees in layouts(processes)], Path(folder))
            found |= {name: difference(result["numbers"], alone["numbers"]) for name, result in results.items()}
            write_json(args.out, {"steps": len(alone["numbers"]), "largest": max(found.values()), "layouts": found})
    print(f"{len(found)} layouts, off by {max(found.values()):.1e} at most")


if __name__ == "__main__":
    main()
