"""Fused projections can be cut along dim 0 into smaller models whose outputs add up: what tensor parallelism needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from keepstep.config.schema import ModelConfig
from keepstep.models.attention import Attention, pack_qkv, unpack_qkv
from keepstep.models.attention_context import make_context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.mlp import gate_blocks, make_mlp, pack_gate_up, unpack_gate_up
from tests.models.model_variants import VARIANTS, build


def slice_linear(linear: nn.Linear, dim: int, part: int, parts: int) -> None:
    """Keep one contiguous part of a linear's weight; a bias goes along with rows, and stays whole with part 0 else."""
    linear.weight = nn.Parameter(linear.weight.chunk(parts, dim)[part].clone())
    if linear.bias is not None:
        bias = linear.bias.chunk(parts)[part] if dim == 0 else linear.bias * (part == 0)
        linear.bias = nn.Parameter(bias.clone())


def hidden(config: ModelConfig) -> Tensor:
    return torch.randn(2, 10, config.hidden, generator=torch.Generator().manual_seed(8))


@torch.no_grad()
@pytest.mark.parametrize("name", ["learned", "alibi", "grouped rotary", "query and key norm", "grouped alibi window"])
def test_attention_is_the_sum_of_its_slices(name: str) -> None:
    config = VARIANTS[name]
    x_btd = hidden(config)
    context = make_context(config, x_btd, torch.arange(10)[None], None, None)
    whole = build(config).blocks["0"].attention
    total = torch.zeros_like(x_btd)
    for part in range(2):
        attention = Attention(config, 0)
        attention.load_state_dict(whole.state_dict())
        slice_linear(attention.qkv, 0, part, 2)
        slice_linear(attention.out, 1, part, 2)
        attention.plan = BlockPlan(first_head=part * config.heads // 2)
        total += attention(x_btd, context)
    torch.testing.assert_close(total, whole(x_btd, context), atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["learned", "grouped rotary"])
def test_feed_forward_is_the_sum_of_its_slices(name: str) -> None:
    config = replace(VARIANTS[name], bias=True)
    x_btd = hidden(config)
    whole = build(config).blocks["0"].mlp
    total = torch.zeros_like(x_btd)
    for part in range(2):
        mlp = make_mlp(config)
        mlp.load_state_dict(whole.state_dict())
        slice_linear(mlp.gate_up if config.activation == "swiglu" else mlp.up, 0, part, 2)
        slice_linear(mlp.down, 1, part, 2)
        total += mlp(x_btd)
    torch.testing.assert_close(total, whole(x_btd), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("trailing", [(), (5,)])
def test_packing_query_key_and_value_is_undone_by_unpacking(trailing: tuple[int, ...]) -> None:
    query, key, value = (torch.randn(heads * 4, *trailing) for heads in (6, 2, 2))
    packed = pack_qkv(query, key, value, head_size=4)
    assert torch.equal(packed[:12], query[:12])
    assert torch.equal(packed[12:16], key[:4])
    assert torch.equal(packed[16:20], value[:4])
    assert torch.equal(packed[20:32], query[12:])
    for part, original in zip(unpack_qkv(packed, 3, 4), (query, key, value), strict=True):
        assert torch.equal(part, original)


def test_packing_gate_and_up_is_undone_by_unpacking() -> None:
    gate, up = torch.randn(12, 5), torch.randn(12, 5)
    packed = pack_gate_up(gate, up, blocks=3)
    assert torch.equal(packed[:8], torch.cat([gate[:4], up[:4]]))
    for part, original in zip(unpack_gate_up(packed, 3), (gate, up), strict=True):
        assert torch.equal(part, original)


def test_gate_blocks_divide_the_width() -> None:
    assert gate_blocks(VARIANTS["grouped rotary"]) == 2
    assert gate_blocks(replace(VARIANTS["grouped rotary"], ffn_hidden=49)) == 1
