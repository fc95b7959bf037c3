"""Which part of each tensor of a nested state dict a process holds, and which part it writes.

The only file of this package that looks inside DTensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from keepstep.checkpoint.protocol.manifest import ITEM_BYTES
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice, whole
from keepstep.core.errors import CheckpointError

RANK_KEY = "rank"
"""State below this key belongs to one process (its random generators) and is never treated as replicated."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
assert set(DTYPES) == set(ITEM_BYTES)


@dataclass(frozen=True)
class LocalShard:
    """This process's part of a tensor: name, dtype and shape of the whole tensor, our slice of it, and its memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor_slice: TensorSlice
    local: torch.Tensor
    owned: bool | None
    """Whether this process writes the slice; None when that depends on which other processes hold it."""

    @property
    def layout(self) -> tuple[str, str, tuple[int, ...], TensorSlice]:
        """What `lay_out` needs to know."""
        return (self.name, self.dtype, self.shape, self.tensor_slice)


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a state into tensors by dotted name and plain values in their original nesting."""
    tensors: dict[str, torch.Tensor] = {}

    def visit(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, value in node.items():
            if not isinstance(key, str):
                raise CheckpointError(f"state key {prefix}{key!r} is a {type(key).__name__}", "keys must be strings")
            name = f"{prefix}{key}"
            if isinstance(value, torch.Tensor):
                if name in tensors:
                    raise CheckpointError(f"two tensors of the state share the name {name}")
                tensors[name] = value
            elif isinstance(value, Mapping):
                plain[key] = visit(value, f"{name}.")
            else:
                check_plain(value, name)
                plain[key] = value
        return plain

    plain = visit(state, "")
    return tensors, plain


def local_tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """This process's part of every tensor of a state, in an order that depends on the names alone."""
    tensors, _ = split_state(state)
    return [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in tensors.values()]


def check_plain(value: Any, name: str) -> None:
    """Raise for values that do not survive a round trip through JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{name}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_plain(item, f"{name}.{key}")
    else:
        raise CheckpointError(
            f"value {name} is a {type(value).__name__}", "use tensors, text, numbers, lists and dicts of them"
        )


def rank_name(name: str, rank: int) -> str:
    """The stored name of a tensor that belongs to one process: rank.cuda -> rank.3.cuda."""
    return f"{RANK_KEY}.{rank}.{name.removeprefix(f'{RANK_KEY}.')}"


def local_shard(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> LocalShard:
    """The part of one tensor of the state that this process holds."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, which checkpoints do not store")
    dtype = DTYPE_NAMES[tensor.dtype]
    shape = tuple(tensor.shape)
    if name.startswith(f"{RANK_KEY}."):
        return LocalShard(rank_name(name, rank), dtype, shape, whole(shape), tensor.detach(), True)
    if not isinstance(tensor, DTensor):
        return LocalShard(name, dtype, shape, whole(shape), tensor.detach(), True if world_size == 1 else None)
    for placement in tensor.placements:
        if not isinstance(placement, Shard | Replicate) and type(placement).__name__ != "_StridedShard":
            raise CheckpointError(f"tensor {name} has placement {placement}: reduce it before saving")
    mesh = tensor.device_mesh
    local = tensor.to_local().detach()
    tensor_slice = _local_slice(shape, mesh, tensor.placements)
    if tuple(local.shape) != tensor_slice.shape:
        raise CheckpointError(
            f"tensor {name}: its local part has shape {list(local.shape)}, its layout says {list(tensor_slice.shape)}"
        )
    owned: bool | None = None
    if mesh.size() == world_size:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        # A hash of the name chooses the replica that writes, so that many tensors spread over all replicas.
        owned = all(
            not isinstance(placement, Replicate) or at == zlib.crc32(name.encode()) % mesh.size(axis)
            for axis, (placement, at) in enumerate(zip(tensor.placements, coordinate, strict=True))
        )
    return LocalShard(name, dtype, shape, tensor_slice, local, owned)


@cache
def _local_slice(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> TensorSlice:
    """This process's slice of a DTensor; cached, because many tensors share a shape and every save asks again."""
    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return TensorSlice(tuple(offset), tuple(local_shape))
