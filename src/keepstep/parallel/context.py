"""Context parallelism: each process holds a part of every row, and attention goes round them in a ring."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from keepstep.config.schema import ModelConfig
from keepstep.data.loader import Batch
from keepstep.models.cache import KeyValueCache
from keepstep.models.documents import Bounds
from keepstep.models.masks import Context
from keepstep.models.positions import alibi_slopes, rotary_tables
from keepstep.models.transformer import Block, Transformer
from keepstep.parallel.ring import Ring, RingMasks, ring_attention


class RingContext(Context):
    """What blocks share in a forward, with what the ring needs beside."""

    __slots__ = ("documents_rbt",)

    def __init__(self, rotary: tuple[Tensor, Tensor] | None, documents_rbt: Tensor | None) -> None:
        super().__init__(mask=None, causal=True, rotary=rotary, cache=None)
        self.documents_rbt = documents_rbt


def split_rows(model: Transformer, group: dist.ProcessGroup) -> None:
    """Let a model (or a stage of one) work on parts of rows, in place. Positions must be given with every batch."""
    ring = Ring(group)
    model.make_context = partial(_ring_context, ring=ring)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention.attend = partial(_attend, config=model.config, ring=ring)


def own_part(batch: Batch, rank: int, size: int) -> Batch:
    """This process's part of a micro batch, with positions that say where in the rows (or documents) it stands."""
    if size == 1:
        return batch
    positions = row_positions(batch)

    def part(array: NDArray[np.int64]) -> NDArray[np.int64]:
        pieces = np.split(array, 2 * size, axis=1)
        return np.concatenate([pieces[rank], pieces[2 * size - 1 - rank]], axis=1)

    return Batch(
        inputs=part(batch.inputs),
        targets=part(batch.targets),
        positions=part(positions),
        documents=None if batch.documents is None else part(batch.documents),
        first_sample=batch.first_sample,
    )


def row_positions(batch: Batch) -> NDArray[np.int64]:
    """The batch's positions; where it has none those in the row, or in the document where documents are packed."""
    if batch.positions is not None:
        return batch.positions
    index = np.broadcast_to(np.arange(batch.inputs.shape[1], dtype=np.int64), batch.inputs.shape)
    if batch.documents is None:
        return index
    starts = np.zeros_like(index)
    starts[:, 1:] = np.where(batch.documents[:, 1:] != batch.documents[:, :-1], index[:, 1:], 0)
    return index - np.maximum.accumulate(starts, axis=1)


def _ring_context(
    config: ModelConfig,
    _x_btd: Tensor,
    positions_bt: Tensor,
    documents_bt: Tensor | None,
    cache: KeyValueCache | None,
    bounds: Bounds | None = None,
    *,
    ring: Ring,
) -> Context:
    assert cache is None, "decoding does not split rows"
    assert bounds is None, "the ring asks each process for its documents"
    documents_rbt = None
    if documents_bt is not None:
        everyone = [torch.empty_like(documents_bt) for _ in range(ring.size)]
        dist.all_gather(everyone, documents_bt.contiguous(), group=ring.group)
        documents_rbt = torch.stack(everyone)
    rotary = rotary_tables(config, positions_bt) if config.positions == "rotary" else None
    return RingContext(rotary, documents_rbt)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    query_btne: Tensor,
    key_btge: Tensor,
    value_btge: Tensor,
    first_head: int,
    context: Context,
    *,
    config: ModelConfig,
    ring: Ring,
) -> Tensor:
    assert isinstance(context, RingContext)
    heads = query_btne.shape[2]
    slopes_n = None
    if config.positions == "alibi":
        all_slopes = alibi_slopes(config.heads, config.alibi_bias_max, query_btne.device)
        slopes_n = all_slopes[first_head : first_head + heads]
    tokens = query_btne.shape[1] * ring.size
    window = config.sliding_window if config.sliding_window < tokens else 0
    masks = RingMasks(window, slopes_n, context.documents_rbt)
    query, key, value = (each.transpose(1, 2) for each in (query_btne, key_btge, value_btge))
    return ring_attention(query, key, value, ring, masks).transpose(1, 2)
