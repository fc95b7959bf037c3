"""The residual stream added inside the products that end sub-blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_variants import LLAMA, build
from torch import Tensor, nn

from keepstep.config.schema import ModelConfig
from keepstep.models.added import add_product
from keepstep.models.masks import Context
from keepstep.models.products import multiply_and_add, multiply_into
from keepstep.models.transformer import Block


def test_the_sum_and_its_gradients() -> None:
    torch.manual_seed(1)
    sides = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (2, 3, 5))]
    assert torch.autograd.gradcheck(add_product, sides)
    torch.testing.assert_close(add_product(*sides), sides[2] + sides[0] @ sides[1].t())


def test_products_elsewhere_are_torchs_own() -> None:
    torch.manual_seed(2)
    a, b, added, out = torch.randn(6, 4), torch.randn(4, 5), torch.randn(6, 5), torch.empty(6, 5)
    before = added.clone()
    assert torch.equal(multiply_into(out, a, b), torch.mm(a, b))
    assert torch.equal(multiply_and_add(a, b, added), torch.mm(a, b) + added)
    assert torch.equal(added, before)


@pytest.mark.parametrize("part", ["attention", "mlp"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_sub_block_with_the_residual_is_the_one_without_and_a_sum(part: str, activation: str) -> None:
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


def test_which_blocks_add_inside() -> None:
    def adds(**changes: object) -> bool:
        block = build(ModelConfig(**{**LLAMA, **changes})).blocks["0"]
        assert isinstance(block, Block)
        block.hands_over = True
        return block._adds_inside()

    assert adds()
    assert adds(activation="gelu")
    assert not adds(bias=True)
    assert not adds(dropout=0.1)
    assert not adds(linear="bitnet")
    block = build(ModelConfig(**LLAMA)).blocks["0"]
    assert isinstance(block, Block)
    assert not block._adds_inside()
    block.hands_over = True
    block.keep_products_apart()
    assert not block._adds_inside()
