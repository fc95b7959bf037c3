"""Writes GGUF files, one tensor in memory at a time."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from keepstep.checkpoint.storage.store import write_durable
from keepstep.interop.gguf.quantization import TensorType, encoded
from keepstep.interop.gguf.reader import ALIGNMENT, ARRAY, MAGIC, NUMBERS, STRING

_VERSION = 3


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that a file will hold."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return self.kind.size_bytes(int(np.prod(self.shape)))


def write_gguf(
    path: Path, metadata: Mapping[str, Any], planned: Sequence[PlannedTensor], tensors: Iterable[Tensor]
) -> None:
    """Write a new file. `tensors` are those planned, in the same order; each is encoded when its turn comes."""

    def pieces() -> Iterator[memoryview]:
        header = _header(metadata, planned)
        yield memoryview(header + bytes(-len(header) % ALIGNMENT))
        for plan, tensor in zip(planned, tensors, strict=True):
            assert tuple(tensor.shape) == plan.shape, plan.name
            data = encoded(plan.kind, tensor)
            yield data.data
            yield memoryview(bytes(-data.size % ALIGNMENT))

    write_durable(path, pieces())


def _header(metadata: Mapping[str, Any], planned: Sequence[PlannedTensor]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(planned), len(metadata))]
    for key, value in metadata.items():
        kind = _kind(value)
        parts += [_string(key), struct.pack("<I", kind), _value(value, kind)]
    offset = 0
    for plan in planned:
        dims = plan.shape[::-1]
        parts += [_string(plan.name), struct.pack(f"<I{len(dims)}Q", len(dims), *dims)]
        parts.append(struct.pack("<IQ", plan.kind.number, offset))
        offset += -(-plan.size_bytes // ALIGNMENT) * ALIGNMENT
    return b"".join(parts)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _kind(value: Any) -> int:
    """The value type: whole numbers are 32 bits without a sign, in lists with one, as llama.cpp expects them."""
    if isinstance(value, list):
        return ARRAY
    if isinstance(value, str):
        return STRING
    return NUMBERS.index("?" if isinstance(value, bool) else "<f4" if isinstance(value, float) else "<u4")


def _value(value: Any, kind: int) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind != ARRAY:
        return np.array(value, NUMBERS[kind]).tobytes()
    if value and isinstance(value[0], str):
        return struct.pack("<IQ", STRING, len(value)) + b"".join(map(_string, value))
    form = "<f4" if value and isinstance(value[0], float) else "<i4"
    return struct.pack("<IQ", NUMBERS.index(form), len(value)) + np.array(value, form).tobytes()
