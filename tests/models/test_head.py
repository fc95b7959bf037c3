"""The loss in pieces equals the loss in one go, and padding and ignored targets add nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.models.head import capped_output, default_chunks, head_logits, head_loss, token_losses
from tests.models.model_variants import VARIANTS, build, random_tokens

VOCAB, ROWS = 61, 64


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_btd = torch.randn(3, 11, 16, generator=generator).to(dtype).requires_grad_()
    weight_vd = torch.randn(ROWS, 16, generator=generator).to(dtype).requires_grad_()
    targets_bt = torch.randint(0, VOCAB, (3, 11), generator=generator)
    targets_bt[0, :4] = -100
    targets_bt[2, 10] = -100
    return hidden_btd, weight_vd, targets_bt


def plain_loss(hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor) -> Tensor:
    logits_btv = F.linear(hidden_btd, weight_vd[:VOCAB]).float()
    return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten(), reduction="sum")


@pytest.mark.parametrize("first_counted", [0, 9])
@pytest.mark.parametrize("chunks", [0, 1, 2, 5, 33, 100])
def test_loss_and_gradients_in_pieces_equal_the_whole(chunks: int, first_counted: int) -> None:
    hidden_btd, weight_vd, targets_bt = inputs()
    targets_bt[:, :first_counted] = -100
    loss = head_loss(hidden_btd, weight_vd, targets_bt, VOCAB, chunks)
    expected = plain_loss(hidden_btd, weight_vd, targets_bt)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss * 0.3, [hidden_btd, weight_vd])
    torch.testing.assert_close(gradients, torch.autograd.grad(expected * 0.3, [hidden_btd, weight_vd]))
    assert (gradients[1][VOCAB:] == 0).all()


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden_btd, weight_vd, targets_bt = inputs()
    with torch.no_grad():
        loss = head_loss(hidden_btd, weight_vd, targets_bt, VOCAB, 4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain_loss(hidden_btd, weight_vd, targets_bt).detach())


def test_a_frozen_head_still_gives_gradients_to_the_hidden_states() -> None:
    hidden_btd, weight_vd, targets_bt = inputs()
    frozen_vd = weight_vd.detach()
    (gradient,) = torch.autograd.grad(head_loss(hidden_btd, frozen_vd, targets_bt, VOCAB, 3), [hidden_btd])
    (expected,) = torch.autograd.grad(plain_loss(hidden_btd, frozen_vd, targets_bt), [hidden_btd])
    torch.testing.assert_close(gradient, expected)


def test_bfloat16_inputs_give_an_fp32_loss_and_bfloat16_gradients_close_to_exact_ones() -> None:
    hidden_btd, weight_vd, targets_bt = inputs(torch.bfloat16)
    loss = head_loss(hidden_btd, weight_vd, targets_bt, VOCAB, 7)
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, [hidden_btd, weight_vd])
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_btd, weight_vd)]
    expected = torch.autograd.grad(plain_loss(exact[0], exact[1], targets_bt), exact)
    for gradient, right in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - right).norm() < 0.01 * right.norm()


def test_only_ignored_targets_cost_nothing_and_teach_nothing() -> None:
    hidden_btd, weight_vd, targets_bt = inputs()
    loss = head_loss(hidden_btd, weight_vd, torch.full_like(targets_bt, -100), VOCAB, 2)
    assert loss.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, [hidden_btd, weight_vd]))


def test_padding_rows_never_win() -> None:
    hidden_btd, weight_vd, _ = inputs()
    with torch.no_grad():
        weight_vd[VOCAB:] = 100 * hidden_btd[0, 0]
        logits_btv = head_logits(hidden_btd, weight_vd, VOCAB)
    assert logits_btv.shape[-1] == ROWS
    assert (logits_btv.argmax(-1) < VOCAB).all()
    assert (logits_btv.softmax(-1)[..., VOCAB:] == 0).all()


def test_pieces_follow_the_size_of_the_logits() -> None:
    logits = torch.empty(0)
    assert default_chunks(32, 61, logits) == 1
    assert default_chunks(2048, 128256, logits) == 16
    assert default_chunks(2, 10**12, logits) == 2


@pytest.mark.parametrize("name", ["learned", "grouped rotary", "padded vocabulary"])
def test_the_models_loss_is_the_sum_over_its_logits(name: str) -> None:
    config = VARIANTS[name]
    model = build(config)
    tokens_bt, targets_bt = random_tokens(config, 2, 12), random_tokens(config, 2, 12, seed=2)
    targets_bt[:, :3] = -100
    logits_nv = model(tokens_bt)[..., : config.vocab].flatten(0, 1)
    expected = F.cross_entropy(logits_nv, targets_bt.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens_bt, targets_bt, loss_chunks=3), expected)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_of_each_loss_equal_autograd(cap: float, chunks: int) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden_btd = torch.randn(2, 7, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_vd = torch.randn(12, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets_bt = torch.randint(0, 10, (2, 7), generator=generator)
    targets_bt[0, :3] = -100
    worth_bt = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits_btv = hidden_btd @ weight_vd.t()
    capped_btv = (cap * torch.tanh(logits_btv / cap) if cap else logits_btv)[..., :10]
    expected_bt = F.cross_entropy(capped_btv.transpose(1, 2), targets_bt, reduction="none")
    expected = torch.autograd.grad((expected_bt * worth_bt).sum(), (hidden_btd, weight_vd))
    losses_bt = token_losses(hidden_btd, weight_vd, targets_bt, 10, chunks, cap=cap)
    torch.testing.assert_close(losses_bt, expected_bt.to(losses_bt.dtype))
    found = torch.autograd.grad((losses_bt * worth_bt).sum(), (hidden_btd, weight_vd))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if cap:
        total = capped_output(hidden_btd, weight_vd, targets_bt, 10, chunks, cap=cap)
        torch.testing.assert_close(total, expected_bt.sum().to(total.dtype))
