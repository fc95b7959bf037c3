"""What `compute` says about kernels holds while a run computes, and not a moment longer."""

from __future__ import annotations

import pytest
import torch

from keepstep.config.load import load_config
from keepstep.train.bench import bench_step
from keepstep.train.kernels import chosen_kernels

TINY = ["model=mpt-tiny", "model.seq_len=32", "global_batch=2", "microbatch=2", "compute.device=cpu"]


def enabled() -> tuple[bool, bool]:
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


def test_the_attention_kernel_is_the_configured_one() -> None:
    config = load_config(None, [*TINY, "compute.attention=math"]).config
    assert enabled() == (True, True)
    with chosen_kernels(config):
        assert enabled() == (False, True)
    assert enabled() == (True, True)


def test_kernels_of_attention_agree() -> None:
    losses = [
        bench_step(load_config(None, [*TINY, f"compute.attention={name}"]).config, 2, 1, breakdown=False).loss
        for name in ("auto", "math")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
