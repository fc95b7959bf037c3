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
from keepstep.models.kernels import attention_backward
from keepstep.models.kernels.attention_backward import SavedAttention, supports
from keepstep.models.kernels.attention_schedule import (
    KEYS,
    BlockMask,
    item_costs,
    item_order,
    make_block_mask,
    plain_lists,
    schedule_items,
)
from keepstep.models.kernels.attention_schedule import (
    QUERIES as STEP,
)
from keepstep.models.ops import fused_attention as fused_attention_module
from keepstep.models.ops.fused_attention import (
    ScoreRule,
    _backward_by_torch,
    attention_forward,
    fused_attention,
    has_kernel,
    qkv_fused_attention,
)
from keepstep.models.ops.rope import split_apply_rope
from keepstep.models.ops.varlen_attention import VarlenSpans, cu_seqlens_of
from tests.models.model_variants import LLAMA

ROWS, TOKENS, GROUPS, QUERIES, SIZE = 2, 12, 3, 4, 8
WIDTH = GROUPS * (QUERIES + 2) * SIZE
HEADS_OF_64 = ModelConfig(**{**LLAMA, "hidden": 256, "heads": 4, "kv_heads": 2, "seq_len": 128})


def plainly(
    qkv: Tensor, tables: tuple[Tensor, Tensor] | None, visible: Tensor | None = None, scale: float | None = None
) -> Tensor:
    if tables is None:
        grouped = qkv.unflatten(-1, (GROUPS, QUERIES + 2, SIZE))
        parts = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    else:
        parts = split_apply_rope(qkv, *tables, QUERIES, SIZE)
    query, key, value = (part.transpose(1, 2) for part in parts)
    attn_out = F.scaled_dot_product_attention(
        query, key, value, visible, is_causal=visible is None, scale=scale, enable_gqa=True
    )
    return attn_out.transpose(1, 2).flatten(2)


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


def visible_pairs(documents: Tensor, window: int) -> Tensor:
    """Whether a query sees a key, [b, 1, t, s], said pair by pair."""
    distance = torch.arange(documents.shape[1])[:, None] - torch.arange(documents.shape[1])
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    return ((documents[:, :, None] == documents[:, None, :]) & seen)[:, None]


def rule_of(documents: Tensor, window: int, scale: float | None = None) -> ScoreRule:
    cu_seqlens = torch.from_numpy(cu_seqlens_of(documents.numpy()))
    mask = make_block_mask(cu_seqlens, *documents.shape, window, GROUPS)
    return ScoreRule(scale, window, documents.shape[1], cu_seqlens, *mask)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [0, 1, 5, TOKENS])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.slow
def test_fused_attention_stays_in_documents_and_windows(window: int, scale: float | None, compiled: bool) -> None:
    torch.manual_seed(1)
    tables, documents = make_tables(ROWS), torch.tensor([[0] * 1 + [1] * 4 + [2] * 7, [3] * TOKENS])
    rule = rule_of(documents, window, scale)
    qkv = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    way = torch.compile(fused_attention, backend="aot_eager", fullgraph=True) if compiled else fused_attention
    ours = way(qkv, tables, QUERIES, SIZE, rule)
    theirs = plainly(qkv, tables, visible_pairs(documents, window), scale)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, qkv, seed), torch.autograd.grad(theirs, qkv, seed), rtol=1e-4, atol=1e-5
    )
    torch.compiler.reset()


def random_documents(rows: int, tokens: int, most: int) -> Tensor:
    return torch.randint(0, most, (rows, tokens)).sort(dim=1).values


@pytest.mark.parametrize("window", [0, 1, 100, 128, 129, 500, 1024])
@pytest.mark.parametrize("most", [1, 3, 12, 1024])
def test_block_mask_holds_every_visible_pair_and_no_hidden_step(window: int, most: int) -> None:
    torch.manual_seed(most)
    documents = random_documents(3, 1024, most)
    visible = visible_pairs(documents, window)[:, 0]
    mask: BlockMask = rule_of(documents, window)[-3:]  # type: ignore[assignment]
    first_key_bt, query_ends_bk, _ = mask
    assert torch.equal(first_key_bt.long(), visible.int().argmax(-1))
    steps = visible.view(3, 1024 // STEP, STEP, 1024 // KEYS, KEYS).any(4).any(2)
    for row in range(3):
        for block in range(1024 // KEYS):
            seen = steps[row, :, block].nonzero().flatten().tolist()
            assert seen == list(range(2 * block, int(query_ends_bk[row, block])))


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
        {"qk_norm": True, "positions": "learned"}, {"qk_norm": True, "norm": "rmsnorm_1p"},
        {"head_dim": 96}, {"head_dim": 96, "qk_norm": True}, {"head_dim": 96, "positions": "learned"},
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
        monkeypatch.setattr(attention_module, "normed_attention", None)
    for ours, theirs in zip(*outcomes, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(
    "change", [{}, {"qk_norm": True}, {"attention_multiplier": 0.3}, {"sliding_window": 40}, {"head_dim": 96}]
)
@pytest.mark.parametrize("packed", [True, False])
def test_attention_gives_the_same_fused_in_packed_documents(change: dict[str, object], packed: bool) -> None:
    torch.manual_seed(4)
    config = ModelConfig(**{**LLAMA, "hidden": 256, "heads": 4, "kv_heads": 2, "seq_len": 128, **change})
    attention = Attention(config, 0).bfloat16()
    x = torch.randn(2, 128, 256).bfloat16().requires_grad_()
    documents = random_documents(2, 128, 5) if packed else torch.zeros(2, 128, dtype=torch.int64)
    spans = VarlenSpans(torch.from_numpy(cu_seqlens_of(documents.numpy())), 128, fused=True, whole_rows=not packed)
    context = make_context(config, x, torch.arange(128).expand(2, -1), None, None, spans)
    needs_mask = packed or config.sliding_window > 0
    assert (context.block_mask is not None) == (context.spans is not None) == needs_mask
    seed, outcomes = torch.randn_like(x), []
    for fused in (True, False):
        attention.plan = BlockPlan(fused_attention=fused)
        assert (attention._fused_rule(x, context) is not None) == fused
        output = attention(x, context)
        outcomes.append([output, *torch.autograd.grad(output, [x, *attention.parameters()], seed)])
    for ours, theirs in zip(*outcomes, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_only_supported_attention_is_fused() -> None:
    attention = Attention(HEADS_OF_64, 0)
    attention.plan = BlockPlan(fused_attention=True)
    x = torch.zeros(1, 128, 256, dtype=torch.bfloat16)
    positions, documents = torch.arange(128)[None], torch.arange(128)[None] // 64

    starts = torch.from_numpy(cu_seqlens_of(documents.numpy()))
    spans = VarlenSpans(starts, 64)

    def is_fused(x: Tensor, context: Context) -> bool:
        return attention._fused_rule(x, context) is not None

    assert is_fused(x, make_context(HEADS_OF_64, x, positions, None, None))
    assert not is_fused(x, make_context(HEADS_OF_64, x, positions, documents, None))
    assert not is_fused(x, make_context(HEADS_OF_64, x, positions, None, None, spans))
    assert is_fused(x, make_context(HEADS_OF_64, x, positions, None, None, spans._replace(fused=True)))
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
    assert supports(256, 96, torch.bfloat16)
    assert not supports(256, 80, torch.bfloat16)
    assert not supports(256, 100, torch.bfloat16)
    assert not supports(256, 192, torch.bfloat16)
    assert not supports(256, 64, torch.float16)
    assert not has_kernel(torch.device("cpu"), 64)


@pytest.mark.parametrize("size", [96, 112])
@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("window", [0, 5])
def test_padded_heads_have_the_gradient_of_their_own_size(
    size: int, scale: float | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(6)
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * TOKENS])
    mask = BlockMask(*rule_of(documents, window)[-3:])
    query, seed = (torch.randn(ROWS, TOKENS, 2 * GROUPS, size) for _ in range(2))
    key, value = (torch.randn(ROWS, TOKENS, GROUPS, size) for _ in range(2))
    attn_out, lse = attention_forward(query, key, value, None, mask.first_key_bt, scale=scale)
    saved = SavedAttention(query, key, value, attn_out, lse, scale)
    widths = []

    def kernels(gradient: Tensor, wide: SavedAttention, tables: None, mask: BlockMask) -> Tensor:
        widths.append(
            {part.shape[3] for part in (gradient, wide.query_btne, wide.key_btge, wide.value_btge, wide.attn_out_btne)}
        )
        return _backward_by_torch(gradient, wide, tables, mask.first_key_bt)

    monkeypatch.setattr(attention_backward, "attention_backward_kernels", kernels)
    ours = attention_backward._with_padded_heads(seed, saved, mask)
    assert widths == [{128}]
    torch.testing.assert_close(ours, _backward_by_torch(seed, saved, None, mask.first_key_bt), rtol=1e-4, atol=1e-5)


def test_padded_heads_replace_the_deterministic_flash_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fused_attention_module, "is_hopper", lambda _: True)
    monkeypatch.setattr(fused_attention_module, "works", lambda name, *_: bool(asked.append(name)) or True)
    gpu = torch.device("cuda")
    assert not has_kernel(gpu, 96)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert has_kernel(gpu, 96, masked=True)
    assert not has_kernel(gpu, 80)
    assert asked == ["attention_96_masked"]


@pytest.mark.parametrize(("rows", "groups", "blocks"), [(1, 1, 1), (1, 3, 5), (8, 8, 32), (64, 1, 4), (2, 4, 64)])
def test_work_is_dealt_out_whole_and_evenly(rows: int, groups: int, blocks: int) -> None:
    lists = plain_lists(rows, groups, blocks * KEYS, 132)
    assert Counter(piece for pieces in lists for piece in pieces) == Counter(range(rows * groups * blocks))
    ends = [sum(blocks - piece % blocks for piece in pieces) for pieces in lists]
    # Nobody waits longer for the last one than a long piece takes.
    assert max(ends) - sum(ends) / len(ends) <= blocks


@pytest.mark.parametrize("most", [1, 2, 10, 100])
def test_work_of_packed_documents_is_dealt_out_evenly(most: int) -> None:
    torch.manual_seed(most)
    rule = rule_of(random_documents(8, 4096, most), 0)
    assert rule.query_ends_bk is not None
    costs = item_costs(rule.query_ends_bk, 8)
    order = item_order(costs, 4096 // KEYS)
    lists = schedule_items(order.tolist(), costs.tolist(), 132)
    assert sorted(order.tolist()) == list(range(len(costs)))
    ends = [int(costs[pieces].sum()) for pieces in lists]
    assert max(ends) < 1.1 * sum(ends) / len(ends)
