"""Causal attention as one operator, in torch's own operators: the kernels are held against the same in tests/gpu."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from model_variants import LLAMA, build
from torch import Tensor
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models import attention as attention_module
from keepstep.models.attention import Attention
from keepstep.models.cache import KeyValueCache
from keepstep.models.causal import attend_fused, has_kernel, project_and_attend, takes
from keepstep.models.documents import Bounds, document_bounds
from keepstep.models.kernels.attention_backward import deal_out
from keepstep.models.masks import Context, make_context
from keepstep.models.turn import split_and_turn

ROWS, TOKENS, GROUPS, QUERIES, SIZE = 2, 12, 3, 4, 8
WIDTH = GROUPS * (QUERIES + 2) * SIZE
HEADS_OF_64 = ModelConfig(**{**LLAMA, "hidden": 256, "heads": 4, "kv_heads": 2, "seq_len": 128})


def plainly(qkv: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    if tables is None:
        grouped = qkv.unflatten(-1, (GROUPS, QUERIES + 2, SIZE))
        parts = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    else:
        parts = split_and_turn(qkv, *tables, QUERIES, SIZE)
    query, key, value = (part.transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def make_tables(rows: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, TOKENS, SIZE // 2) * TOKENS
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("table_rows", [0, 1, ROWS])
def test_from_the_fused_projection_on(table_rows: int) -> None:
    torch.manual_seed(1)
    tables = make_tables(table_rows) if table_rows else None
    qkv = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    ours, theirs = attend_fused(qkv, tables, QUERIES, SIZE), plainly(qkv, tables)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, qkv, seed), torch.autograd.grad(theirs, qkv, seed), rtol=1e-4, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_with_the_projection(compiled: bool, trained: bool) -> None:
    torch.manual_seed(2)
    tables = make_tables(1)
    x = torch.randn(ROWS, TOKENS, 16, requires_grad=True)
    weight = torch.randn(WIDTH, 16).mul(0.3).requires_grad_(trained)

    def joined(x: Tensor, weight: Tensor) -> Tensor:
        return project_and_attend(x, weight, tables, QUERIES, SIZE)

    function = torch.compile(joined, backend="aot_eager", fullgraph=True) if compiled else joined
    wanted = (x, weight) if trained else (x,)
    ours, theirs = function(x, weight), plainly(F.linear(x, weight), tables)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    seed = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, wanted, seed), torch.autograd.grad(theirs, wanted, seed), rtol=1e-4, atol=1e-4
    )
    torch.compiler.reset()


@pytest.mark.parametrize("change", [{}, {"positions": "learned"}, {"clip_qkv": 0.5}, {"bias": True}])
def test_an_attention_gives_the_same_at_once(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    config = ModelConfig(**{**LLAMA, "hidden": 256, "heads": 4, "kv_heads": 2, "seq_len": 128, **change})
    attention = Attention(config, 0).bfloat16()
    x = torch.randn(2, 128, 256).bfloat16().requires_grad_()
    context = make_context(config, x, torch.arange(128).expand(2, -1), None, None)
    seed, outcomes = torch.randn_like(x), []
    for attention.at_once in (True, False):
        output = attention(x, context)
        outcomes.append([output, *torch.autograd.grad(output, [x, *attention.parameters()], seed)])
        # From here on the operator must not be needed.
        monkeypatch.setattr(attention_module, "attend_fused", None)
        monkeypatch.setattr(attention_module, "project_and_attend", None)
    for ours, theirs in zip(*outcomes, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_what_is_not_plainly_causal_goes_the_general_way() -> None:
    attention = Attention(HEADS_OF_64, 0)
    attention.at_once = True
    x = torch.zeros(1, 128, 256, dtype=torch.bfloat16)
    positions, documents = torch.arange(128)[None], torch.arange(128)[None] // 64

    starts = torch.from_numpy(document_bounds(documents.numpy()))
    bounds = Bounds(starts, 64)

    def is_one(x: Tensor, context: Context) -> bool:
        return attention._is_one(x, context)

    assert is_one(x, make_context(HEADS_OF_64, x, positions, None, None))
    assert not is_one(x, make_context(HEADS_OF_64, x, positions, documents, None))
    assert not is_one(x, make_context(HEADS_OF_64, x, positions, None, None, bounds))
    assert not is_one(x, make_context(HEADS_OF_64, x, positions, None, KeyValueCache(1, 128)))
    assert not is_one(x.float(), make_context(HEADS_OF_64, x, positions, None, None))
    assert not is_one(x[:, :127], make_context(HEADS_OF_64, x, positions[:, :127], None, None))
    attention.at_once = False
    assert not is_one(x, make_context(HEADS_OF_64, x, positions, None, None))


def test_which_attentions_may_be_computed_at_once() -> None:
    block = build(ModelConfig(**LLAMA)).blocks["0"]
    assert block.attention.may_attend_at_once()
    block.attention.attend = lambda *_: torch.zeros(1)
    assert not block.attention.may_attend_at_once()
    block.attention.attend = attention_module.attend
    block.keep_products_apart()  # type: ignore[operator]
    assert not block.attention.may_attend_at_once()
    assert not Attention(ModelConfig(**{**LLAMA, "qk_norm": True}), 0).may_attend_at_once()


def test_what_the_kernels_take() -> None:
    assert takes(256, 64, torch.bfloat16)
    assert not takes(192, 64, torch.bfloat16)
    assert not takes(0, 64, torch.bfloat16)
    assert not takes(256, 128, torch.bfloat16)
    assert not takes(256, 64, torch.float16)
    assert not has_kernel(torch.device("cpu"))


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (3, 5), (64, 32), (64, 4), (8, 64)])
def test_work_is_dealt_out_whole_and_evenly(heads: int, blocks: int) -> None:
    lists = deal_out(heads, blocks, 132)
    assert Counter(piece for pieces in lists for piece in pieces) == Counter(range(heads * blocks))
    ends = [sum(blocks - piece % blocks for piece in pieces) for pieces in lists]
    # Nobody waits longer for the last one than a long piece takes.
    assert max(ends) - sum(ends) / len(ends) <= blocks
