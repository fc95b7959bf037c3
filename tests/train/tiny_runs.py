"""Runs small enough for a unit test, through the same code as large ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keepstep.config.load import load_config
from keepstep.resilience.fault_injection import ALL_RANKS, Fault, to_environment
from keepstep.train.trainer import train
from tests.patience import PATIENCE_S

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
        timeout=PATIENCE_S,
    )


def held_until(file: Path) -> dict[str, str]:
    """The environment of a run whose steps wait, a quarter of a second each, until this file exists.

    So it does not end before its test has seen what it waits for, however slow the machine is.
    """
    return to_environment([Fault("wait", 1, ALL_RANKS, {"file": str(file), "longest_s": 0.25})], file.parent)


class BackgroundRun:
    """A run through the command line that a test disturbs while it is going on."""

    def __init__(
        self,
        root: Path,
        processes: int,
        *overrides: str,
        output: Path,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._output = output
        words = [*TINY, f"runs_dir={root}", *overrides, "--procs", str(processes)]
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "keepstep", "train", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdout=file,
                stderr=file,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            # Asked before the condition: a run may bring it about and end between the two.
            ended = self.process.poll() is not None
            if condition():
                return
            assert not ended, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)

    def wait_for(self, text: str) -> None:
        """Wait until the run has printed this."""
        self.wait_until(lambda: text in self.output)

    def end(self) -> int:
        """Its exit code; nothing outlives the test."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()


def committed_steps(root: Path, name: str = "run") -> list[int]:
    markers = (root / name / "checkpoints").glob("step_*/_SUCCESS")
    return sorted(int(marker.parent.name.removeprefix("step_")) for marker in markers)
