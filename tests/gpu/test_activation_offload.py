"""Activation offloading on a GPU: less memory, the same bits. Needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory and streams need a GPU")

SHAPE = [
    "model=llama-1b", "model.layers=8", "model.seq_len=16384", "microbatch=1", "global_batch=2", "precision=bf16",
]  # fmt: skip


def measure(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "keepstep", "bench", "step", *SHAPE, *words, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.mark.parametrize(
    "words",
    [
        ["compute.recompute=full"],
        ["compute.recompute=none"],
        ["compute.recompute=selective", "parallel.shard=1"],
        ["compute.recompute=full", "compute.compile=true"],
    ],
    ids=" ".join,
)
def test_offloading_frees_memory_and_changes_no_bit(words: list[str]) -> None:
    plain, offloaded = (measure(*words, f"compute.offload_activations={value}") for value in ("false", "true"))
    assert offloaded["loss"] == plain["loss"]
    # Of seven blocks in eight, at least an input of 16,384 × 2,048 numbers is in host memory.
    saved_gib = 5 * 16384 * 2048 * 2 / 2**30
    assert offloaded["peak_memory_gib"] < plain["peak_memory_gib"] - saved_gib
