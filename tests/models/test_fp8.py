"""fp8 products against the same products in fp32, through the operators every device runs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from keepstep.config.schema import ExpertsConfig, ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.attention_context import Context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.linear import Fp8Linear, fp8_swiglu_mlp
from keepstep.models.mlp import GatedMLP
from keepstep.models.moe import MoE, count_tokens
from keepstep.models.norm import fp8_add_norm, fused_add_norm
from keepstep.models.ops.backend import KernelBackend, use_backend
from keepstep.models.ops.expert_rows import quantize_rows
from keepstep.models.ops.fp8 import BACKWARD, FORWARD, HEADROOM, SAMPLED_ROWS, Fp8Rows, fp8_swiglu, to_fp8
from keepstep.models.ops.routed_experts import routed_experts, sort_by_expert
from keepstep.models.ops.swiglu import swiglu
from keepstep.models.positions import rope_tables
from keepstep.models.transformer import Block


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


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_many_rows_are_scaled_by_a_sample_with_headroom(dtype: torch.dtype) -> None:
    x = torch.randn(4 * SAMPLED_ROWS, 16, generator=torch.Generator().manual_seed(1))
    small, _, undo = to_fp8(x, dtype)
    sampled = x[::4].abs().max().item()
    assert undo.item() == pytest.approx(HEADROOM * sampled / torch.finfo(dtype).max)
    exact = to_fp8(x, dtype, x.abs().max())[0].float()
    assert small.float().abs().max() < torch.finfo(dtype).max
    # Coarser by what is lost at the bottom of the range, which is next to nothing.
    near(small.float() * undo, x, 1.1 * ((exact * x.abs().max() / torch.finfo(dtype).max - x).norm() / x.norm()).item())


def test_numbers_past_the_headroom_scale_the_tensor_themselves() -> None:
    x = torch.randn(4 * SAMPLED_ROWS, 16, generator=torch.Generator().manual_seed(1))
    x[7, 3] = 1000.0
    small, _, undo = to_fp8(x, FORWARD)
    assert undo.item() == pytest.approx(1000 / 448)
    assert small[7, 3].float().item() == 448


@pytest.mark.parametrize("with_added", [False, True])
def test_norm_in_fp8_has_the_numbers_and_gradients_of_the_norm(with_added: bool) -> None:
    torch.manual_seed(2)
    x, added, target = torch.randn(3, 2, 16, 64)
    weight = torch.rand(64) + 0.5
    layer = Fp8Linear(64, 32, False)
    results = []
    for in_fp8 in (False, True):
        leaves = [part.clone().requires_grad_() for part in (x, added, weight)]
        sides = leaves[0], leaves[1] if with_added else None, leaves[2]
        form = fp8_add_norm if in_fp8 else fused_add_norm
        stream, normed = form(*sides, 1e-5)  # type: ignore[operator]
        assert isinstance(normed, Fp8Rows) == in_fp8
        output = layer(normed)
        ((output**2).sum() + (stream * target).sum()).backward()
        results.append([stream, output, *(leaf.grad for leaf in leaves[: 2 + with_added : 2] if leaf.grad is not None)])
        results[-1].append(leaves[2].grad)
    for plain, ours in zip(*results, strict=True):
        near(ours, plain, 1e-2)


class OnAGpu(KernelBackend):
    def fuses_matmuls(self, tensor: torch.Tensor) -> bool:
        return True


def test_a_block_computes_the_same_with_norms_in_fp8() -> None:
    shape = {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "activation": "swiglu", "norm": "rmsnorm"}
    config = ModelConfig(**shape, positions="rotary", bias=False, linear="fp8", vocab=64, seq_len=16)  # type: ignore[arg-type]
    torch.manual_seed(3)
    block = Block(config, 0)
    assert block.attention.takes_fp8()
    block.use(BlockPlan(deferred_add=True))
    x = torch.randn(2, 16, 64, requires_grad=True)
    context = Context(None, True, rope_tables(config, torch.arange(16)[None]), None)
    gradients = []
    for backend in (KernelBackend(), OnAGpu()):
        with use_backend(backend):
            stream, added = block(x, context)
        assert added is not None
        gradients.append(torch.autograd.grad((stream + added).square().sum(), [x, *block.parameters()]))
    assert len(gradients[0]) == 7
    for plain, ours in zip(*gradients, strict=True):
        near(ours, plain, 0.05)


def test_nothing_between_gated_matmuls_is_kept_in_full_precision() -> None:
    gate_up, down = Fp8Linear(32, 128, False).bfloat16(), Fp8Linear(64, 32, False).bfloat16()
    kept: list[torch.Tensor] = []
    x = torch.randn(4, 8, 32).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fp8_swiglu_mlp(x, gate_up, down, 16)
    wide = [tuple(tensor.shape) for tensor in kept if tensor.dtype == torch.bfloat16]
    assert wide == [(32, 128)]
    straight, transposed, undo = fp8_swiglu(torch.randn(32, 128), 16)
    assert (straight.dtype, transposed.shape, undo.shape) == (FORWARD, (64, 32), ())


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


def in_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().max() / 448
    return (x.float() / scale).to(FORWARD).float(), scale


def rounded_product(x_k: torch.Tensor, weight_nk: torch.Tensor) -> torch.Tensor:
    """Of e4m3 numbers with one scale for each side; their sums are bf16 before they are scaled, and after."""
    (left_k, left_scale), (right_nk, right_scale) = in_e4m3(x_k), in_e4m3(weight_nk)
    return ((right_nk @ left_k).bfloat16() * (left_scale * right_scale)).bfloat16()


def mixture(linear: str) -> MoE:
    torch.manual_seed(4)
    experts = ExpertsConfig(count=4, top_k=2, ffn_hidden=48)
    fields = {"layers": 1, "heads": 4, "activation": "swiglu", "bias": False, "init_std": 0.1}
    return MoE(ModelConfig(hidden=64, vocab=64, seq_len=8, linear=linear, experts=experts, **fields)).bfloat16()  # type: ignore[arg-type]


def test_experts_multiply_what_both_sides_round_to() -> None:
    layer = mixture("fp8")
    x_nd = torch.randn(24, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    # Scales of rows differ, and so do those of experts.
    x_nd[3] *= 4
    experts = layer.experts
    with torch.no_grad():
        experts.gate_up[1] *= 8
        experts.down[2] *= 8
        weights_nk, chosen_nk = layer.router(x_nd)
        expected = torch.zeros(24, 64)
        for token, (weights, chosen) in enumerate(zip(weights_nk, chosen_nk.tolist(), strict=True)):
            for weight, expert in zip(weights, chosen, strict=True):
                gate, up = rounded_product(x_nd[token], experts.gate_up[expert]).float().chunk(2)
                activation = (F.silu(gate) * up * weight).bfloat16()
                expected[token] += rounded_product(activation, experts.down[expert]).float()
        each = (layer(x_nd[None])[0].float() - expected).norm(dim=1) / expected.norm(dim=1)
        layer.experts.fp8 = False
        wide = (layer(x_nd[None])[0].float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert each.max() < 0.01
    assert wide.median() > 0.03


def test_gradients_of_fp8_experts_are_those_of_bf16_within_fp8() -> None:
    x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    gradients = []
    for linear in ("dense", "fp8"):
        layer, inputs = mixture(linear), x.clone().requires_grad_()
        layer(inputs).float().square().sum().backward()
        gradients.append([inputs.grad, *(parameter.grad for parameter in layer.parameters())])
    for wide, narrow in zip(*gradients, strict=True):
        assert wide is not None
        assert narrow is not None
        assert not torch.equal(wide, narrow)
        near(narrow.float(), wide.float(), 0.12)


def test_rows_fill_the_format_and_zeros_stay_zero() -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(7)) * torch.tensor([[1e-3], [1e3], [0.0]])
    small, undo = quantize_rows(x)
    assert small.float().abs().amax(1).tolist() == [448, 448, 0]
    near(small.float() * undo[:, None], x, 0.04)


def test_the_backward_pass_of_fp8_experts_multiplies_what_both_sides_round_to() -> None:
    layer = mixture("fp8")
    x_nd, d_out_nd = (torch.randn(40, 64, generator=torch.Generator().manual_seed(8 + i)).bfloat16() for i in range(2))
    # Gradients of tokens differ by much, and so do weights of experts.
    d_out_nd *= torch.logspace(-9, -4, 40)[:, None].bfloat16()
    with torch.no_grad():
        layer.experts.gate_up[1] *= 8
        layer.experts.down[2] /= 8
    weights_nk, chosen_nk = (part.detach() for part in layer.router(x_nd))
    routes = sort_by_expert(chosen_nk, count_tokens(chosen_nk, 4))
    x_nd, weights_nk = x_nd.requires_grad_(), weights_nk.requires_grad_()
    gate_up, down = layer.experts.gate_up, layer.experts.down
    out = routed_experts(x_nd, weights_nk, gate_up, down, routes, fp8=True)
    dx, d_weights, d_gate_up, d_down = torch.autograd.grad(out, (x_nd, weights_nk, gate_up, down), d_out_nd)

    expected = [torch.zeros_like(each, dtype=torch.float32) for each in (dx, d_weights, d_gate_up, d_down)]
    for token, slot in itertools.product(range(40), range(2)):
        expert, weight = int(chosen_nk[token, slot]), weights_nk[token, slot].detach()
        (x8, x_undo), (d8, d_undo) = in_e4m3(x_nd.detach()[token]), in_e4m3(d_out_nd[token])
        (gate_up8, gate_up_undo), (down8, down_undo) = in_e4m3(gate_up.detach()[expert]), in_e4m3(down.detach()[expert])
        gate_up_f = rounded_product(x_nd.detach()[token], gate_up.detach()[expert]).float().requires_grad_()
        gate, up = gate_up_f.chunk(2)
        activation = F.silu(gate) * up
        dy = (d8 @ down8 * (d_undo * down_undo)).bfloat16().float()
        expected[1][token, slot] = (dy * activation).sum()
        (d_gate_up_f,) = torch.autograd.grad(activation * weight, gate_up_f, dy)
        expected[0][token] += d_gate_up_f @ gate_up8 * gate_up_undo
        expected[2][expert] += d_gate_up_f[:, None] * (x8 * x_undo)
        expected[3][expert] += (d8 * d_undo)[:, None] * (activation.detach() * weight)
    # What is left is e5m2's rounding of one side, of 6% at random.
    for ours, other in zip((dx, d_weights, d_gate_up, d_down), expected, strict=True):
        near(ours.float(), other, 0.06)
    near(d_weights, expected[1], 0.01)
    # Small gradients are as exact as large ones: each token has a scale of its own.
    each = (dx.float() - expected[0]).norm(dim=1) / expected[0].norm(dim=1)
    assert each.max() < 0.12


def test_frozen_fp8_experts_pass_gradients_on() -> None:
    layer, inputs = mixture("fp8"), torch.randn(1, 24, 64).bfloat16().requires_grad_()
    gradients: list[torch.Tensor] = []
    for learned in (True, False):
        layer.experts.requires_grad_(learned)
        gradients += torch.autograd.grad(layer(inputs).float().square().sum(), inputs)
    assert torch.equal(*gradients)


def test_fp8_experts_that_get_no_row_have_no_gradient() -> None:
    # With expert parallelism a process may get none at all.
    x, weights = torch.zeros(0, 64).bfloat16().requires_grad_(), torch.zeros(0, 1).requires_grad_()
    gate_up, down = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((2, 96, 64), (2, 64, 48)))
    routes = sort_by_expert(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    routed_experts(x, weights, gate_up, down, routes, fp8=True).sum().backward()
    for weight in (gate_up, down):
        assert weight.grad is not None
        assert weight.grad.abs().max() == 0
