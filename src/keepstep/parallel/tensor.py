"""Tensor parallelism with sequence parallelism: matrices are split, and between them each process keeps part of a row.

Shape legend: b rows, t tokens of a row on this context rank, d hidden, v rows of the head, p processes along the axis.

Norms, residuals and dropout work on t/p tokens. Attention and feed-forward gather the row, work on a slice of heads or
of the inner width, and hand back sums that are scattered over the row again. Embedding and head are split by
vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from keepstep.models.attention import Attention
from keepstep.models.latent_attention import LatentAttention
from keepstep.models.mlp import GatedMLP
from keepstep.models.moe import MoE
from keepstep.models.norm import RMSNorm, RMSNorm1p
from keepstep.models.transformer import Block, Transformer
from keepstep.parallel.parts import (
    COLUMNS,
    ROWS,
    gather_parts,
    local_part,
    place_module,
    place_parameter,
    scatter_sums,
    sum_parts,
)
from keepstep.parallel.vocabulary import VocabularySlice, vocabulary_output

TOKENS = 1
"""The dim of tokens in [b, t, d]."""
_BY_OUTPUTS = {"weight": ROWS, "bias": ROWS, "lora_b": ROWS}
"""A linear split by outputs. Adapters are split like their weights, and their other factors stay whole: all outputs
come out of one `lora_a`, all inputs end in one `lora_b`."""


def split_tensors(model: Transformer, mesh: DeviceMesh, overlap: bool) -> None:
    """Split a model (or a stage of one) on the meta device over the mesh's one axis, in place."""
    group = mesh.get_group()
    if overlap:
        _overlap_traffic(group)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        if isinstance(attention, LatentAttention):
            _split_latent(attention, mesh)
        else:
            _split_heads(attention, mesh)
        # Experts compute the tokens that this process keeps between matmuls: only the shared one is split.
        dense = mlp.shared if isinstance(mlp, MoE) else mlp
        if dense is not None:
            _split_matmuls(dense, dense.gate_up if isinstance(dense, GatedMLP) else dense.up, dense.down, mesh)
        for norm in (block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm):
            if norm is not None:
                place_module(norm, mesh)
    if model.norm is not None:
        place_module(model.norm, mesh)
    _split_vocabulary(model, mesh)


def first_local_head(attention: Attention | LatentAttention, mesh: DeviceMesh) -> int:
    """Number of the first query head on this process."""
    size = attention.value_size if isinstance(attention, LatentAttention) else attention.head_size
    return attention.out.in_features // size // mesh.size() * mesh.get_local_rank()


def _split_heads(attention: Attention, mesh: DeviceMesh) -> None:
    """Attention with the projections, the sinks and the norms of some heads."""
    _split_matmuls(attention, attention.qkv, attention.out, mesh)
    if attention.sinks is not None:
        place_module(attention, mesh, {"sinks": ROWS})
    for norm in (attention.query_norm, attention.key_norm):
        if norm is None:
            continue
        if attention.head_qk_norm:
            place_module(norm, mesh)
        else:
            norm.__class__ = _NormOverProcesses1p if isinstance(norm, RMSNorm1p) else _NormOverProcesses
            assert isinstance(norm, _NormOverProcesses)
            norm.group = mesh.get_group()
            place_module(norm, mesh, {"weight": ROWS})


def _split_latent(attention: LatentAttention, mesh: DeviceMesh) -> None:
    """Latent attention of some heads. Latents are made from this process's tokens, and the row of them is gathered:
    they are smaller than hidden states."""
    group = mesh.get_group()
    whole = (attention.query_down, attention.query_norm, attention.key_value_down, attention.key_value_norm)
    for part in whole:
        if part is not None:
            place_module(part, mesh)
    for expansion in (attention.query_up, attention.key_value_up):
        place_module(expansion, mesh, _BY_OUTPUTS)
    _gather_inputs(attention.query_up, group)
    attention.key_value_down.register_forward_hook(
        lambda _module, _inputs, latent_btl: gather_parts(latent_btl, TOKENS, group)
    )
    _split_last(attention, attention.out, mesh)


def _split_matmuls(part: nn.Module, first: nn.Linear, last: nn.Linear, mesh: DeviceMesh) -> None:
    """A sub-block of two matmuls: the first split by outputs, the last by inputs."""
    place_module(first, mesh, _BY_OUTPUTS)
    _gather_inputs(part, mesh.get_group())
    _split_last(part, last, mesh)


def _gather_inputs(part: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a part of the model work on whole rows."""

    def gather_row(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_parts(inputs[0], TOKENS, group), *inputs[1:]

    part.register_forward_pre_hook(gather_row)


def _split_last(part: nn.Module, last: nn.Linear, mesh: DeviceMesh) -> None:
    """The matmul that ends a part of the model, split by inputs: this process gets the sums of its tokens."""
    group = mesh.get_group()
    # Outputs are sums over processes, so each adds its share of the bias only.
    place_module(last, mesh, {"weight": COLUMNS, "lora_a": COLUMNS}, {"bias": 1.0 / mesh.size()})

    def scatter_row(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return scatter_sums(output, TOKENS, group)

    part.register_forward_hook(scatter_row)


class _NormOverProcesses(RMSNorm):
    """A norm over the heads of all processes, of which this one has some."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, which continues on the other processes."""
        x_fp32 = x.float()
        squares = sum_parts(x_fp32.square().sum(dim=-1, keepdim=True), self.group)
        inverses = torch.rsqrt(squares / (x.shape[-1] * self.group.size()) + self.eps)
        return (x_fp32 * inverses * self._scales()).to(x.dtype)

    def _scales(self) -> Tensor:
        return self.weight.float()


class _NormOverProcesses1p(_NormOverProcesses):
    def _scales(self) -> Tensor:
        return 1.0 + self.weight.float()


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
    output = partial(vocabulary_output, vocabulary=vocabulary, cap=model.config.final_logit_softcapping)
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
