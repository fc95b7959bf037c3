"""The residual stream added in the epilogue of the matmuls that end sub-blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from keepstep.config.schema import ModelConfig
from keepstep.models.attention_context import Context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.ops.matmul import addmm_fused, lora_matmul, matmul_add, matmul_into
from keepstep.models.transformer import Block
from tests.models.model_variants import LLAMA, build


def test_matmul_add_matches_the_plain_sum() -> None:
    torch.manual_seed(1)
    sides = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (2, 3, 5))]
    assert torch.autograd.gradcheck(matmul_add, sides)
    torch.testing.assert_close(matmul_add(*sides), sides[2] + sides[0] @ sides[1].t())


@pytest.mark.parametrize("bias", [None, torch.ones(5, dtype=torch.double)])
def test_lora_matmul_matches_the_sum_of_both(bias: Tensor | None) -> None:
    torch.manual_seed(1)
    x, weight, lora_a, lora_b = (
        torch.randn(shape, dtype=torch.double, requires_grad=shape != (5, 4))
        for shape in ((2, 3, 4), (5, 4), (2, 4), (5, 2))
    )
    assert torch.autograd.gradcheck(lora_matmul, (x, weight, lora_a, lora_b, bias))
    expected = nn.functional.linear(x, weight + lora_b @ lora_a, bias)
    torch.testing.assert_close(lora_matmul(x, weight, lora_a, lora_b, bias), expected)


def test_matmuls_on_a_cpu_are_torchs_own() -> None:
    torch.manual_seed(2)
    a, b, added, out = torch.randn(6, 4), torch.randn(4, 5), torch.randn(6, 5), torch.empty(6, 5)
    before = added.clone()
    assert torch.equal(matmul_into(out, a, b), torch.mm(a, b))
    assert torch.equal(addmm_fused(a, b, added), torch.mm(a, b) + added)
    assert torch.equal(added, before)


@pytest.mark.parametrize("part", ["attention", "mlp"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_sub_block_with_residual_equals_sum(part: str, activation: str) -> None:
    torch.manual_seed(3)
    block = build(ModelConfig(**{**LLAMA, "activation": activation})).blocks["0"]
    x, residual = (torch.randn(2, 16, block.attention.out.out_features, requires_grad=True) for _ in range(2))
    context = Context(None, True, None, None)
    inputs = (context,) if part == "attention" else ()

    def gradients(way: Callable[[nn.Module], Tensor]) -> list[Tensor]:
        module: nn.Module = getattr(block, part)
        output = way(module)
        wanted = [x, residual, *module.parameters()]
        return [output, *torch.autograd.grad(output.square().sum(), wanted)]

    ours = gradients(lambda module: module(x, *inputs, residual))
    torch.testing.assert_close(ours, gradients(lambda module: module(x, *inputs) + residual), rtol=1e-4, atol=1e-4)


def test_block_fuses_residual_only_where_possible() -> None:
    def adds(plan: BlockPlan = BlockPlan(deferred_add=True), **changes: object) -> bool:  # noqa: B008 - frozen
        block = build(ModelConfig(**{**LLAMA, **changes})).blocks["0"]
        assert isinstance(block, Block)
        block.use(plan)
        return block._fuses_residual()

    assert adds()
    assert adds(activation="gelu")
    assert not adds(bias=True)
    assert not adds(dropout=0.1)
    assert not adds(linear="bitnet")
    assert not adds(BlockPlan())
    assert not adds(BlockPlan(deferred_add=True, fused_matmuls=False))
    assert not adds(BlockPlan(deferred_add=True, tensor_parallel=True))
