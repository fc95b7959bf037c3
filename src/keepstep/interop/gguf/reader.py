"""Reads GGUF files. Every count and size of the header is bounded by the file's length before anything is allocated."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from keepstep.core.errors import CheckpointError, malformed_as
from keepstep.interop.gguf.quantization import TYPE_BY_NUMBER, TYPES, TensorType, decoded

MAGIC = b"GGUF"
ALIGNMENT = 32
"""Default of general.alignment: tensors start at multiples of it."""
NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
"""NumPy's name of each value type; those without one are strings and arrays."""
STRING, ARRAY = 8, 9
_MOST_DIMS = 4
_SMALLEST_ENTRY = 13
"""Bytes of a key without text and a value of one byte; a tensor's entry is longer."""
_DAMAGED = "download the file again"
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")
"""llama.cpp names the files of a model that is split into several: NAME-00001-of-00003.gguf."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is in a file."""

    path: Path
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch; the file has the innermost first."""
    kind: TensorType
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata and the places of all tensors, which may be in several files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str) -> Tensor:
        """One tensor: F32, F16 and BF16 in their precision, the others decoded to fp32."""
        stored = self.tensors[name]
        raw = np.fromfile(stored.path, np.uint8, stored.size_bytes, offset=stored.offset)
        if raw.size != stored.size_bytes:
            raise CheckpointError(f"{stored.path} ends inside {name}", _DAMAGED)
        return decoded(stored.kind, raw, stored.shape)


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file; of a part of a model, those of all its parts, which are next to it."""
    file = _open_one(path)
    count = file.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return file
    what = f"{path} is one of {count} files of a model"
    ending = f"-of-{count:05}.gguf"
    if not _PART.fullmatch(path.name) or not path.name.endswith(ending):
        raise CheckpointError(what, f"give them the names that they were published with: NAME-00001{ending}, …")
    paths = [path.with_name(f"{model_name(path)}-{number:05}{ending}") for number in range(1, count + 1)]
    if missing := [each.name for each in paths if not each.is_file()]:
        hint = f"download all {count} files into {path.parent}"
        raise CheckpointError(f"{what}, and there is no {', '.join(missing[:3])} next to it", hint)
    parts = [_open_one(each) for each in paths]
    tensors = {name: stored for part in parts for name, stored in part.tensors.items()}
    numbers = [part.metadata.get("split.no") for part in parts]
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if numbers != list(range(count)) or not len(tensors) == total == sum(len(part.tensors) for part in parts):
        raise CheckpointError(f"{what}, and the others next to it are of another one", "download all of them again")
    return GgufFile(paths[0], parts[0].metadata, tensors)


def model_name(path: Path) -> str:
    """The name of the model that a file has, or a part of."""
    found = _PART.fullmatch(path.name)
    return found[1] if found else path.stem


def part_pattern(name: str) -> str:
    """What matches the names of all parts of a model, by the name of one of them; of a whole model its own."""
    found = _PART.fullmatch(name)
    return f"{found[1]}-*{name[-14:]}" if found else name


def _open_one(path: Path) -> GgufFile:
    with malformed_as(CheckpointError, f"{path} is no readable GGUF file", _DAMAGED), path.open("rb") as file:
        header = _Header(file, path.stat().st_size)
        if header.read(4) != MAGIC:
            raise ValueError("it does not start with GGUF")
        version, tensor_count, pair_count = header.unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} of the format; versions 2 and 3 are known")
        header.need((tensor_count + pair_count) * _SMALLEST_ENTRY)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = header.string()
            if key in metadata:
                raise ValueError(f"{key} occurs twice")
            metadata[key] = header.value(*header.unpack("<I"))
        described = [_described(header) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        start = -(-header.at // alignment) * alignment
        return GgufFile(path, metadata, _placed(path, described, start, header.size, alignment))


class _Header:
    """The file up to its tensors."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size, self.at = size, 0
        self._file = file

    def need(self, size: int) -> None:
        """Raise unless so many bytes are left."""
        if size > self.size - self.at:
            raise ValueError(f"it ends at {self.size} bytes, but its header asks for {size} more at {self.at}")

    def read(self, size: int) -> bytes:
        self.need(size)
        self.at += size
        found = self._file.read(size)
        if len(found) != size:
            raise ValueError("it became shorter while it was read")
        return found

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.read(struct.calcsize(form)))

    def string(self) -> str:
        (size,) = self.unpack("<Q")
        return self.read(size).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.unpack("<IQ")
            if element == STRING:
                self.need(8 * count)
                return [self.string() for _ in range(count)]
            if element == ARRAY:
                raise ValueError("it holds an array of arrays")
            dtype = np.dtype(NUMBERS[element])
            return np.frombuffer(self.read(count * dtype.itemsize), dtype)
        number = np.frombuffer(self.read(np.dtype(NUMBERS[kind]).itemsize), NUMBERS[kind])[0]
        # The shortest decimal that means the same fp32: 1e-05, where its exact value has 17 digits.
        return float(str(number)) if number.dtype == np.float32 else number.item()


def _described(header: _Header) -> tuple[str, tuple[int, ...], TensorType, int]:
    """Name, shape, type and place after the header of one tensor."""
    name = header.string()
    (dims,) = header.unpack("<I")
    if dims > _MOST_DIMS:
        raise ValueError(f"{name} has {dims} dimensions")
    shape = header.unpack(f"<{dims}Q")[::-1]
    number, offset = header.unpack("<IQ")
    if number not in TYPE_BY_NUMBER:
        known = ", ".join(TYPES)
        raise CheckpointError(
            f"{name} has a tensor type that is not supported (number {number})",
            f"known: {known}; convert the file to one of them with llama-quantize",
        )
    return name, shape, TYPE_BY_NUMBER[number], offset


def _placed(
    path: Path, described: list[tuple[str, tuple[int, ...], TensorType, int]], start: int, size: int, alignment: int
) -> dict[str, StoredTensor]:
    """Tensors by name. They may not overlap: together they are never larger than the file."""
    found: dict[str, StoredTensor] = {}
    end = start
    for name, shape, kind, offset in sorted(described, key=lambda item: item[3]):
        if name in found or not shape or shape[-1] % kind.elements or 0 in shape or offset % alignment:
            raise ValueError(f"the entry of {name} is damaged")
        stored = StoredTensor(path, shape, kind, start + offset, kind.size_bytes(math.prod(shape)))
        if stored.offset < end or stored.offset + stored.size_bytes > size:
            raise ValueError(f"{name} overlaps another tensor or ends after the file")
        end = stored.offset + stored.size_bytes
        found[name] = stored
    return found
