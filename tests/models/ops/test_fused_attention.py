"""Causal attention as one operator, in torch's own operators: the kernels are compared with the same in tests/gpu."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models import attention as attention_module
from keepstep.models.attention import Attention
from keepstep.models.attention_context import Context, KeyValueCache, make_context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.kernels.attention_backward import schedule_items, supports
from keepstep.models.ops.fused_attention import fused_attention, has_kernel, qkv_fused_attention
from keepstep.models.ops.rope import split_apply_rope
from keepstep.models.ops.varlen_attention import VarlenSpans, cu_seqlens_of
from tests.models.model_variants import LLAMA

ROWS, TOKENS, GROUPS, QUERIES, SIZE = 2, 12, 3, 4, 8
WIDTH = GROUPS * (QUERIES + 2) * SIZE
HEADS_OF_64 = ModelConfig(**{**LLAMA, "hidden": 256, "heads": 4, "kv_heads": 2, "seq_len": 128})


def plainly(qkv: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    if tables is None:
        grouped = qkv.unflatten(-1, (GROUPS, QUERIES + 2, SIZE))
        parts = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    else:
        parts = split_apply_rope(qkv, *tables, QUERIES, SIZE)
    query, key, value = (part.transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def make_tables(rows: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, TOKENS, SIZE // 2) * TOKENS
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("table_rows", [0, 1, ROWS])
def test_fused_attention_matches_plain_attention(table_rows: int) -> None:
    torch.manual_seed(1)
    tables = make_tables(table_rows) if table_rows else None
    qkv = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    ours, theirs = fused_attention(qkv, tables, QUERIES, SIZE), plainly(qkv, tables)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, qkv, seed), torch.autograd.grad(theirs, qkv, seed), rtol=1e-4, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_qkv_fused_attention_matches_plain_attention(compiled: bool, trained: bool) -> None:
    torch.manual_seed(2)
    tables = make_tables(1)
    x = torch.randn(ROWS, TOKENS, 16, requires_grad=True)
    weight = torch.randn(WIDTH, 16).mul(0.3).requires_grad_(trained)

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return qkv_fused_attention(x, weight, tables, QUERIES, SIZE)

    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    wanted = (x, weight) if trained else (x,)
    ours, theirs = function(x, weight), plainly(F.linear(x, weight), tables)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    seed = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, wanted, seed), torch.autograd.grad(theirs, wanted, seed), rtol=1e-4, atol=1e-4
    )
    torch.compiler.reset()


@pytest.mark.parametrize(
    "change",
    [
        {}, {"positions": "learned"}, {"clip_qkv": 0.5}, {"bias": True}, {"qk_norm": True},
        {"qk_norm": True, "head_qk_norm": False}, {"partial_rotary_factor": 0.5}, {"qk_norm": True, "kv_heads": 4},
    ],
)  # fmt: skip
def test_attention_gives_the_same_fused(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    config = ModelConfig(**{**LLAMA, "hidden": 256, "heads": 4, "kv_heads": 2, "seq_len": 128, **change})
    attention = Attention(config, 0).bfloat16()
    x = torch.randn(2, 128, 256).bfloat16().requires_grad_()
    context = make_context(config, x, torch.arange(128).expand(2, -1), None, None)
    seed, outcomes = torch.randn_like(x), []
    for fused in (True, False):
        attention.plan = BlockPlan(fused_attention=fused)
        output = attention(x, context)
        outcomes.append([output, *torch.autograd.grad(output, [x, *attention.parameters()], seed)])
        # From here on the operator must not be needed.
        monkeypatch.setattr(attention_module, "fused_attention", None)
        monkeypatch.setattr(attention_module, "qkv_fused_attention", None)
        monkeypatch.setattr(attention_module, "heads_attention", None)
    for ours, theirs in zip(*outcomes, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_only_plain_causal_attention_is_fused() -> None:
    attention = Attention(HEADS_OF_64, 0)
    attention.plan = BlockPlan(fused_attention=True)
    x = torch.zeros(1, 128, 256, dtype=torch.bfloat16)
    positions, documents = torch.arange(128)[None], torch.arange(128)[None] // 64

    starts = torch.from_numpy(cu_seqlens_of(documents.numpy()))
    spans = VarlenSpans(starts, 64)

    def is_fused(x: Tensor, context: Context) -> bool:
        return attention._fuses_attention(x, context)

    assert is_fused(x, make_context(HEADS_OF_64, x, positions, None, None))
    assert not is_fused(x, make_context(HEADS_OF_64, x, positions, documents, None))
    assert not is_fused(x, make_context(HEADS_OF_64, x, positions, None, None, spans))
    assert not is_fused(x, make_context(HEADS_OF_64, x, positions, None, KeyValueCache(1, 128)))
    assert not is_fused(x.float(), make_context(HEADS_OF_64, x, positions, None, None))
    assert not is_fused(x[:, :127], make_context(HEADS_OF_64, x, positions[:, :127], None, None))
    attention.plan = BlockPlan()
    assert not is_fused(x, make_context(HEADS_OF_64, x, positions, None, None))


def test_attention_with_sinks_is_not_fused() -> None:
    assert Attention(ModelConfig(**{**LLAMA, "qk_norm": True}), 0).can_fuse_attention()
    assert not Attention(ModelConfig(**{**LLAMA, "attention_sinks": True}), 0).can_fuse_attention()


def test_sizes_that_the_kernels_support() -> None:
    assert supports(256, 64, torch.bfloat16)
    assert not supports(192, 64, torch.bfloat16)
    assert not supports(0, 64, torch.bfloat16)
    assert supports(256, 128, torch.bfloat16)
    assert not supports(256, 96, torch.bfloat16)
    assert not supports(256, 64, torch.float16)
    assert not has_kernel(torch.device("cpu"), 64)


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (3, 5), (64, 32), (64, 4), (8, 64)])
def test_work_is_dealt_out_whole_and_evenly(heads: int, blocks: int) -> None:
    lists = schedule_items(heads, blocks, 132)
    assert Counter(piece for pieces in lists for piece in pieces) == Counter(range(heads * blocks))
    ends = [sum(blocks - piece % blocks for piece in pieces) for pieces in lists]
    # Nobody waits longer for the last one than a long piece takes.
    assert max(ends) - sum(ends) / len(ends) <= blocks
