"""Bounds of packed documents say what a mask says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_variants import VARIANTS, build, random_tokens

from keepstep.models.documents import attend_documents, document_bounds


@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4))
def test_bounds_are_where_the_number_changes_or_a_row_begins(rows: list[list[int]]) -> None:
    starts = [
        row * 7 + place
        for row, numbers in enumerate(rows)
        for place in range(7)
        if place == 0 or numbers[place] != numbers[place - 1]
    ]
    bounds = document_bounds(np.array(rows)).tolist()
    assert bounds[: len(starts)] == starts
    assert set(bounds[len(starts) :]) == {7 * len(rows)}
    assert (len(bounds) - 1).bit_count() == 1


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_documents_see_themselves_only(groups: int) -> None:
    torch.manual_seed(groups)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 4]])
    query = torch.randn(2, 8, 4, 16, dtype=torch.float64)
    key, value = (torch.randn(2, 8, groups, 16, dtype=torch.float64) for _ in range(2))
    allowed = (documents[:, :, None] == documents[:, None, :]) & torch.ones(8, 8, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, value)), attn_mask=allowed[:, None], enable_gqa=True
    ).transpose(1, 2)
    bounds = torch.from_numpy(document_bounds(documents.numpy()))
    assert torch.allclose(attend_documents(query, key, value, bounds), expected)


@pytest.mark.parametrize("name", ["learned", "grouped rotary", "query and key norm"])
def test_a_model_learns_the_same_by_bounds_and_by_mask(name: str) -> None:
    model = build(VARIANTS[name])
    tokens = random_tokens(model.config, 2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 1 + [3] * 3 + [4] * 8])
    found = []
    for bounds in (None, torch.from_numpy(document_bounds(documents.numpy()))):
        model.zero_grad()
        loss = model(tokens, tokens.roll(-1, 1), documents_bt=documents, document_bounds=bounds)
        loss.backward()
        found.append((loss.item(), [parameter.grad for parameter in model.parameters()]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
