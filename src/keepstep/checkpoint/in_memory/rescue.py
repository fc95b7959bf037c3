"""Write a checkpoint from the snapshots in an agent's memory, without the processes of the run. No torch.

The agent owns the memory and need not take part: it is read through /proc. Processes that still train overwrite their
snapshots in turn, so each one is copied first, and its footer is compared with that before: if it is the same, the copy
is good.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.checkpoint.in_memory.footer import read_description, read_footer
from keepstep.checkpoint.inspect import step_problems
from keepstep.checkpoint.protocol import commit
from keepstep.checkpoint.protocol.commit import Attempt
from keepstep.checkpoint.protocol.manifest import CommittedCheckpoint
from keepstep.checkpoint.protocol.shards import PieceSpec, lay_out
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice
from keepstep.checkpoint.storage.store import Store
from keepstep.core.errors import CheckpointError, StorageFullError
from keepstep.core.proc import available_memory_bytes
from keepstep.core.ranks import MEMORY_NAME
from keepstep.core.units import format_bytes

ATTEMPTS = 20
RETRY_S = 0.1


class _OvertakenError(CheckpointError):
    """The run took a new snapshot while the old one was read."""


@dataclass(frozen=True)
class _Snapshot:
    """One process's part of one step; `metadata` is what every checkpoint of the run says about it."""

    fd: int
    footer: Mapping[str, Any]
    step: int
    rank: int
    world_size: int
    specs: list[PieceSpec]
    metadata: Mapping[str, Any]

    def check_unchanged(self) -> None:
        """Raise if the run has started to overwrite this snapshot."""
        if read_footer(self.fd) != self.footer:
            raise _OvertakenError(
                "the run takes snapshots faster than they can be copied", "try again when the machine is less busy"
            )


def rescue(agent: int, store: Store, after: int = 0) -> CommittedCheckpoint:
    """Commit the newest step in the memory of the process `agent` to `store`, and check every byte of it.

    The sequence number of the commit is above `after`, so that a copy in the run's own folder is the newest one there.
    """
    for attempt in range(ATTEMPTS):
        try:
            with ExitStack() as opened:
                committed = _commit(store, _newest_step(agent, opened), after, opened)
            break
        except _OvertakenError:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(RETRY_S)
    problems = step_problems(store, committed)
    if problems:
        raise CheckpointError(f"the rescued step is damaged: {problems[0]}", "check the disk of the target folder")
    return committed


def _newest_step(agent: int, opened: ExitStack) -> list[_Snapshot]:
    """The parts of the newest complete step, in rank order."""
    steps: dict[tuple[int, int], dict[int, _Snapshot]] = {}
    for fd in _memory_of(agent, opened):
        part = _read_snapshot(fd)
        if part is not None:
            # The same step of another attempt may have other bits, and another number of processes.
            steps.setdefault((part.step, part.footer["attempt"]), {})[part.rank] = part
    for _, parts in sorted(steps.items(), reverse=True):
        world_size = next(iter(parts.values())).world_size
        if sorted(parts) == list(range(world_size)):
            return [parts[rank] for rank in range(world_size)]
    if not steps:
        # Not "overtaken": a run that snapshots at all always has one of its two buffers complete.
        raise CheckpointError(
            f"the agent (process {agent}) holds no snapshot",
            "either the run has not finished a step, or resilience.snapshot_interval is 0",
        )
    newest = max(steps)
    raise _OvertakenError(
        f"the agent (process {agent}) holds step {newest[0]} of ranks {sorted(steps[newest])} only",
        "the other ranks are in the memory of other nodes: free space on the run's disk, so that it can save",
    )


def _memory_of(agent: int, opened: ExitStack) -> list[int]:
    """File descriptors of our own for the agent's snapshot memory."""
    found: list[int] = []
    for entry in Path(f"/proc/{agent}/fd").iterdir():
        with suppress(FileNotFoundError):
            if entry.readlink().name.startswith(f"memfd:{MEMORY_NAME}"):
                found.append(os.open(entry, os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, found[-1])
    return found


def _read_snapshot(fd: int) -> _Snapshot | None:
    footer, description = read_footer(fd), read_description(fd)
    if footer is None or description is None:
        return None
    rank, world_size, pieces = description["layout"]
    specs = [PieceSpec.from_json(raw) for raw in pieces]
    return _Snapshot(fd, footer, int(footer["step"]), rank, world_size, specs, description["metadata"])


def _commit(store: Store, parts: Sequence[_Snapshot], after: int, opened: ExitStack) -> CommittedCheckpoint:
    total_bytes = sum(os.fstat(part.fd).st_size for part in parts)
    free_bytes = store.free_bytes()
    if free_bytes is not None and free_bytes < total_bytes:
        free, needed = format_bytes(free_bytes), format_bytes(total_bytes)
        message = f"{store.locate()} has {free} free, and the step needs {needed}"
        raise StorageFullError(message, "choose a folder on another disk", total_bytes, free_bytes)
    # Copies are out of the run's reach. Without memory for them, what was written is discarded if the run came first.
    sources = parts if total_bytes > available_memory_bytes() else [_copy(part, opened) for part in parts]
    sequence = max(after, commit.newest_sequence(store)) + 1
    attempt = commit.new_attempt(store, parts[0].step, parts[0].world_size, sequence)
    written: set[tuple[str, TensorSlice]] = set()
    try:
        for part in sources:
            _write_part(store, attempt, part, written)
            part.check_unchanged()
    except BaseException:
        store.remove_folder(attempt.folder)
        raise
    written_parts = commit.await_parts(store, attempt, lambda: False, 1.0)
    metadata = {**parts[0].metadata, **parts[0].footer["metadata"]}
    return commit.publish(store, attempt, commit.compose(attempt, written_parts, parts[0].footer["values"], metadata))


def _copy(part: _Snapshot, opened: ExitStack) -> _Snapshot:
    copy = os.memfd_create("keepstep-rescue")
    opened.callback(os.close, copy)
    offset, size = 0, os.fstat(part.fd).st_size
    while offset < size and (done := os.sendfile(copy, part.fd, offset, size - offset)):
        offset += done
    part.check_unchanged()
    return replace(part, fd=copy)


def _write_part(store: Store, attempt: Attempt, part: _Snapshot, written: set[tuple[str, TensorSlice]]) -> None:
    """Write one rank's pieces, without those that another rank holds as well and has written."""
    held = {(spec.tensor, spec.tensor_slice): spec for spec in part.specs if spec.tensor_slice.count}
    mine = {key: held[key] for key in held if key not in written}
    written |= set(mine)
    specs, _ = lay_out([(spec.tensor, spec.dtype, spec.tensor_shape, spec.tensor_slice) for spec in mine.values()])
    holds = {spec.tensor: (spec.dtype, spec.tensor_shape) for spec in part.specs}
    with mmap.mmap(part.fd, 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:

        def read(spec: PieceSpec) -> memoryview:
            source = mine[spec.tensor, spec.tensor_slice]
            return view[source.begin : source.begin + source.size_bytes]

        commit.write_part(store, attempt, part.rank, specs, read, {"holds": holds, "rank_values": {}})
