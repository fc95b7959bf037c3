"""Starting the kernel of turned.cu: the projection to queries, keys and values, turned by positions on the way out.

Shape legend: m tokens, k hidden, n rows of the fused projection, g key-value heads, r query heads a key-value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepstep.models.kernels.proof import relative_difference, works
from keepstep.models.kernels.tiles import COLUMNS, fits, right_map, start
from keepstep.models.positions import rotate

_HEAD_SIZE = 64


def joins(x_mk: Tensor, rows: int, head_size: int) -> bool:
    """Whether the kernel takes this projection."""
    m, k = x_mk.shape
    shape = head_size == _HEAD_SIZE and rows % COLUMNS == 0
    return shape and fits(m, k, rows, x_mk) and works("turned", x_mk.device, _proof)


def turned(
    x_mk: Tensor, weight_nk: Tensor, cosines: Tensor, sines: Tensor, queries_per_group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [m, g·r·64], keys and values [m, g·64]; tables of fp32 are for the first tokens, or for all of them."""
    m, n = x_mk.shape[0], weight_nk.shape[0]
    groups = n // _HEAD_SIZE // (queries_per_group + 2)
    query = x_mk.new_empty((m, groups * queries_per_group * _HEAD_SIZE))
    key, value = (x_mk.new_empty((m, groups * _HEAD_SIZE)) for _ in range(2))
    others = (right_map(weight_nk), query, key, value, cosines, sines)
    table_rows = cosines.numel() // (_HEAD_SIZE // 2)
    start("turned", "turned", x_mk, others, n // COLUMNS, table_rows, queries_per_group, groups)
    return query, key, value


def _proof(device: torch.device) -> float:
    """At a size that gives each pair of blocks several tiles, and steps that pieces do not divide."""
    random = torch.Generator(device).manual_seed(1)
    rows, tokens, k, groups, queries = 18, 512, 576, 4, 4
    x_btk = torch.randn(rows, tokens, k, device=device, generator=random).bfloat16()
    weight = torch.randn(groups * (queries + 2) * _HEAD_SIZE, k, device=device, generator=random) * k**-0.5
    angle = torch.rand(1, tokens, _HEAD_SIZE // 2, device=device, generator=random) * tokens
    cos, sin = angle.cos(), angle.sin()
    ours = turned(x_btk.flatten(0, 1), weight.bfloat16(), cos, sin, queries)
    heads = torch.matmul(x_btk, weight.bfloat16().t()).unflatten(-1, (groups, queries + 2, _HEAD_SIZE))
    expected = rotate(heads[..., :-2, :], cos, sin), rotate(heads[..., -2, :], cos, sin), heads[..., -1, :]
    return relative_difference(ours, [part.flatten(2).flatten(0, 1) for part in expected])
