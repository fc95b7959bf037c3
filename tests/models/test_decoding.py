"""Decoding with a cache gives what one forward over all tokens gives; packed documents do not see each other."""

from __future__ import annotations

import pytest
import torch

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import UsageError
from keepstep.models.attention_context import KeyValueCache, SlotCache
from keepstep.models.positions import document_positions
from tests.models.model_variants import VARIANTS, build, random_tokens


@torch.no_grad()
@pytest.mark.parametrize("steps", [[8] + [1] * 12, [1] * 20, [5, 1, 9, 1, 4], [20]], ids=str)
def test_incremental_decoding_equals_the_full_forward(variant: ModelConfig, steps: list[int]) -> None:
    model = build(variant).eval()
    tokens_bt = random_tokens(variant, 2, 20)
    cache = KeyValueCache(variant.layers, capacity=24)
    pieces = [model(piece_bt, cache=cache) for piece_bt in tokens_bt.split(steps, dim=1)]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens_bt), atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_of_different_lengths_decode_as_they_do_alone(variant: ModelConfig) -> None:
    model = build(variant).eval()
    tokens_bt, lengths = random_tokens(variant, 3, 20), [12, 3, 7]
    cache = SlotCache(variant.layers, rows=4, capacity=24, device=torch.device("cpu"))
    # The third row is filled later, and the slot in the middle stays empty.
    rows = torch.tensor([3, 0, 2])
    for slots, sources in ((rows[:2], [0, 1]), (rows[2:], [2])):
        cache.fill(slots, torch.arange(len(sources)), torch.full((len(sources),), 20))
        model(tokens_bt[sources, : max(lengths[source] for source in sources)], cache=cache, last_only=True)
    cache.lengths_b[rows] = torch.tensor(lengths)
    for _ in range(8):
        cache.decode(window=24 if cache.lengths_b.max() > 15 else 16)
        tokens_b1 = torch.zeros(4, 1, dtype=torch.int64)
        tokens_b1[rows] = tokens_bt.gather(1, cache.lengths_b[rows][:, None])
        found_bv = model(tokens_b1, cache=cache)[rows, -1]
        expected_bv = model(tokens_bt)[torch.arange(3), cache.lengths_b[rows]]
        torch.testing.assert_close(found_bv, expected_bv, atol=2e-5, rtol=1e-5)
        cache.lengths_b[rows] += 1
    # Two rows go on from what they hold, the first one from an earlier token; the second has padding behind it.
    cache.lengths_b[rows[:2]] = torch.tensor([9, 11])
    new_bt = torch.stack([tokens_bt[0, 9:18], torch.cat([tokens_bt[1, 11:15], torch.zeros(5, dtype=torch.int64)])])
    cache.extend(rows[:2], longest=18, window=24)
    found_btv, expected_btv = model(new_bt, cache=cache), model(tokens_bt)
    torch.testing.assert_close(found_btv[0], expected_btv[0, 9:18], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found_btv[1, :4], expected_btv[1, 11:15], atol=2e-5, rtol=1e-5)
    cache.lengths_b[rows[:2]] = torch.tensor([18, 15])
    cache.decode(window=24)
    tokens_b1 = torch.zeros(4, 1, dtype=torch.int64)
    tokens_b1[rows[:2], 0] = tokens_bt[torch.arange(2), torch.tensor([18, 15])]
    found_bv = model(tokens_b1, cache=cache)[rows[:2], -1]
    torch.testing.assert_close(found_bv, expected_btv[torch.arange(2), torch.tensor([18, 15])], atol=2e-5, rtol=1e-5)


def test_more_tokens_than_there_is_room_for_is_an_error() -> None:
    model = build(VARIANTS["learned"])
    with pytest.raises(UsageError, match="holds 0 of 4 tokens and 5 more"):
        model(random_tokens(model.config, 1, 5), cache=KeyValueCache(2, capacity=4))
    with pytest.raises(UsageError, match="25 tokens are more than the 24 learned positions"):
        model(random_tokens(model.config, 1, 25))


@torch.no_grad()
def test_packed_documents_equal_separate_rows(variant: ModelConfig) -> None:
    model = build(variant).eval()
    lengths = [9, 1, 8, 6]
    tokens_bt = random_tokens(variant, 2, sum(lengths))
    number_t = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    packed = model(tokens_bt, documents_bt=number_t.expand(2, -1))
    separate = torch.cat([model(document_bt) for document_bt in tokens_bt.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, atol=2e-5, rtol=1e-5)


def test_positions_start_again_with_each_document() -> None:
    documents_bt = torch.tensor([[3, 3, 3, 7, 7, 3], [0, 1, 1, 1, 1, 0]])
    expected_bt = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 0]])
    assert torch.equal(document_positions(documents_bt), expected_bt)


@torch.no_grad()
def test_given_positions_are_used() -> None:
    model = build(VARIANTS["grouped rotary"])
    tokens_bt = random_tokens(model.config, 2, 10)
    shifted = model(tokens_bt, positions_bt=torch.arange(100, 110).expand(2, -1))
    # Rotary attention sees distances only; stretching them changes it.
    torch.testing.assert_close(shifted, model(tokens_bt), atol=2e-5, rtol=1e-4)
    stretched = model(tokens_bt, positions_bt=5 * torch.arange(10).expand(2, -1))
    assert not torch.allclose(stretched, model(tokens_bt), atol=1e-4)


@torch.no_grad()
def test_no_token_sees_the_future(variant: ModelConfig) -> None:
    model = build(variant).eval()
    tokens_bt = random_tokens(variant, 1, 20)
    changed_bt = tokens_bt.clone()
    changed_bt[:, 12:] = random_tokens(variant, 1, 8, seed=9)
    torch.testing.assert_close(model(tokens_bt)[:, :12], model(changed_bt)[:, :12], atol=1e-5, rtol=1e-5)
