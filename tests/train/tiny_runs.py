"""Runs small enough for a unit test, through the same code as large ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from keepstep.config.load import load_config
from keepstep.train.run import train

TINY = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
    "global_batch=8", "microbatch=2", "max_duration=6ba", "optimizer.lr=1e-2", "schedule.warmup=2ba",
    "evaluate.batches=1", "observe.tensorboard=false", "compute.threads=1", "compute.device=cpu",
]  # fmt: skip


def losses(root: Path, name: str = "run") -> list[float]:
    """Losses by step; a step that was done again counts once, as it was done last."""
    by_step: dict[int, float] = {}
    for line in (root / name / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            by_step[record["step"]] = record["loss"]
    return [by_step[step] for step in sorted(by_step)]


def metrics(root: Path, name: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


def run_here(root: Path, *overrides: str) -> None:
    """Train in this process."""
    train(load_config(None, [*TINY, f"runs_dir={root}", *overrides]).config)


def run_processes(root: Path, processes: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train through the command line in processes of its own."""
    words = [*TINY, f"runs_dir={root}", *overrides, "--procs", str(processes)]
    return subprocess.run(
        [sys.executable, "-m", "keepstep", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
