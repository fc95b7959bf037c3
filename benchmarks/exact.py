"""The cost of `reproducible: elastic`: alternating steps of each kind, in two processes of this machine.

    python benchmarks/exact.py --out benchmarks/results/exact.json

All kinds are built in the same processes and alternate, so that other load on the machine affects them equally.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.core.files import write_json
from keepstep.core.ranks import from_environment
from keepstep.models.size import parameter_count
from keepstep.parallel.mesh import build_mesh
from keepstep.parallel.world import joined_world
from keepstep.train.bench import synthetic_batches
from keepstep.train.build import build_learner
from keepstep.train.device import deterministic_kernels

PROCESSES = 2
WORDS = [
    "model=llama-1b", "model.layers=4", "model.hidden=384", "model.heads=6", "model.kv_heads=6", "model.head_dim=64",
    "model.ffn_hidden=1024", "model.vocab=16384", "model.seq_len=256", "data=synthetic", "compute.device=cpu",
    "global_batch=16", "microbatch=4",
]  # fmt: skip
MODES = {
    "sharded": [],
    "replicated": ["parallel.replicate=2", "parallel.shard=1"],
    "exact": ["reproducible=elastic"],
}


def measure(out: Path, turns: int) -> None:
    torch.set_num_threads(1)
    ranks, device = from_environment(), torch.device("cpu")
    with joined_world(ranks, device):
        steps = {}
        for mode, words in MODES.items():
            config = load_config(None, [*WORDS, *words]).config
            mesh = build_mesh(check_layout(config, PROCESSES), "cpu")
            batches = synthetic_batches(config, mesh.data_rank, PROCESSES)
            steps[mode] = (build_learner(config, mesh, device).step, batches)
        seconds: dict[str, list[float]] = {mode: [] for mode in steps}
        for turn in range(turns + 2):
            for mode, (step, batches) in steps.items():
                started = time.perf_counter()
                with deterministic_kernels() if mode == "exact" else nullcontext():
                    step.run(batches, 1.0)[0].item()
                if turn >= 2:
                    seconds[mode].append(time.perf_counter() - started)
    if ranks.is_first:
        medians = {mode: statistics.median(each) for mode, each in seconds.items()}
        write_json(
            out,
            {
                "parameters": parameter_count(config.model),
                "tokens_per_step": config.global_batch * config.model.seq_len,
                "processes": PROCESSES,
                "threads": 1,
                "device": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "turns": turns,
                "step_s": medians,
                "ratio_to_sharded": medians["exact"] / medians["sharded"],
                "ratio_to_replicated": medians["exact"] / medians["replicated"],
                "steps_s": seconds,
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact.json"))
    parser.add_argument("--turns", type=int, default=9, help="measured steps of each kind")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.out, args.turns)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **common, "RANK": str(rank)})
        for rank in range(PROCESSES)
    ]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        sys.exit(1)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
