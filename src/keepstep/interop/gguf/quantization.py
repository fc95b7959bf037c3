"""Tensor types of GGUF: the layout of their blocks, decoding to fp32, and encoding of those that we write.

Shape legend: n blocks, l elements a block, s sub-blocks a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Floats = NDArray[np.float32]

_CHUNK_BLOCKS = 1 << 14
"""Blocks that are decoded or encoded together: temporary arrays stay small, however large the tensor."""
_FIT_STEPS = 21
"""Scales that are tried for each sub-block of 4-bit types, as llama.cpp does."""


@dataclass(frozen=True)
class TensorType:
    """How a tensor's elements are stored."""

    name: str
    number: int
    """The type's number in the file."""
    elements: int
    """Elements of one block; a row is a whole number of blocks."""
    block: np.dtype[Any]
    """Layout of one block."""
    decode: Callable[[Array], Floats] | None = None
    """Blocks [n] to numbers [n, l]; None where the stored numbers are the elements."""
    encode: Callable[[Floats], Array] | None = None

    def size_bytes(self, elements: int) -> int:
        """Bytes of that many elements."""
        return elements // self.elements * self.block.itemsize


def _nibbles(packed_nb: Array, group: int) -> Floats:
    """4-bit numbers: of each `group` bytes first all low halves, then all high halves."""
    grouped = packed_nb.reshape(len(packed_nb), -1, 1, group)
    return (np.concatenate([grouped & 15, grouped >> 4], axis=2)).reshape(len(packed_nb), -1).astype(np.float32)


def _packed(levels_nl: Array, group: int) -> Array:
    """The inverse of `_nibbles`."""
    halves = levels_nl.astype(np.uint8).reshape(len(levels_nl), -1, 2, group)
    packed: Array = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(levels_nl), -1)
    return packed


def _column(values_n: Array) -> Floats:
    return values_n.astype(np.float32)[:, None]


def _decode_q4_0(blocks: Array) -> Floats:
    return _column(blocks["d"]) * (_nibbles(blocks["qs"], 16) - 8)


def _decode_q4_1(blocks: Array) -> Floats:
    return _column(blocks["d"]) * _nibbles(blocks["qs"], 16) + _column(blocks["m"])


def _scales_and_mins(blocks: Array) -> tuple[Floats, Floats]:
    """Of the 8 sub-blocks. Twelve bytes hold sixteen 6-bit numbers: the upper bits of the last four of each kind are
    in the first eight bytes."""
    low, high, rest = blocks["scales"][:, :4], blocks["scales"][:, 4:8], blocks["scales"][:, 8:]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    mins = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    return _column(blocks["d"]) * scales.astype(np.float32), _column(blocks["dmin"]) * mins.astype(np.float32)


def _decode_q4_k_or_q5_k(blocks: Array) -> Floats:
    scales_ns, mins_ns = _scales_and_mins(blocks)
    levels = _nibbles(blocks["qs"], 32).reshape(-1, 8, 32)
    if blocks.dtype == _Q5_K:
        # Bit s of byte i is the highest bit of element i of sub-block s.
        levels += 16 * np.unpackbits(blocks["qh"], axis=1, bitorder="little").reshape(-1, 32, 8).transpose(0, 2, 1)
    return (scales_ns[..., None] * levels - mins_ns[..., None]).reshape(-1, 256)


def _decode_q6_k(blocks: Array) -> Floats:
    low = _nibbles(blocks["ql"], 64).reshape(-1, 256)
    # Each byte holds the two upper bits of four elements that are 32 apart.
    high = blocks["qh"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    levels = low + 16 * high.reshape(-1, 256).astype(np.float32) - 32
    scales_ns = _column(blocks["d"]) * blocks["scales"].astype(np.float32)
    return (scales_ns[..., None] * levels.reshape(-1, 16, 16)).reshape(-1, 256)


def _encode_q8_0(x_nl: Floats) -> Array:
    scale = np.abs(x_nl).max(axis=1, keepdims=True) / np.float32(127)
    blocks = np.empty(len(x_nl), _Q8_0)
    blocks["d"] = scale[:, 0]
    blocks["qs"] = np.rint(x_nl * _inverse(scale))
    return blocks


def _encode_q4_1(x_nl: Floats) -> Array:
    scale, low = _fit(x_nl)
    blocks = np.empty(len(x_nl), _Q4_1)
    blocks["d"], blocks["m"] = scale[:, 0], low[:, 0]
    # With the rounded scale and minimum: these are what a reader has.
    levels = (x_nl - _column(blocks["m"])) * _inverse(_column(blocks["d"]))
    blocks["qs"] = _packed(np.rint(levels).clip(0, 15), 16)
    return blocks


def _encode_q4_k(x_nl: Floats) -> Array:
    scale, low = (part.reshape(-1, 8) for part in _fit(x_nl.reshape(-1, 32)))
    blocks = np.empty(len(x_nl), _Q4_K)
    sixths = []
    for name, part in (("d", scale), ("dmin", -low)):
        largest = part.max(axis=1, keepdims=True)
        blocks[name] = largest[:, 0] / np.float32(63)
        sixths.append(np.rint(63 * part * _inverse(largest)).clip(0, 63).astype(np.uint8))
    scales, mins = sixths
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, mins)]
    blocks["scales"] = np.concatenate([*first, scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4], axis=1)
    scales_ns, mins_ns = _scales_and_mins(blocks)
    levels = (x_nl.reshape(-1, 8, 32) + mins_ns[..., None]) * _inverse(scales_ns)[..., None]
    blocks["qs"] = _packed(np.rint(levels).clip(0, 15), 32)
    return blocks


def _inverse(scale: Floats) -> Floats:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def _fit(x_nl: Floats) -> tuple[Floats, Floats]:
    """Scale [n, 1] and minimum [n, 1], at most 0, for levels 0 to 15 with a small error, large elements weighted more.

    For a number of roundings to levels, the best scale and minimum follow from weighted least squares.
    """
    weight = np.sqrt(np.square(x_nl).mean(axis=1, keepdims=True)) + np.abs(x_nl)
    start = np.minimum(x_nl.min(axis=1, keepdims=True), 0)
    span = x_nl.max(axis=1, keepdims=True) - start
    scale, low, error = span / 15, start, np.full_like(span, np.inf)

    def total(values: Floats) -> Floats:
        return np.asarray((weight * values).sum(axis=1, keepdims=True))

    w, x = total(np.ones_like(x_nl)), total(x_nl)
    for step in range(_FIT_STEPS):
        level = np.rint((x_nl - start) * _inverse(span) * np.float32(14 + 0.1 * step)).clip(0, 15)
        l1, l2, xl = total(level), total(level * level), total(x_nl * level)
        inverse = _inverse(w * l2 - l1 * l1)
        new_scale, new_low = (w * xl - x * l1) * inverse, (l2 * x - l1 * xl) * inverse
        above = new_low > 0
        new_scale, new_low = np.where(above, xl * _inverse(l2), new_scale), np.where(above, 0, new_low)
        new_error = total(np.square(new_scale * level + new_low - x_nl))
        better = (new_error < error) & (new_scale > 0)
        scale, low = np.where(better, new_scale, scale), np.where(better, new_low, low)
        error = np.where(better, new_error, error)
    return scale.astype(np.float32), low.astype(np.float32)


_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
_Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])

TYPES = {
    kind.name: kind
    for kind in (
        TensorType("F32", 0, 1, np.dtype("<f4")),
        TensorType("F16", 1, 1, np.dtype("<f2")),
        TensorType("BF16", 30, 1, np.dtype("<i2")),
        TensorType("Q4_0", 2, 32, np.dtype([("d", "<f2"), ("qs", "u1", 16)]), _decode_q4_0),
        TensorType("Q4_1", 3, 32, _Q4_1, _decode_q4_1, _encode_q4_1),
        TensorType("Q8_0", 8, 32, _Q8_0, lambda blocks: _column(blocks["d"]) * blocks["qs"].astype("f4"), _encode_q8_0),
        TensorType("Q4_K", 12, 256, _Q4_K, _decode_q4_k_or_q5_k, _encode_q4_k),
        TensorType("Q5_K", 13, 256, _Q5_K, _decode_q4_k_or_q5_k),
        TensorType("Q6_K", 14, 256, _Q6_K, _decode_q6_k),
    )
}
"""Types that we read; those that we write have `encode` or store plain numbers."""
TYPE_BY_NUMBER = {kind.number: kind for kind in TYPES.values()}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dtype_of(kind: TensorType) -> torch.dtype:
    """The precision of decoded tensors."""
    return _PLAIN.get(kind.name, torch.float32)


def decoded(kind: TensorType, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> Tensor:
    """A tensor from its bytes: plain types keep their precision, others become fp32."""
    blocks = raw.view(kind.block)
    if kind.decode is None:
        return torch.from_numpy(blocks).view(dtype_of(kind)).reshape(shape)
    found = np.empty((len(blocks), kind.elements), np.float32)
    with np.errstate(all="ignore"):  # damaged scales give infinite weights, as in the plain types
        for start in range(0, len(blocks), _CHUNK_BLOCKS):
            found[start : start + _CHUNK_BLOCKS] = kind.decode(blocks[start : start + _CHUNK_BLOCKS])
    return torch.from_numpy(found).reshape(shape)


def encoded(kind: TensorType, tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor as this type."""
    if kind.encode is None:
        plain = tensor.detach().to(dtype_of(kind)).contiguous()
        return plain.view(torch.uint8).flatten().numpy() if plain.dim() else plain[None].view(torch.uint8).numpy()
    numbers = tensor.detach().float().contiguous().numpy().reshape(-1, kind.elements)
    found = np.empty(len(numbers), kind.block)
    for start in range(0, len(numbers), _CHUNK_BLOCKS):
        found[start : start + _CHUNK_BLOCKS] = kind.encode(numbers[start : start + _CHUNK_BLOCKS])
    return found.view(np.uint8)
