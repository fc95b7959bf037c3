"""fp8 products against the same products in fp32, through the operators every device runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.linear import FORWARD, Fp8Linear, fp8_swiglu_mlp, to_fp8
from keepstep.models.mlp import GatedMLP
from keepstep.models.ops.swiglu import swiglu


def near(ours: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
    assert ((ours - reference).norm() / reference.norm()).item() < limit


def test_scaling_fills_the_format_and_undoes_itself() -> None:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)) * 1e-3
    small, transposed, undo = to_fp8(x, FORWARD)
    assert small.float().abs().max() == torch.finfo(FORWARD).max
    assert torch.equal(transposed.float(), small.float().t())
    near(small.float() * undo, x, 0.04)


def test_an_all_zero_tensor_stays_zero() -> None:
    small, _, undo = to_fp8(torch.zeros(16, 16), FORWARD)
    assert small.float().abs().max() == 0
    assert torch.isfinite(undo)


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_are_those_of_a_plain_linear_within_fp8(bias: bool) -> None:
    torch.manual_seed(2)
    layer = Fp8Linear(64, 48, bias)
    x = torch.randn(2, 16, 64, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    target = torch.randn(2, 16, 48)
    (layer(x) * target).sum().backward()
    expected = F.linear(reference, weight, layer.bias)
    (expected * target).sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    assert layer.weight.grad is not None
    assert weight.grad is not None
    near(layer(x), expected, 0.06)
    near(x.grad, reference.grad, 0.08)
    near(layer.weight.grad, weight.grad, 0.08)


def test_the_gated_form_is_two_products_with_swiglu_between() -> None:
    torch.manual_seed(3)
    gate_up, down = Fp8Linear(32, 128, False), Fp8Linear(64, 32, False)
    x = torch.randn(4, 8, 32, requires_grad=True)
    fused = fp8_swiglu_mlp(x, gate_up, down, 16)
    fused.square().sum().backward()
    gradient, x.grad = x.grad, None
    apart = down(swiglu(gate_up(x), 16))
    apart.square().sum().backward()
    assert gradient is not None
    assert x.grad is not None
    near(fused, apart, 1e-3)
    near(gradient, x.grad, 0.02)


def test_swiglu_has_the_gradient_of_its_formula() -> None:
    torch.manual_seed(4)
    fused = torch.randn(6, 48, dtype=torch.float32, requires_grad=True)
    gate, up = fused.unflatten(-1, (-1, 2, 8)).unbind(-2)
    expected = (F.silu(gate) * up).flatten(-2)
    (wanted,) = torch.autograd.grad(expected.square().sum(), fused)
    product = swiglu(fused, 8)
    (ours,) = torch.autograd.grad(product.square().sum(), fused)
    torch.testing.assert_close(product, expected)
    torch.testing.assert_close(ours, wanted)


def test_sizes_that_the_tensor_cores_refuse_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        Fp8Linear(40, 64, False)


def test_a_gated_block_uses_the_fused_form() -> None:
    config = ModelConfig(hidden=32, heads=4, ffn_hidden=64, activation="swiglu", bias=False, linear="fp8")
    output = GatedMLP(config)(torch.randn(1, 16, 32))
    assert output.shape == (1, 16, 32)
