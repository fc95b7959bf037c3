"""How long a save blocks on one GPU, and how much the write slows training: Llama 1b, about 15 GB of state.

python benchmarks/checkpoint_gpu.py --output benchmarks/results/checkpoint_gpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol.layout import split_state
from keepstep.config.presets import PRESETS
from keepstep.config.schema import CheckpointConfig, ModelConfig
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer

SEQ_LEN = 4096


class Training:
    """fp32 weights and AdamW, bf16 matmuls: the state of a single-GPU run."""

    def __init__(self, preset: str, rows: int) -> None:
        config = ModelConfig(preset=preset, **{**PRESETS[preset], "seq_len": SEQ_LEN})
        with torch.device("cuda"):
            self.model = Transformer(config)
        init_weights(self.model, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, config.vocab, (rows, SEQ_LEN), device="cuda")

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.model(self.tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        loss.backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            "model": {name: parameter.detach() for parameter, name in names.items()},
            "optimizer": {names[parameter]: dict(state) for parameter, state in self.optimizer.state.items()},
            "rank": {"cuda": torch.cuda.get_rng_state()},
        }


def step_seconds(training: Training, steps: int) -> list[float]:
    """Wall time of each step, with a device synchronization after each."""
    seconds = []
    for _ in range(steps):
        start_s = time.perf_counter()
        training.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return seconds


def measure_save(training: Training, checkpointer: Checkpointer, step: int, committed: list[Any]) -> dict[str, Any]:
    """One asynchronous save: blocked time on the host, the step with the copy, and the steps during the write."""
    waits: list[float] = []

    def before_update() -> None:
        start_s = time.perf_counter()
        checkpointer.before_update()
        waits.append(time.perf_counter() - start_s)

    torch.cuda.synchronize()
    start_s = time.perf_counter()
    checkpointer.save_async(step, training.state(), {})
    waits.append(time.perf_counter() - start_s)
    training.step(before_update)
    torch.cuda.synchronize()
    copy_step_s = time.perf_counter() - start_s
    during: list[float] = []
    while len(committed) == 0:
        during += step_seconds(training, 1)
        checkpointer.poll()
    return {"blocked_s": sum(waits), "copy_step_s": copy_step_s, "write_s": committed[0]["seconds"], "during_s": during}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama-1b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/checkpoint_gpu.json"))
    args = parser.parse_args()
    training = Training(args.preset, args.rows)
    step_seconds(training, 5)
    state_bytes = sum(tensor.nbytes for tensor in split_state(training.state())[0].values())
    committed: list[Any] = []

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        if kind == "checkpoint_committed":
            committed.append(facts)
        elif kind == "warning":
            raise RuntimeError(facts["message"])

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpointer = Checkpointer(folder, CheckpointConfig(keep=1), on_event)
        start_s = time.perf_counter()
        checkpointer.prepare(training.state())
        prepare_s = time.perf_counter() - start_s
        saves = []
        for number in range(1, args.saves + 1):
            plain = step_seconds(training, 10)
            committed.clear()
            saves.append({**measure_save(training, checkpointer, number, committed), "plain_s": plain})
        checkpointer.save(args.saves + 1, training.state(), {})
        start_s = time.perf_counter()
        expected = {name: tensor.clone() for name, tensor in split_state(training.state())[0].items()}
        into = training.state()
        for tensor in split_state(into)[0].values():
            tensor.zero_()
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        checkpointer.load_newest(into)
        torch.cuda.synchronize()
        load_s = time.perf_counter() - start_s
        equal = all(torch.equal(expected[name], tensor) for name, tensor in split_state(into)[0].items())
        checkpointer.close()
    plain_s = statistics.median(second for save in saves for second in save["plain_s"])
    during_s = statistics.median(second for save in saves for second in save["during_s"])
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "state_bytes": state_bytes,
        "blocked_s": statistics.median(save["blocked_s"] for save in saves),
        "stall_s": statistics.median(save["copy_step_s"] for save in saves) - plain_s,
        "step_s": plain_s,
        "step_during_write_s": during_s,
        "throughput_during_write": plain_s / during_s,
        "mean_throughput_during_write": plain_s / statistics.mean(s for save in saves for s in save["during_s"]),
        "write_s": statistics.median(save["write_s"] for save in saves),
        "prepare_s": prepare_s,
        "load_s": load_s,
        "load_bit_equal": equal,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**results, "raw": saves}, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
