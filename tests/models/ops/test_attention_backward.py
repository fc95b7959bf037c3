"""The backward kernel of attention in an emulator: its CUDA C++ for the CPU, with Hopper's instructions as functions.

The passes around it are torch's own operators here; tests/gpu runs all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from keepstep.models.kernels.attention_backward import THREADS, SavedAttention, backward_files, kernel_source
from keepstep.models.kernels.attention_schedule import KEYS, QUERIES, item_costs, item_order, schedule_items
from keepstep.models.ops.fused_attention import ScoreRule, _backward_by_torch, attention_forward
from tests.models.ops.emulator import Emulator, emulated_map
from tests.models.ops.test_fused_attention import rule_of

PROCESSORS = 2
GROUPS, HEADS = 2, 4
LOG2_E, LARGEST_SUM = 1.4426950408889634, 2.0**30


@pytest.fixture(scope="module")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], Emulator]:
    """By head size, and masked or not."""
    headers = ["emulated_hopper.h", "emulated_attention.h"]
    return {
        (size, masked): Emulator(
            tmp_path_factory.mktemp(f"heads_of_{size}_{masked}"),
            headers,
            kernel_source(backward_files(size), size, masked, size**-0.5),
            ["attention_backward"],
            THREADS[size],
        )
        for size in (64, 128)
        for masked in (False, True)
    }


def in_pieces(numbers_bnt: Tensor, others_bnt: Tensor) -> Tensor:
    """Two numbers of each query as the kernel reads them: 64 of the first, then 64 of the second."""
    pair = [numbers.unflatten(2, (-1, QUERIES)) for numbers in (numbers_bnt, others_bnt)]
    return torch.stack(pair, dim=3).float().contiguous()


def query_gradients(sums: Tensor, inverse_bnt: Tensor, size: int) -> Tensor:
    """From the order that threads have them in: eights of columns, warp, row, lane of 4, upper and lower row, pair."""
    b, n, t = inverse_bnt.shape
    placed = sums.view(b, n, t // QUERIES, size // 8, 4, 8, 4, 2, 2).permute(0, 1, 2, 4, 7, 5, 3, 6, 8)
    return placed.reshape(b, n, t, size) * (inverse_bnt * size**-0.5)[..., None]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("lengths", "window"), [((384,), 0), ((1, 129, 254), 0), ((384,), 100), ((200, 60, 124), 64)])
@pytest.mark.slow
def test_attention_backward_matches_torch(
    emulators: dict[tuple[int, bool], Emulator], size: int, lengths: tuple[int, ...], window: int
) -> None:
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    masked = len(lengths) > 1 or window > 0
    check_gradients(emulators[size, masked], rule_of(documents, window), documents.shape, HEADS, size, masked)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("rows", "tokens", "heads"), [(8, 128, 2), (3, 256, 2)])
@pytest.mark.slow
def test_short_items_wait_for_warpgroups_that_rest(
    emulators: dict[tuple[int, bool], Emulator], rows: int, tokens: int, heads: int, size: int, masked: bool
) -> None:
    """Blocks go through many items of two or four pieces: memory is written again soon after its last use."""
    emulator = emulators[size, masked]
    rule = rule_of(torch.arange(rows)[:, None].expand(rows, tokens).contiguous(), 0)
    try:
        for seed in (1, 2, 3):
            emulator.rest_at_random(seed)
            check_gradients(emulator, rule, (rows, tokens), heads, size, masked)
    finally:
        emulator.rest_at_random(0)


def check_gradients(
    emulator: Emulator, rule: ScoreRule, shape: Sequence[int], heads: int, size: int, masked: bool
) -> None:
    """Those of random numbers in rows × tokens, by the kernel and by torch."""
    b, t = shape
    torch.manual_seed(size)
    query, gradient = (torch.randn(b, t, heads, size).bfloat16() for _ in range(2))
    key, value = (torch.randn(b, t, GROUPS, size).bfloat16() for _ in range(2))
    attn_out, lse = attention_forward(query, key, value, rule.cu_seqlens, rule.first_key_bt)
    saved = SavedAttention(query, key, value, attn_out, lse)
    delta_bnt = (gradient.float() * attn_out.float()).sum(-1).transpose(1, 2)
    bound = gradient.float().norm(dim=-1).max() * value.float().norm(dim=-1).max() * key.float().abs().max()
    scale_bnt = torch.full_like(lse, LARGEST_SUM / bound.item())
    assert rule.query_ends_bk is not None
    costs = item_costs(rule.query_ends_bk, GROUPS)
    lists = schedule_items(item_order(costs, t // KEYS).tolist(), costs.tolist(), PROCESSORS)
    width = len(costs) + 1
    query_sums = torch.zeros(b, heads, t, size, dtype=torch.int32)
    fused = torch.full((b, t, GROUPS, heads // GROUPS + 2, size), float("nan")).bfloat16()
    maps = [
        emulated_map(x, (x.shape[2] * size, b * t), (x.shape[2] * size,), (64, rows))
        for x, rows in ((query, QUERIES), (gradient, QUERIES), (key, KEYS), (value, KEYS))
    ]
    emulator.launch(
        "attention_backward", PROCESSORS, *maps, in_pieces(lse * LOG2_E, -delta_bnt),
        in_pieces(scale_bnt, 1 / scale_bnt), query_sums, fused, None, None,
        torch.tensor([[*items, *[-1] * (width - len(items))] for items in lists], dtype=torch.int32), width,
        *((rule.first_key_bt, rule.query_ends_bk) if masked else (None, None)), t, t, heads, GROUPS,
    )  # fmt: skip
    expected = _backward_by_torch(gradient, saved, None, rule.first_key_bt).view_as(fused).float()
    found = fused.float()
    by_query = query_gradients(query_sums, 1 / scale_bnt, size).transpose(1, 2)
    found[..., :-2, :] = by_query.unflatten(2, (GROUPS, -1))
    for place in (slice(0, -2), slice(-2, -1), slice(-1, None)):
        one, other = found[..., place, :], expected[..., place, :]
        assert (one - other).norm() < 1e-2 * other.norm()
        assert ((one - other).norm(dim=-1) < 0.1 * other.norm(dim=-1) + 0.03 * other.norm(dim=-1).mean()).all()
