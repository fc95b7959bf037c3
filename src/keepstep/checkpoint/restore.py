"""Filling tensors from a committed step, whatever layout wrote it and whatever layout reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from keepstep.checkpoint.boxes import Box, row_runs
from keepstep.checkpoint.layout import DTYPES, RANK_KEY, Holding, holding, split_state
from keepstep.checkpoint.manifest import ITEM_BYTES, Manifest, Piece
from keepstep.checkpoint.shards import ShardReader
from keepstep.checkpoint.store import Store
from keepstep.core.errors import StateMismatchError


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy().data)


def match_names(
    manifest: Manifest,
    into: Mapping[str, Any],
    holdings: list[Holding],
    where: str,
    strict: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> None:
    """Refuse a state that does not fit the checkpoint: sections may be left out whole, but not single tensors.

    `elsewhere` are names that other processes have a place for (the other stages of a pipeline).
    """
    wanted = {held.name: held for held in holdings if not held.name.startswith(f"{RANK_KEY}.")}
    sections = [f"{key}." for key in into if key != RANK_KEY]
    unread = sorted(
        n for n in manifest.tensors if n not in wanted and n not in elsewhere and n.startswith(tuple(sections))
    )
    if unread and strict:
        raise StateMismatchError(
            f"{where} holds the tensor {unread[0]}" + (f" and {len(unread) - 1} more" if len(unread) > 1 else "")
            + ", which this run has no place for", _mismatch_hint(unread[0]),
        )  # fmt: skip
    missing = sorted(set(wanted) - set(manifest.tensors))
    if missing and strict:
        raise StateMismatchError(
            f"{where} does not hold the tensor {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            _mismatch_hint(missing[0]),
        )
    for name, held in wanted.items():
        entry = manifest.tensors.get(name)
        if entry is not None and (entry.dtype, entry.shape) != (held.dtype, held.shape):
            raise StateMismatchError(
                f"{where}: tensor {name} is {entry.dtype} {list(entry.shape)}, "
                f"this run needs {held.dtype} {list(held.shape)}",
                _mismatch_hint(name),
            )


def _mismatch_hint(name: str) -> str:
    if not name.startswith("optimizer."):
        return (
            "it was saved with another model.* or lora.*: give this run another name, "
            "or what it was saved with (config.yaml in its run's folder)"
        )
    return (
        "it has another optimizer's state, or none; "
        "checkpoint.resume_from with checkpoint.skip_optimizer=true takes its weights alone"
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
    """Fill the tensors of `into` and return the plain values with the bytes read; no unchecked byte gets through.

    What belongs to each process (below `rank`) is filled where a process of this number saved it, and left alone else.
    """
    tensors, _ = split_state(into)
    holdings = [holding(name, tensor, rank, world_size) for name, tensor in tensors.items()]
    match_names(manifest, into, holdings, store.locate(folder), strict, elsewhere)
    by_file = _jobs(manifest, holdings)
    bytes_read = 0
    with torch.no_grad(), ThreadPoolExecutor(threads) as pool:
        for file, jobs in sorted(by_file.items()):
            reader = ShardReader(store, folder, manifest.files[file], manifest.algorithm)
            ordered = sorted(jobs, key=lambda job: job[1].begin)
            if threads == 1:
                for held, piece, common in ordered:
                    fill(reader, held, piece, common)
            else:
                # Pieces never overlap in the tensors they fill. `list` lets the first error out.
                list(pool.map(lambda job, reader=reader: fill(reader, *job), ordered))
            bytes_read += reader.bytes_read
    values = dict(manifest.values)
    if rank in manifest.rank_values:
        values[RANK_KEY] = manifest.rank_values[rank]
    return values, bytes_read


def _jobs(manifest: Manifest, holdings: list[Holding]) -> dict[int, list[tuple[Holding, Piece, Box]]]:
    """Which parts of which pieces go into our tensors, by data file."""
    by_file: dict[int, list[tuple[Holding, Piece, Box]]] = defaultdict(list)
    for held in holdings:
        entry = manifest.tensors.get(held.name)
        if entry is None or entry.shape != held.shape or entry.dtype != held.dtype:
            continue
        for piece in entry.pieces:
            common = piece.box.common(held.box) if held.box.count else None
            if common is not None:
                by_file[piece.file].append((held, piece, common))
    return by_file


def files_needed(manifest: Manifest, into: Mapping[str, Any], rank: int, world_size: int) -> set[int]:
    """The data files that hold something for this process."""
    tensors, _ = split_state(into)
    return set(_jobs(manifest, [holding(name, tensor, rank, world_size) for name, tensor in tensors.items()]))


def fill(reader: ShardReader, held: Holding, piece: Piece, common: Box) -> None:
    """Read one piece, or the checked blocks around the part of it that we need, into our tensor."""
    item_bytes = ITEM_BYTES[held.dtype]
    piece_bytes = piece.box.count * item_bytes
    target = held.local[common.within(held.box)] if held.shape else held.local
    if common == piece.box and target.is_contiguous() and target.device.type == "cpu":
        reader.read_piece(piece.begin, 0, bytes_of(target))
        return
    first, last = row_runs(common, piece.box, item_bytes)
    start, stop = reader.widen(first, last, piece_bytes)
    # Whole rows only of the first dimension, so that the staged bytes can be seen as a tensor again.
    row_bytes = piece_bytes // piece.box.shape[0] if piece.box.shape else piece_bytes
    staged = torch.empty(stop - start, dtype=torch.uint8)
    reader.read_piece(piece.begin, start, bytes_of(staged))
    top = first // row_bytes
    rows = -(-last // row_bytes) - top
    if top * row_bytes < start or (top + rows) * row_bytes > stop:
        # A wide row of which we need only the middle: see it element by element.
        padded = torch.empty(rows * row_bytes, dtype=torch.uint8)
        begin = max(start, top * row_bytes)
        end = min(stop, (top + rows) * row_bytes)
        padded[begin - top * row_bytes : end - top * row_bytes] = staged[begin - start : end - start]
        block = padded
    else:
        block = staged[top * row_bytes - start : (top + rows) * row_bytes - start]
    if not held.shape:
        target.copy_(block.view(DTYPES[held.dtype]).reshape(()))
        return
    if block.storage_offset() % item_bytes:
        block = block.clone()
    shape = (rows, *piece.box.shape[1:])
    seen = Box((piece.box.offset[0] + top, *piece.box.offset[1:]), shape)
    target.copy_(block.view(DTYPES[held.dtype]).reshape(shape)[common.within(seen)])
