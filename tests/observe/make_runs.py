"""Writes run folders as the train loop does, with plausible numbers, for tests of everything that reads them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from keepstep.core.files import write_json
from keepstep.core.step_folders import MARKER, folder_name
from keepstep.observe.run_folder import JsonLines, Record, RunFolder
from keepstep.observe.sinks.metric_sinks import JsonlSink

CONFIG = """name: {name}
seed: {seed}
max_duration: {steps}ba
global_batch: 256
model:
  preset: llama-1b
  layers: 16
optimizer:
  name: adamw
  lr: {lr}
data:
  path: c4
"""


@dataclass
class Writer:
    """One made-up run, written step by step with a clock of its own."""

    root: Path
    steps: int = 1000
    seed: int = 1
    lr: float = 3e-4
    ranks: int = 8
    now: float = field(default_factory=lambda: time.time() - 3600)
    save_every: int = 200
    step_s: float = 0.5
    real_time: bool = False

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.root).create()
        self.random = Random(self.seed)
        self.step = self.saves = 0
        self.metrics, self.events = JsonLines(self.folder.metrics), JsonLines(self.folder.events)
        self.rank_lines, self.samples = JsonLines(self.folder.ranks), JsonLines(self.folder.samples)
        text = CONFIG.format(name=self.root.name, seed=self.seed, steps=self.steps, lr=self.lr)
        self.folder.config.write_text(text)
        write_json(
            self.folder.facts,
            {
                "total_steps": self.steps,
                "plan": {"tokens_per_s": 66_000, "mfu": 0.55, "memory_gib": 62.0, "checkpoint_s": 5.0},
                "environment": {"torch": "2.13.0", "python": "3.11.7", "gpu": "H200"},
                "data": {"path": "c4", "samples": 364_868},
            },
        )

    def __del__(self) -> None:
        for file in (self.metrics, self.events, self.rank_lines, self.samples):
            file.close()

    def event(self, kind: str, **facts: object) -> None:
        if self.real_time:
            self.now = time.time()
        self.events.append({"time": self.now, "kind": kind, "step": self.step, "rank": 0, **facts})

    def start(self) -> None:
        self.event("start", world_size=self.ranks, total_steps=self.steps)
        self.now += 12

    def line(self) -> Record:
        """The numbers of the current step."""
        noise = self.random.gauss
        warm = min(1.0, self.step / 100)
        lr = self.lr * warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, self.step / self.steps)))
        loss = 2.1 + 7.5 * math.exp(-self.step / 120) + 2.2 / (1 + self.step / 400) + noise(0, 0.05)
        grad = 0.4 + 2.4 * math.exp(-self.step / 150) + abs(noise(0, 0.08))
        if self.random.random() < 0.002:
            loss, grad = loss + 0.9, grad * 6
        took = self.step_s * (1 + abs(noise(0, 0.02)))
        return {
            "step": self.step,
            "time": round(self.now, 3),
            "loss": loss,
            "grad_norm": grad,
            "lr": lr,
            "tokens": self.step * 32768,
            "samples": self.step * 256,
            "tokens_per_s": round(32768 / took, 1),
            "mfu": round(0.577 * self.step_s / took, 5),
            "expert_load_max": 1.5,
            "expert_load_entropy": 0.9,
            "expert_bias_max": 0.01,
            "step_s": round(took, 5),
            "data_s": round(abs(noise(0.006, 0.004)), 5),
            "comm_s": round(took * 0.14, 5),
            "memory_gib": 63.7,
            "sources": {
                "c4": {"samples": self.step * 192, "epoch": self.step * 192 / 364_868},
                "code": {"samples": self.step * 64, "epoch": self.step * 64 / 20_000},
            },
        }

    def take(self, count: int) -> None:
        """Do `count` steps with their saves, validations and looks at the ranks."""
        for _ in range(count):
            self.step += 1
            self.now = time.time() if self.real_time else self.now + self.step_s
            self.metrics.append(self.line())
            if self.step % 20 == 0:
                self._ranks()
            if self.step % self.save_every == 0:
                self.save()
                self._validate()

    def _ranks(self) -> None:
        times = [self.step_s * (1 + abs(self.random.gauss(0, 0.01))) for _ in range(self.ranks)]
        self.rank_lines.append(
            {
                "time": self.now,
                "step": self.step,
                "step_s": times,
                "memory_gib": [63.7 - rank % 3 * 0.4 for rank in range(self.ranks)],
                "host": [f"node-{rank // 8}" for rank in range(self.ranks)],
            }
        )

    def save(self) -> None:
        self.event("checkpoint_started")
        folder = self.folder.checkpoints / folder_name(self.step)
        folder.mkdir(exist_ok=True)
        self.saves += 1
        write_json(folder / MARKER, {"step": self.step, "sequence": self.saves, "time": self.now})
        self.event("checkpoint_committed", seconds=4.8, blocked_s=0.12, bytes=14_800_000_000)

    def fail_to_save(self) -> None:
        message = f"checkpoint of step {self.step} failed: No space left on device"
        self.event("warning", reason="checkpoint_failed", message=message)

    def _validate(self) -> None:
        loss = 2.15 + 7.5 * math.exp(-self.step / 120) + 2.2 / (1 + self.step / 400)
        self.metrics.append({"step": self.step, "time": self.now, "valid_loss": loss, "valid_ppl": math.exp(loss)})
        self.event("evaluate", seconds=3.1)
        self.now += 3.1
        self.samples.append(
            {"time": self.now, "step": self.step, "prompt": "The sea was", "text": " calm, and so were we."}
        )

    def fault(self, rank: int = 3) -> None:
        """A worker dies; the run waits."""
        self.event("fault", what="worker killed by SIGKILL", rank=rank, host=f"node-{rank // 8}")

    def recover(self, lost: int = 30, down_s: float = 40, ranks: int = 0) -> None:
        """The run comes back `lost` steps earlier."""
        if ranks:
            self.event("resize", before=self.ranks, world_size=ranks)
            self.ranks = ranks
        self.event("restart", attempt=1)
        self.now += down_s
        self.step = max(0, self.step - lost)
        self.event("resume", ranks=self.ranks, total_steps=self.steps)
        self.now += 9

    def finish(self) -> None:
        self.event("finish", loss=2.2)


def write_long(root: Path, steps: int, seed: int) -> RunFolder:
    """A finished run of very many steps through the real sink; step `steps // 3` has a spike of 99."""
    writer = Writer(root, steps=steps, seed=seed, now=time.time() - steps * 0.5)
    writer.start()
    sink = JsonlSink(writer.folder)
    for step in range(1, steps + 1):
        writer.step, writer.now = step, writer.now + 0.5
        record = writer.line()
        if step == steps // 3:
            record["loss"] = 99.0
        sink.write("metrics", record)
    sink.close()
    writer.save()
    writer.finish()
    return writer.folder
