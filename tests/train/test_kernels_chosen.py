"""What `compute` says about kernels holds while a run computes, and not a moment longer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keepstep.config.check import check_layout
from keepstep.config.load import load_config
from keepstep.core.ranks import from_environment
from keepstep.data.loader import Batch
from keepstep.models.documents import attend_documents
from keepstep.models.mlp import GatedMLP
from keepstep.models.transformer import Block
from keepstep.parallel.mesh import build_grid
from keepstep.parallel.world import joined_world
from keepstep.train.bench import bench_step
from keepstep.train.build import build_learner, spread_model
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu holds the kernel itself against a mask")
def test_packed_documents_reach_the_flash_kernel_as_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).integers(0, 128, (2, 32))
    documents = np.array([[0] * 9 + [1] * 23, [2] * 31 + [3]])
    batch = Batch(tokens, np.roll(tokens, -1, 1), None, documents, 0)
    words = [word for word in TINY if word != "compute.device=cpu"]
    found, asked = [], []

    def attend(*parts: torch.Tensor) -> torch.Tensor:
        asked.append(parts[-1].tolist())
        return attend_documents(*parts)

    monkeypatch.setattr("keepstep.models.attention.attend_documents", attend)
    for name in ("auto", "flash"):
        config = load_config(
            None, [*words, "model.positions=rotary", "precision=bf16", f"compute.attention={name}"]
        ).config
        with chosen_kernels(config), joined_world(from_environment(), torch.device("cpu")):
            step = build_learner(config, build_grid(check_layout(config, 1), "cpu"), torch.device("cpu")).step
            found.append([step.run([batch], lr_share=1.0)[0].item() for _ in range(3)])
        assert bool(asked) == (name == "flash")
    assert asked[0] == [0, 9, 32, 63, 64]
    assert found[1] == pytest.approx(found[0], rel=2e-3)


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        ([], True),
        (["compute.recompute=full"], True),
        (["compute.recompute=selective"], False),
        (["compute.joined_products=false"], False),
    ],
)
def test_what_lies_between_products_is_computed_inside_them_where_that_may_be(words: list[str], joined: bool) -> None:
    shape = ["model=llama-1b", "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2"]
    config = load_config(None, [*shape, *TINY[1:], "precision=bf16", *words]).config
    with joined_world(from_environment(), torch.device("cpu")):
        model = spread_model(config, build_grid(check_layout(config, 1), "cpu"), torch.device("cpu")).model
    for block in model.blocks.values():
        assert isinstance(block, Block)
        assert isinstance(block.mlp, GatedMLP)
        assert block.mlp._spans_products() == joined
        assert block.attention._spans_projection() == joined
