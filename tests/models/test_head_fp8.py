"""Gradients of the head by fp8 matmuls against those of the same loss in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.core.ranks import from_environment
from keepstep.models.head import head_loss
from keepstep.models.head_fp8 import cross_entropy_fp8
from keepstep.models.kernels.cuda import relative_difference
from keepstep.parallel.mesh import build_mesh
from keepstep.parallel.world import joined_world
from keepstep.plan.workload import workload_of
from keepstep.train.build import spread_model

VOCAB, ROWS, HIDDEN = 157, 160, 32


def inputs(tokens: int = 48, std: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_btd = torch.randn(4, tokens // 4, HIDDEN, generator=generator).bfloat16().requires_grad_()
    weight_vd = (torch.randn(ROWS, HIDDEN, generator=generator) * std / HIDDEN**0.5).bfloat16().requires_grad_()
    targets_bt = torch.randint(0, VOCAB, (4, tokens // 4), generator=generator)
    targets_bt[0, :4] = -100
    return hidden_btd, weight_vd, targets_bt


def relative(ours: Tensor, theirs: Tensor) -> float:
    return relative_difference([ours], [theirs])


@pytest.mark.parametrize("std", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("chunks", [0, 1, 2, 5, 100])
def test_losses_are_those_of_bf16_and_gradients_near_those_of_fp32(chunks: int, std: float) -> None:
    hidden_btd, weight_vd, targets_bt = inputs(std=std)
    loss = head_loss(hidden_btd, weight_vd, targets_bt, VOCAB, chunks, fp8=True)
    torch.testing.assert_close(loss, head_loss(hidden_btd, weight_vd, targets_bt, VOCAB, chunks))
    by_hidden, by_weight = torch.autograd.grad(loss * 0.3, [hidden_btd, weight_vd])
    wide = [part.detach().float().requires_grad_() for part in (hidden_btd, weight_vd)]
    logits_btv = F.linear(wide[0], wide[1][:VOCAB])
    expected = F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten(), reduction="sum")
    wanted = torch.autograd.grad(expected * 0.3, wide)
    assert relative(by_hidden, wanted[0]) < 0.06
    assert relative(by_weight, wanted[1]) < 0.06
    assert (by_hidden[0, :4] == 0).all()
    assert (by_weight[VOCAB:] == 0).all()


def test_probabilities_of_a_large_vocabulary_do_not_vanish_and_targets_are_exact() -> None:
    logits_nv, targets_n = torch.zeros(16, 128256, dtype=torch.bfloat16), torch.arange(16)
    loss_n, (numbers, undo) = cross_entropy_fp8(logits_nv, targets_n, 128256)
    gradient_nv = numbers.float() * undo
    torch.testing.assert_close(loss_n, torch.full((16,), 128256.0).log())
    assert (gradient_nv.gather(1, targets_n[:, None]) == -1).all()
    torch.testing.assert_close(gradient_nv[:, 16:].sum(1), torch.ones(16), rtol=0.03, atol=0)


def test_a_frozen_head_still_gives_gradients_to_the_hidden_states() -> None:
    hidden_btd, weight_vd, targets_bt = inputs()
    both = torch.autograd.grad(head_loss(hidden_btd, weight_vd, targets_bt, VOCAB, fp8=True), [hidden_btd, weight_vd])
    frozen = head_loss(hidden_btd, weight_vd.detach(), targets_bt, VOCAB, fp8=True)
    (alone,) = torch.autograd.grad(frozen, [hidden_btd])
    assert torch.equal(alone, both[0])
    apart = head_loss(hidden_btd.detach(), weight_vd, targets_bt, VOCAB, fp8=True)
    assert torch.equal(torch.autograd.grad(apart, [weight_vd])[0], both[1])


def test_sizes_that_tensor_cores_do_not_take_are_computed_in_bf16() -> None:
    hidden_btd, weight_vd, targets_bt = inputs(tokens=44)
    plain, small = (head_loss(hidden_btd, weight_vd, targets_bt, VOCAB, fp8=fp8) for fp8 in (False, True))
    pair = [torch.autograd.grad(loss, [hidden_btd, weight_vd]) for loss in (plain, small)]
    assert all(map(torch.equal, *pair))


@pytest.mark.parametrize(
    ("words", "fp8"),
    [
        ("precision=fp8", True),
        ("precision=fp8 model.tied=false", True),
        ("precision=fp8 model.final_logit_softcapping=30", False),
        ("precision=fp8 lora.rank=4", False),
        ("precision=bf16 model.linear=fp8", False),
    ],
)
def test_precision_fp8_includes_the_head(words: str, fp8: bool) -> None:
    shape = "model=llama-1b model.layers=1 model.hidden=64 model.heads=2 model.kv_heads=2 model.vocab=512"
    config = load_config(None, f"{shape} model.ffn_hidden=128 global_batch=1 microbatch=1 {words}".split()).config
    with joined_world(from_environment(), torch.device("cpu")):
        model = spread_model(config, build_mesh(check_layout(config, 1), "cpu"), torch.device("cpu"))[0]
    output = model.tied_output if model.head is None else model.head.output
    assert getattr(output, "keywords", {}).get("fp8", False) == fp8
    assert workload_of(config, 1).fp8_head == fp8
