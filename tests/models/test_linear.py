"""Linear modules are chosen by config; bitnet computes with ternary weights and still learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.linear import BitLinear, make_linear
from tests.models.model_variants import VARIANTS, build


def test_the_kind_is_used_in_blocks_and_nowhere_else() -> None:
    model = build(replace(VARIANTS["learned"], linear="bitnet"))
    kinds = {type(module) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
    assert kinds == {BitLinear}
    assert type(model.embed) is nn.Embedding
    assert {type(module) for module in build(VARIANTS["learned"]).modules() if isinstance(module, nn.Linear)} == {
        nn.Linear
    }


def test_bitnet_multiplies_by_three_values_only() -> None:
    torch.manual_seed(0)
    linear = BitLinear(64, 32, bias=False)
    # One-hot tokens are exact in 255 steps, so the outputs are the weights that were used.
    used = linear(torch.eye(64)).t()
    scale = linear.weight.abs().mean()
    assert torch.allclose(used / scale, (used / scale).round(), atol=1e-4)
    assert set((used / scale).round().flatten().tolist()) == {-1.0, 0.0, 1.0}


def test_bitnet_gradients_pass_the_rounding_straight_through() -> None:
    torch.manual_seed(0)
    linear = BitLinear(16, 8, bias=True)
    x = torch.randn(4, 16, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is not None
    # Each row of the weight sees the same upstream gradient, so the same sum of (rounded) inputs.
    step = x.detach().abs().amax(-1, keepdim=True) / 127
    rounded = (x.detach() / step).round() * step
    torch.testing.assert_close(linear.weight.grad, rounded.sum(0).expand(8, -1))


@pytest.mark.slow
def test_a_bitnet_model_learns() -> None:
    config = replace(VARIANTS["grouped rotary"], linear="bitnet")
    model = build(config)
    tokens_bt = (torch.arange(25) * 7 % config.vocab).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(tokens_bt[:, :-1], tokens_bt[:, 1:]) / 96
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 1.0


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ConfigError, match="sprase, which is no plug-in"):
        make_linear(ModelConfig(linear="sprase"), "qkv", 4, 4, bias=True)
