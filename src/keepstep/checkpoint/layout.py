"""From a nested state dict to named tensors and boxes: who holds what, who writes it. The one file about DTensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from keepstep.checkpoint.boxes import Box, whole
from keepstep.checkpoint.manifest import ITEM_BYTES
from keepstep.core.errors import CheckpointError

RANK_KEY = "rank"
"""State below this key belongs to each process alone (its random generators): nothing in it is taken as replicated."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
assert set(DTYPES) == set(ITEM_BYTES)


@dataclass(frozen=True)
class Holding:
    """A tensor as this process holds it: the whole's name, type and shape, our box, and the memory itself."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    owned: bool | None
    """Whether this process writes the box; None when only a look at all processes can tell."""


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by dotted name, and the plain values in the nesting they came in."""
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


def check_plain(value: Any, name: str) -> None:
    """Refuse what JSON cannot give back as it was."""
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
    """The stored name of a tensor that belongs to one process: rank.cuda → rank.3.cuda."""
    return f"{RANK_KEY}.{rank}.{name.removeprefix(f'{RANK_KEY}.')}"


def holding(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> Holding:
    """How this process holds one tensor of its state."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, which checkpoints do not store")
    dtype = DTYPE_NAMES[tensor.dtype]
    if name.startswith(f"{RANK_KEY}."):
        shape = tuple(tensor.shape)
        return Holding(rank_name(name, rank), dtype, shape, whole(shape), tensor.detach(), True)
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Holding(name, dtype, shape, whole(shape), tensor.detach(), True if world_size == 1 else None)
    for placement in tensor.placements:
        if not isinstance(placement, Shard | Replicate) and type(placement).__name__ != "_StridedShard":
            raise CheckpointError(f"tensor {name} is placed as {placement}: reduce it before saving")
    mesh = tensor.device_mesh
    local = tensor.to_local().detach()
    shape = tuple(tensor.shape)
    box = _local_box(shape, mesh, tensor.placements)
    if tuple(local.shape) != box.shape:
        raise CheckpointError(
            f"tensor {name}: its local part has shape {list(local.shape)}, its layout says {list(box.shape)}"
        )
    owned: bool | None = None
    if mesh.size() == world_size:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        # Among replicas the name decides who writes, so that copies of many tensors spread over all of them.
        owned = all(
            not isinstance(placement, Replicate) or at == zlib.crc32(name.encode()) % mesh.size(axis)
            for axis, (placement, at) in enumerate(zip(tensor.placements, coordinate, strict=True))
        )
    return Holding(name, dtype, shape, box, local, owned)


@cache
def _local_box(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> Box:
    """This process's box of a DTensor; remembered, because many tensors share a shape and every save asks again."""
    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(local_shape))


def settle_owners(
    holdings: list[Holding], rank: int, world_size: int, group: dist.ProcessGroup | None
) -> list[Holding]:
    """Those holdings that this process writes; boxes that several processes hold go to the least loaded of them."""
    mine = [held for held in holdings if held.owned and held.box.count]
    open_boxes = [
        (held.name, held.box, held.box.count * ITEM_BYTES[held.dtype])
        for held in holdings
        if held.owned is None and held.box.count
    ]
    everyone: list[Any] = [open_boxes]
    if group is not None:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, open_boxes, group=group)
    holders: dict[tuple[str, Box], list[int]] = {}
    size_bytes: dict[tuple[str, Box], int] = {}
    for holder, boxes in enumerate(everyone):
        for name, box, size in boxes:
            holders.setdefault((name, box), []).append(holder)
            size_bytes[name, box] = size
    load = [0] * len(everyone)
    won = set()
    for key in sorted(holders, key=lambda key: (-size_bytes[key], key)):
        owner = min(holders[key], key=lambda holder: (load[holder], holder))
        load[owner] += size_bytes[key]
        if owner == rank:
            won.add(key)
    return mine + [held for held in holdings if held.owned is None and (held.name, held.box) in won]
