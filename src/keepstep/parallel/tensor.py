"""Tensor parallelism with sequence parallelism: matrices are split, and between them each process keeps part of a row.

Shape legend: b rows, t tokens of a row on this context rank, d hidden, v rows of the head, p processes along the axis.

Norms, residuals and dropout work on t/p tokens. Attention and feed-forward gather the row, work on a slice of heads or
of the inner width, and hand back sums that are scattered over the row again. Embedding and head are split by
vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from keepstep.models.attention import Attention
from keepstep.models.latent_attention import LatentAttention
from keepstep.models.mlp import GatedMLP
from keepstep.models.moe import MoE
from keepstep.models.transformer import Block, Transformer
from keepstep.parallel.parts import COLUMNS, ROWS, gather_parts, local_part, place_module, place_parameter, scatter_sums
from keepstep.parallel.vocabulary import VocabularySlice, vocabulary_output

TOKENS = 1
"""The dim of tokens in [b, t, d]."""


def split_tensors(model: Transformer, mesh: DeviceMesh, overlap: bool) -> None:
    """Split a model (or a stage of one) on the meta device over the mesh's one axis, in place."""
    group = mesh.get_group()
    if overlap:
        _overlap_traffic(group)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention), "the config's rules refuse latent attention"
        _split_matmuls(attention, attention.qkv, attention.out, mesh)
        # Experts compute the tokens that this process keeps between matmuls: only the shared one is split.
        dense = mlp.shared if isinstance(mlp, MoE) else mlp
        if dense is not None:
            _split_matmuls(dense, dense.gate_up if isinstance(dense, GatedMLP) else dense.up, dense.down, mesh)
        own = (block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm)
        for norm in (attention.query_norm, attention.key_norm, *own):
            if norm is not None:
                place_module(norm, mesh)
    if model.norm is not None:
        place_module(model.norm, mesh)
    _split_vocabulary(model, mesh)


def first_local_head(attention: Attention | LatentAttention, mesh: DeviceMesh) -> int:
    """Number of the first query head on this process."""
    heads = attention.out.in_features // attention.head_size
    return heads // mesh.size() * mesh.get_local_rank()


def _split_matmuls(part: nn.Module, first: nn.Linear, last: nn.Linear, mesh: DeviceMesh) -> None:
    """A sub-block of two matmuls: the first split by outputs, the last by inputs; adapters like their weights.

    The adapters' other factors stay whole: all outputs come out of one `lora_a`, all inputs end in one `lora_b`.
    """
    group = mesh.get_group()
    place_module(first, mesh, {"weight": ROWS, "bias": ROWS, "lora_b": ROWS})
    # Outputs of the last are sums over processes, so each adds its share of the bias only.
    place_module(last, mesh, {"weight": COLUMNS, "lora_a": COLUMNS}, {"bias": 1.0 / mesh.size()})

    def gather_row(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_parts(inputs[0], TOKENS, group), *inputs[1:]

    def scatter_row(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return scatter_sums(output, TOKENS, group)

    part.register_forward_pre_hook(gather_row)
    last.register_forward_hook(scatter_row)


def _split_vocabulary(model: Transformer, mesh: DeviceMesh) -> None:
    rows, rank = model.config.padded_vocab // mesh.size(), mesh.get_local_rank()
    group = mesh.get_group()
    vocabulary = VocabularySlice(rows * rank, rows, group)
    if model._modules["embed"] is not None:
        place_parameter(model.embed, "weight", mesh, ROWS)
        model.embed.forward = partial(_embed_slice, model.embed, vocabulary, group)  # type: ignore[method-assign]
    if model.position is not None:
        place_module(model.position, mesh)

        def own_positions(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0].chunk(mesh.size(), TOKENS)[rank],)

        model.position.register_forward_pre_hook(own_positions)
    output = partial(vocabulary_output, vocabulary=vocabulary)
    if model.head is not None:
        place_parameter(model.head, "weight", mesh, ROWS)
        model.head.output = output
    model.tied_output = output


def _embed_slice(
    embed: nn.Embedding, vocabulary: VocabularySlice, group: dist.ProcessGroup, tokens_bt: Tensor
) -> Tensor:
    """Look up the local rows, zero elsewhere; exactly one process has each token, so the sum is the embedding."""
    local_bt = tokens_bt - vocabulary.first
    others_bt = (local_bt < 0) | (local_bt >= vocabulary.rows)
    x_btd = F.embedding(local_bt.masked_fill(others_bt, 0), local_part(embed.weight, ROWS))
    return scatter_sums(x_btd.masked_fill(others_bt[..., None], 0.0), TOKENS, group)


def _overlap_traffic(group: dist.ProcessGroup) -> None:
    """Let the compiler take gathers and scatters apart and run them during the matmuls they feed (async TP)."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
