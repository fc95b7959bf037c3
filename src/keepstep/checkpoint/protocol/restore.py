"""Fill tensors from a committed step; the layout that reads may differ from the layout that wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from keepstep.checkpoint.protocol.layout import DTYPES, RANK_KEY, LocalShard, local_shard, split_state
from keepstep.checkpoint.protocol.manifest import ITEM_BYTES, Manifest, Piece
from keepstep.checkpoint.protocol.shards import ShardReader
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice, byte_span
from keepstep.checkpoint.storage.store import Store
from keepstep.core.errors import StateMismatchError


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy().data)


def match_names(
    manifest: Manifest,
    into: Mapping[str, Any],
    shards: list[LocalShard],
    where: str,
    strict: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> None:
    """Raise for a state that does not fit the checkpoint: whole sections may be left out, single tensors may not.

    `elsewhere` are tensors that other processes load (the other stages of a pipeline).
    """
    wanted = {shard.name: shard for shard in shards if not shard.name.startswith(f"{RANK_KEY}.")}
    sections = tuple(f"{key}." for key in into if key != RANK_KEY)
    unread = sorted(name for name in {*manifest.tensors} - {*wanted} - elsewhere if name.startswith(sections))
    missing = sorted({*wanted} - {*manifest.tensors})
    for names, verb, rest in ((unread, "holds", ", which this run does not have"), (missing, "does not hold", "")):
        if names and strict:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise StateMismatchError(f"{where} {verb} the tensor {names[0]}{more}{rest}", _mismatch_hint(names[0]))
    for name, shard in wanted.items():
        entry = manifest.tensors.get(name)
        if entry is not None and (entry.dtype, entry.shape) != (shard.dtype, shard.shape):
            raise StateMismatchError(
                f"{where}: tensor {name} is {entry.dtype} {list(entry.shape)}, "
                f"this run needs {shard.dtype} {list(shard.shape)}",
                _mismatch_hint(name),
            )


def _mismatch_hint(name: str) -> str:
    if not name.startswith("optimizer."):
        return (
            "it was saved with other model.* or lora.* settings: give this run another name (and another "
            "checkpoint.folder, if you set one), or use the settings it was saved with (config.yaml in its run folder)"
        )
    return (
        "it has the state of another optimizer, or none; "
        "checkpoint.resume_from with checkpoint.skip_optimizer=true loads only its weights"
    )


def restore(
    store: Store,
    folder: str,
    manifest: Manifest,
    into: Mapping[str, Any],
    rank: int,
    world_size: int,
    strict: bool = True,
    threads: int = 1,
    elsewhere: frozenset[str] = frozenset(),
) -> tuple[dict[str, Any], int]:
    """Fill the tensors of `into`, every byte checked; returns the plain values and the number of bytes read.

    State below `rank` is filled if a process with this rank saved it, and left unchanged otherwise.
    """
    tensors, _ = split_state(into)
    shards = [local_shard(name, tensor, rank, world_size) for name, tensor in tensors.items()]
    match_names(manifest, into, shards, store.locate(folder), strict, elsewhere)
    by_file = _jobs(manifest, shards)
    bytes_read = 0
    with torch.no_grad(), ThreadPoolExecutor(threads) as pool:
        for file, jobs in sorted(by_file.items()):
            reader = ShardReader(store, folder, manifest.files[file], manifest.algorithm)
            ordered = sorted(jobs, key=lambda job: job[1].begin)
            # Pieces never overlap in the tensors they fill. `list` raises the first error.
            list(pool.map(lambda job, reader=reader: fill(reader, *job), ordered))
            bytes_read += reader.bytes_read
    values = dict(manifest.values)
    if rank in manifest.rank_values:
        values[RANK_KEY] = manifest.rank_values[rank]
    return values, bytes_read


def _jobs(manifest: Manifest, shards: list[LocalShard]) -> dict[int, list[tuple[LocalShard, Piece, TensorSlice]]]:
    """The parts of pieces that our tensors need, by data file."""
    by_file: dict[int, list[tuple[LocalShard, Piece, TensorSlice]]] = defaultdict(list)
    for shard in shards:
        entry = manifest.tensors.get(shard.name)
        if entry is None or entry.shape != shard.shape or entry.dtype != shard.dtype:
            continue
        for piece in entry.pieces:
            common = piece.tensor_slice.intersection(shard.tensor_slice) if shard.tensor_slice.count else None
            if common is not None:
                by_file[piece.file].append((shard, piece, common))
    return by_file


def files_needed(manifest: Manifest, into: Mapping[str, Any], rank: int, world_size: int) -> set[int]:
    """The data files that this process reads from."""
    tensors, _ = split_state(into)
    return set(_jobs(manifest, [local_shard(name, tensor, rank, world_size) for name, tensor in tensors.items()]))


def fill(reader: ShardReader, shard: LocalShard, piece: Piece, common: TensorSlice) -> None:
    """Read one piece, or the blocks around the part of it that we need, into our tensor."""
    item_bytes = ITEM_BYTES[shard.dtype]
    piece_bytes = piece.tensor_slice.count * item_bytes
    target = shard.local[common.within(shard.tensor_slice)] if shard.shape else shard.local
    if common == piece.tensor_slice and target.is_contiguous() and target.device.type == "cpu":
        reader.read_piece(piece.begin, 0, bytes_of(target))
        return
    first, last = byte_span(common, piece.tensor_slice, item_bytes)
    start, stop = reader.widen(first, last, piece_bytes)
    # Take whole rows of the first dimension, so that the staged bytes can be viewed as a tensor.
    row_bytes = piece_bytes // piece.tensor_slice.shape[0] if piece.tensor_slice.shape else piece_bytes
    staged = torch.empty(stop - start, dtype=torch.uint8)
    reader.read_piece(piece.begin, start, bytes_of(staged))
    top = first // row_bytes
    rows = -(-last // row_bytes) - top
    if top * row_bytes < start or (top + rows) * row_bytes > stop:
        # We need only the middle of a wide row: pad to whole rows.
        padded = torch.empty(rows * row_bytes, dtype=torch.uint8)
        begin = max(start, top * row_bytes)
        end = min(stop, (top + rows) * row_bytes)
        padded[begin - top * row_bytes : end - top * row_bytes] = staged[begin - start : end - start]
        block = padded
    else:
        block = staged[top * row_bytes - start : (top + rows) * row_bytes - start]
    if not shard.shape:
        target.copy_(block.view(DTYPES[shard.dtype]).reshape(()))
        return
    if block.storage_offset() % item_bytes:
        block = block.clone()
    shape = (rows, *piece.tensor_slice.shape[1:])
    seen = TensorSlice((piece.tensor_slice.offset[0] + top, *piece.tensor_slice.offset[1:]), shape)
    target.copy_(block.view(DTYPES[shard.dtype]).reshape(shape)[common.within(seen)])
