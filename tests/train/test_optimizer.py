from __future__ import annotations

import pytest
import torch
from torch import nn

from keepstep.config.schema import ModelConfig, OptimizerConfig
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer
from keepstep.train.optim import muon, newton_schulz
from keepstep.train.optim.gradients import clip_factor, gradient_norm, scale_gradients
from keepstep.train.optim.loss_scaler import LossScaler
from keepstep.train.optim.muon import Muon
from keepstep.train.optim.newton_schulz import orthogonalise
from keepstep.train.optim.optimizer import Optimizers

ONE = torch.ones(())


def small_model() -> Transformer:
    model = Transformer(ModelConfig(layers=1, hidden=16, heads=2, vocab=32, seq_len=8))
    init_weights(model, 1)
    return model


def backward(model: Transformer) -> None:
    tokens = torch.arange(16).reshape(2, 8) % 32
    model(tokens, tokens).backward()


def test_norm_and_clipping_agree_with_torch() -> None:
    ours, theirs = small_model(), small_model()
    for model in (ours, theirs):
        backward(model)
    norm = gradient_norm(ours.parameters())
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    scale_gradients(ours.parameters(), clip_factor(norm, 0.5))
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def test_adamw_takes_the_textbook_step() -> None:
    model = small_model()
    reference = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers = Optimizers(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    backward(model)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizers.step(0.5, ONE)
    for name, parameter in model.named_parameters():
        decay = 0.5 if parameter.ndim >= 2 else 0.0
        first_step = gradients[name] / (gradients[name].abs() + 1e-8)
        expected = reference[name] * (1 - 0.05 * decay) - 0.05 * first_step
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("norms", "tables"), [(False, False), (True, False), (False, True)])
def test_what_decays_is_a_choice(norms: bool, tables: bool) -> None:
    model = small_model()
    config = OptimizerConfig(lr=0.1, weight_decay=1.0, decay_norms=norms, decay_embeddings=tables)
    optimizers = Optimizers(model, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(1.0, ONE)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    # Biases start at zero, where decay shows nothing.
    assert ("norm.weight" in moved) is norms
    assert ("embed.weight" in moved) is tables
    assert "blocks.0.attention.qkv.weight" in moved


def test_optimizer_state_exists_before_the_first_step() -> None:
    model = small_model()
    state = Optimizers(model, OptimizerConfig()).state()
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert set(state["embed.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_orthogonalise_brings_singular_values_near_one() -> None:
    matrix = torch.randn(48, 20, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_orthogonalise_treats_each_matrix_of_a_stack_alone() -> None:
    for shape in ((3, 8, 5), (3, 5, 8)):
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        expected = torch.stack([orthogonalise(matrix) for matrix in stack])
        assert torch.equal(orthogonalise(stack), expected)
    # Layers of experts: a stack of stacks.
    layers = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(orthogonalise(layers)[1, 2], orthogonalise(layers[1, 2]))


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (20, 24), (24, 20), (16, 16)])
def test_orthogonalise_is_five_rounds_of_the_iteration(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    exact = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = exact @ exact.mT
        exact = newton_schulz.A * exact + (newton_schulz.B * gram + newton_schulz.C * gram @ gram) @ exact
    torch.testing.assert_close(orthogonalise(matrix).double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
@pytest.mark.parametrize("rank", [1, 8, 64])
def test_rounds_on_small_matrices_stay_bounded_in_bf16(
    shape: tuple[int, int], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, shape[1], generator=generator)
    matrix += 1e-3 * torch.randn(shape, generator=generator)
    # The rounding of a GPU: every result in bf16.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.bfloat16)
    values = torch.linalg.svdvals(orthogonalise(matrix).double())
    assert 0.6 < values.max() < 1.3


@pytest.mark.parametrize("batch", [1, 700, 1 << 28])
def test_muon_gives_equal_bits_in_batches_of_any_size(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_BATCH", batch)
    generator = torch.Generator().manual_seed(5)
    shapes = [(16, 24), (24, 16), (16, 24), (3, 8, 12), (16, 24), (3, 8, 12)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = Muon(weights, lr=0.05, momentum=0.9, weight_decay=0.1)
    alone = []
    for weight in weights:
        optimizer.state[weight] = {"momentum": torch.zeros_like(weight)}
        weight.grad = torch.randn(weight.shape, generator=generator)
        single = nn.Parameter(weight.detach().clone())
        single.grad = weight.grad.clone()
        one = Muon([single], lr=0.05, momentum=0.9, weight_decay=0.1)
        one.state[single] = {"momentum": torch.zeros_like(single)}
        one.update(ONE)
        alone.append(single)
    optimizer.update(ONE)
    assert all(map(torch.equal, weights, alone))


def test_muon_skips_a_step_whose_factor_is_not_finite() -> None:
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(6)))
    before = weight.detach().clone()
    optimizer = Muon([weight], lr=0.05, momentum=0.9, weight_decay=0.1)
    optimizer.state[weight] = {"momentum": torch.ones(8, 8)}
    weight.grad = torch.ones(8, 8)
    optimizer.update(torch.tensor(float("inf")))
    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["momentum"], torch.ones(8, 8))


def test_muon_moves_block_matrices_and_adamw_the_rest() -> None:
    model = small_model()
    optimizers = Optimizers(model, OptimizerConfig(name="muon", lr=0.01))
    state = optimizers.state()
    assert set(state["blocks.0.mlp.down.weight"]) == {"momentum"}
    assert set(state["embed.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model)
    optimizers.step(1.0, ONE)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert state["blocks.0.mlp.down.weight"]["momentum"].abs().sum() > 0, "state tensors are the live ones"


def test_muon_lowers_a_quadratic() -> None:
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([weight], lr=0.05, momentum=0.9, weight_decay=0.0)
    optimizer.state[weight] = {"momentum": torch.zeros(8, 8)}
    for _ in range(100):
        weight.grad = weight.detach() - target
        optimizer.update(ONE)
    assert (weight - target).norm() < 0.3 * target.norm()


def test_loss_scaler_halves_on_overflow_and_grows() -> None:
    scaler = LossScaler(enabled=True, initial=8.0, growth_interval=2)
    scaler.update(finite=False)
    assert scaler.scale == 4.0
    scaler.update(finite=True)
    resumed = LossScaler(enabled=True, growth_interval=2)
    resumed.restore(scaler.state())
    resumed.update(finite=True)
    assert resumed.scale == 8.0


def test_a_scaler_that_is_off_never_moves() -> None:
    scaler = LossScaler(enabled=False)
    scaler.update(finite=False)
    assert scaler.scale == 1.0
