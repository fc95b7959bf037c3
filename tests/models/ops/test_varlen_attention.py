"""Variable-length attention over packed documents says what a mask says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from keepstep.core.errors import UsageError
from keepstep.models.attention_context import KeyValueCache
from keepstep.models.ops.varlen_attention import (
    VarlenSpans,
    cu_seqlens_of,
    flash_supports,
    flash_varlen,
    max_seqlen_of,
    varlen_attention,
)
from tests.models.model_variants import VARIANTS, build, random_tokens


def spans_of(documents_bt: torch.Tensor) -> VarlenSpans:
    cu_seqlens = cu_seqlens_of(documents_bt.numpy())
    return VarlenSpans(torch.from_numpy(cu_seqlens), max_seqlen_of(cu_seqlens, documents_bt.shape[1]))


@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4))
def test_bounds_are_where_the_number_changes_or_a_row_begins(rows: list[list[int]]) -> None:
    starts = [
        row * 7 + place
        for row, numbers in enumerate(rows)
        for place in range(7)
        if place == 0 or numbers[place] != numbers[place - 1]
    ]
    bounds = cu_seqlens_of(np.array(rows)).tolist()
    assert bounds[: len(starts)] == starts
    assert set(bounds[len(starts) :]) == {7 * len(rows)}
    assert (len(bounds) - 1).bit_count() == 1


@pytest.mark.parametrize(
    ("lengths", "tokens", "told"),
    [([1, 1], 1, 128), ([5, 27], 32, 128), ([129, 900], 4096, 1024), ([512], 4096, 512), ([2049, 7], 3000, 3000)],
)
def test_the_longest_document_is_told_in_few_different_numbers(lengths: list[int], tokens: int, told: int) -> None:
    bounds = np.cumsum([0, *lengths, 0, 0], dtype=np.int32)
    assert max_seqlen_of(bounds, tokens) == told


@pytest.mark.parametrize("window", [0, 1, 3, 7, 8, 9])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_documents_see_themselves_only(groups: int, window: int) -> None:
    torch.manual_seed(groups)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 4]])
    query = torch.randn(2, 8, 4, 16, dtype=torch.float64)
    key, value = (torch.randn(2, 8, groups, 16, dtype=torch.float64) for _ in range(2))
    distance = torch.arange(8)[:, None] - torch.arange(8)
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    allowed = (documents[:, :, None] == documents[:, None, :]) & seen
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, value)), attn_mask=allowed[:, None], enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(varlen_attention(query, key, value, spans_of(documents), window), expected)


NEWER = ("partial rotary", "norms after", "multipliers", "layers without rope", "two kinds of layers")


@pytest.mark.parametrize("name", ["learned", "grouped rotary", "query and key norm", "sliding window", *NEWER])
def test_a_model_learns_the_same_by_bounds_and_by_mask(name: str) -> None:
    model = build(VARIANTS[name])
    tokens = random_tokens(model.config, 2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 1 + [3] * 3 + [4] * 8])
    found = []
    for spans in (None, spans_of(documents)):
        model.zero_grad()
        loss = model(tokens, tokens.roll(-1, 1), documents_bt=documents, spans=spans)
        loss.backward()
        found.append((loss.item(), [parameter.grad for parameter in model.parameters()]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "grouped alibi window"])
def test_a_bias_is_not_left_out_in_silence(name: str) -> None:
    model = build(VARIANTS[name])
    documents = torch.tensor([[0] * 5 + [1] * 7])
    with pytest.raises(UsageError, match="spans of packed documents and ALiBi"):
        model(random_tokens(model.config, 1, 12), documents_bt=documents, spans=spans_of(documents))


def test_a_soft_cap_is_not_left_out_in_silence() -> None:
    model = build(VARIANTS["gemma"])
    documents = torch.tensor([[0] * 5 + [1] * 7])
    with pytest.raises(UsageError, match="spans of packed documents and soft-capped scores"):
        model(random_tokens(model.config, 1, 12), documents_bt=documents, spans=spans_of(documents))


def test_cached_tokens_are_not_left_out_in_silence() -> None:
    model = build(VARIANTS["learned"])
    cache = KeyValueCache(model.config.layers, 12)
    with pytest.raises(UsageError, match="spans of packed documents and a key-value cache"):
        model(random_tokens(model.config, 1, 12), cache=cache, spans=spans_of(torch.zeros(1, 12)))


def test_a_cpu_has_no_flash_kernel() -> None:
    assert not flash_supports(torch.device("cpu"), torch.bfloat16, 64)


def test_heads_that_the_flash_kernel_would_have_to_fill_up_are_not_for_it() -> None:
    assert not flash_supports(torch.device("cuda"), torch.bfloat16, 60)


class Calls(TorchDispatchMode):
    """What operators were told beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = (each for each in args if not isinstance(each, torch.Tensor))
        self.told[operator.name()] = (*numbers, *sorted((kwargs or {}).items()))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("window", "left", "right"), [(0, None, None), (5, 4, 0)])
def test_both_passes_of_the_kernel_are_told_of_documents_and_window(
    window: int, left: int | None, right: int | None
) -> None:
    parts = [torch.empty(64, heads, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    spans = VarlenSpans(torch.empty(3, device="meta", dtype=torch.int32), 128)
    with Calls() as calls:
        torch.autograd.backward(flash_varlen(*parts, spans, window, 0.3)[0].sum())
    expected = {"window_size_left": left, "window_size_right": right, "scale": 0.3}
    for name in ("aten::_flash_attention_forward", "aten::_flash_attention_backward"):
        told = calls.told[name]
        assert told[:4] == (128, 128, 0.0, True)
        named = dict(pair for pair in told if isinstance(pair, tuple))
        assert {key: named.get(key) for key in expected} == expected


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_compiled_blocks_see_few_kinds_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def kernel(query: torch.Tensor, _key: object, _value: object, spans: VarlenSpans, *_: object) -> torch.Tensor:
        # As the operator has it: the number goes in, and nothing is decided by it.
        return query * spans.cu_seqlens.sum() * spans.max_seqlen

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr("keepstep.models.ops.varlen_attention._plain", kernel)
    model = build(VARIANTS["grouped rotary"])
    torch._dynamo.reset()
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend=backend)
    tokens = random_tokens(model.config, 2, 24)
    for step in range(16):
        # As many numbers as rows of 16384 tokens have, and as many counts of documents.
        cu_seqlens = torch.linspace(0, 48, 1 + (1 << step % 7)).int()
        model(tokens, tokens, spans=VarlenSpans(cu_seqlens, 128 << step % 8)).backward()
    assert 1 <= len(compiled) <= 3, "torch gives up on a function after a few compilations"
    torch._dynamo.reset()
