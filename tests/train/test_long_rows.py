"""A row of 1,048,576 tokens, split over four processes, from token files to evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keepstep.data.formats.megatron import MegatronWriter
from tests.train.tiny_runs import metrics, run_processes

pytestmark = pytest.mark.slow

MILLION = 2**20
MODEL = [
    "model.layers=1", "model.hidden=16", "model.heads=1", "model.positions=rotary", "model.norm=rmsnorm",
    "model.activation=swiglu", "model.bias=false", "model.sliding_window=64", "global_batch=1", "microbatch=1",
    "data.valid_share=0.4", "data.test_share=0", "precision=fp32",
]  # fmt: skip


def write_tokens(prefix: Path, documents: int, tokens: int) -> None:
    writer, random = MegatronWriter(prefix, np.dtype(np.uint16)), np.random.default_rng(1)
    for _ in range(documents):
        writer.add(random.integers(0, 128, tokens).astype(np.uint16))
    writer.close()


def test_row_of_a_million_tokens_trains_and_evaluates_on_four_processes(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", 12, MILLION // 4)
    words = [*MODEL, f"data={tmp_path}/tokens", f"model.seq_len={MILLION}", "max_duration=1ba"]
    run = run_processes(tmp_path, 4, *words, "parallel.context=4")
    assert run.returncode == 0, run.stderr
    (step,) = [line for line in metrics(tmp_path) if "loss" in line]
    (evaluated,) = [line for line in metrics(tmp_path) if "valid_loss" in line]
    # Random tokens: nothing to learn. That the ring computes the right thing is for tests/parallel to show.
    assert step["loss"] == pytest.approx(np.log(128), abs=0.1)
    assert evaluated["valid_loss"] == pytest.approx(np.log(128), abs=0.1)
    # A mask of a process's own tokens alone would take 64 GiB.
    assert 0 < step["memory_gib"] < 4
