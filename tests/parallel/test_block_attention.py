"""Blocks of attention, merged, are attention; their gradients add up. Fused kernels and plain products agree."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from keepstep.parallel.block_attention import Block, BlockMask, _kernel, _slices, attend_block, block_gradients

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def tensors(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 64, 16, generator=generator).to(device, dtype) for _ in range(4)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_a_whole_block_is_attention(device: str, dtype: torch.dtype, causal: bool) -> None:
    query, key, value, grad = tensors(device, dtype)
    mask = BlockMask(0 if causal else 64, None, None, None, 0)
    wanted = [each.float().requires_grad_() for each in (query, key, value)]
    expected = F.scaled_dot_product_attention(*wanted, is_causal=causal)
    expected.backward(grad.float())
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for block in (Block(query, key, value, causal, None), Block(query, key, value, causal, mask)):
        mixed, lse = attend_block(block)
        torch.testing.assert_close(mixed, expected.detach(), rtol=tolerance, atol=tolerance)
        assert lse.shape == (2, 4, 64)
        for found, leaf in zip(block_gradients(block, mixed, lse, grad), wanted, strict=True):
            torch.testing.assert_close(found, leaf.grad, rtol=tolerance, atol=tolerance)


def test_kernels_are_fused_where_they_can_be() -> None:
    query, key, value, _ = tensors("cpu", torch.float32)
    assert _kernel(Block(query, key, value, True, None)) == "cpu"
    assert _kernel(Block(query, key, value, True, BlockMask(0, None, None, None, 8))) == "plain"


def test_queries_with_nothing_to_attend_to_give_zero_and_no_gradient() -> None:
    query, key, value, grad = tensors("cpu", torch.float32)
    documents = torch.zeros(2, 64, dtype=torch.int64)
    mask = BlockMask(64, None, documents, documents + 1, 0)
    block = Block(query, key, value, False, mask)
    mixed, lse = attend_block(block)
    assert not mixed.any()
    assert bool((lse == -math.inf).all())
    whole_row_lse = torch.zeros(2, 4, 64)
    assert not any(part.any() for part in block_gradients(block, mixed, whole_row_lse, grad))


@pytest.mark.parametrize("window", [1, 100, 700])
def test_keys_outside_of_a_window_are_left_out(window: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value, grad = (torch.randn(1, 2, 1000, 16, generator=generator) for _ in range(4))
    distance = torch.arange(1000)[:, None] - torch.arange(1000)
    wanted = [each.clone().requires_grad_() for each in (query, key, value)]
    allowed = (distance >= 0) & (distance < window)
    expected = F.scaled_dot_product_attention(*wanted, attn_mask=allowed)
    expected.backward(grad)
    mask = BlockMask(0, None, None, None, window)
    block = Block(query, key, value, False, mask)
    mixed, lse = attend_block(block)
    torch.testing.assert_close(mixed, expected.detach(), rtol=1e-5, atol=1e-5)
    for found, leaf in zip(block_gradients(block, mixed, lse, grad), wanted, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-4, atol=1e-5)
    computed = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in _slices(block))
    assert int(allowed.sum()) <= computed <= 1000 * (window + 512)
