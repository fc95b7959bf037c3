"""Weights that published files hold in 4 or 8 bits, as bf16 tensors: MXFP4 (gpt-oss) and fp8 in blocks (DeepSeek-V3).

Shape legend: e experts, o outputs, i inputs, g groups of 32 inputs, c and k blocks of outputs and inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepstep.checkpoint.offline import Kind, Tensors
from keepstep.core.errors import CheckpointError, malformed_as

_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each code of four bits means (E2M1)."""
_BIAS = 127
"""A scale is the power of two with this exponent bias (E8M0)."""
_FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale."""


def dequantized(stored: Tensors) -> Tensors:
    """The same tensors, each quantised one in bf16 under the name of the weight that it stands for; read on demand."""
    kinds: dict[str, Kind] = {}
    for name, (dtype, shape) in stored.kinds.items():
        if name.endswith(_BLOCKS) and dtype == torch.uint8 and len(shape) == 4:
            experts, outputs, groups, packed = shape
            kinds[name.removesuffix(_BLOCKS)] = torch.bfloat16, (experts, groups * packed * 2, outputs)
        elif name + _INVERSE in stored:
            kinds[name] = torch.bfloat16, shape
        elif not (name.endswith(_INVERSE) or (name.endswith(_SCALES) and _twin(name) in stored)):
            kinds[name] = dtype, shape
    return Tensors(kinds, lambda name: _read(stored, name))


def _twin(scales: str) -> str:
    return scales.removesuffix(_SCALES) + _BLOCKS


def _read(stored: Tensors, name: str) -> Tensor:
    if name + _BLOCKS in stored:
        parts = name + _BLOCKS, name + _SCALES
    elif name + _INVERSE in stored:
        parts = name, name + _INVERSE
    else:
        return stored[name]
    for part in parts:
        if part not in stored:
            raise CheckpointError(f"tensor {part} is missing", "download the file again")
    with malformed_as(CheckpointError, f"the scales of {name} do not fit its weights", "download the file again"):
        decode = decode_fp8 if parts[0] == name else decode_mxfp4
        return decode(*(stored[part] for part in parts))


def decode_mxfp4(blocks_eogb: Tensor, scales_eog: Tensor) -> Tensor:
    """The weights [e, i, o] of all experts; a byte holds two inputs, the first in its low bits."""
    # One expert at a time: the codes of all take eight times the memory of the file.
    pairs = zip(blocks_eogb, scales_eog, strict=True)
    return torch.stack([_decode_expert(blocks_ogb, scales_og) for blocks_ogb, scales_og in pairs])


def _decode_expert(blocks_ogb: Tensor, scales_og: Tensor) -> Tensor:
    codes = torch.stack((blocks_ogb & 15, blocks_ogb >> 4), dim=-1).flatten(-2)
    weights = torch.ldexp(torch.tensor(_FP4_VALUES)[codes.int()], scales_og.int()[..., None] - _BIAS)
    return weights.flatten(-2).t().bfloat16()


def decode_fp8(weight_oi: Tensor, scale_ck: Tensor) -> Tensor:
    """The weight [o, i], each block of it multiplied by its scale in fp32."""
    scale_oi = scale_ck.float()
    for dim, size in enumerate(weight_oi.shape):
        if scale_oi.shape[dim] != -(-size // _FP8_BLOCK):
            raise ValueError(f"{scale_ck.shape[dim]} scales for {size} rows or columns")
        scale_oi = scale_oi.repeat_interleave(_FP8_BLOCK, dim=dim).narrow(dim, 0, size)
    return (weight_oi.float() * scale_oi).bfloat16()
