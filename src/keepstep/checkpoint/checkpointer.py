"""`Checkpointer`: what the training loop sees. It knows state dicts, not models."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint import commit, retention
from keepstep.checkpoint.commit import Attempt
from keepstep.checkpoint.hashing import best_algorithm
from keepstep.checkpoint.layout import DTYPES, RANK_KEY, Holding, holding, settle_owners, split_state
from keepstep.checkpoint.manifest import StepFolder
from keepstep.checkpoint.restore import bytes_of, restore
from keepstep.checkpoint.shards import lay_out
from keepstep.checkpoint.store import Store, open_store
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError

COMMIT_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class LoadedStep:
    """What a load gave back beside the tensors it filled."""

    step: int
    where: StepFolder
    values: dict[str, Any]
    metadata: Mapping[str, Any]
    world_size: int
    """Processes that saved it."""


class Checkpointer:
    """Saves a run's state so that it cannot be lost, and finds it again.

    Every process makes one with the same arguments, after the process group if there is one. `save`, `find`,
    `load_newest` and `close` are collective; `load` is not. `on_event(kind, facts)` is only called from
    inside these methods.
    """

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._config = config
        self._store: Store = open_store(folder)
        self._on_event = on_event
        self._last: tuple[int, float] | None = None
        self._group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                # A group of our own: small CPU messages that never queue behind the training's collectives.
                self._group = dist.new_group(backend="gloo")

    @property
    def last_committed(self) -> tuple[int, float] | None:
        """Step and unix time of the newest commit of this run, or None."""
        return self._last

    def save(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Save and commit; returns when the step is on disk. Collective."""
        began = time.monotonic()
        self._event("checkpoint_started", {"step": step})
        tensors, plain = split_state(state)
        rank_values = plain.pop(RANK_KEY, {})
        holdings = [holding(name, tensor, self.rank, self.world_size) for name, tensor in tensors.items()]
        owned = settle_owners(holdings, self.rank, self.world_size, self._group)
        specs, size_bytes = lay_out([(held.name, held.dtype, held.shape, held.box) for held in owned])
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        memory: dict[Any, Holding] = {(held.name, held.box): held for held in owned}
        for spec in specs:
            target = buffer[spec.begin : spec.begin + spec.size_bytes].view(DTYPES[spec.dtype])
            target.view(spec.box.shape).copy_(memory[spec.tensor, spec.box].local)
        attempt = self._begin(step)
        failure: str | None = None
        try:
            extra = {"holds": {held.name: [held.dtype, held.shape] for held in holdings}, "rank_values": rank_values}
            commit.write_part(self._store, attempt, self.rank, specs, bytes_of(buffer), extra)
        except (OSError, CheckpointError) as error:
            failure = f"rank {self.rank}: {error}"
        self._agree(failure, f"step {step} is not committed")
        committed: StepFolder | None = None
        if self.rank == 0:
            try:
                parts = commit.await_parts(self._store, attempt, lambda: False, COMMIT_TIMEOUT_S)
                committed = commit.publish(self._store, attempt, commit.compose(attempt, parts, plain, metadata))
            except (OSError, CheckpointError) as error:
                failure = str(error)
        self._agree(failure, f"step {step} is not committed")
        committed = self._share(committed)
        assert committed is not None
        self._last = (step, committed.marker.time)
        self._event(
            "checkpoint_committed",
            {
                "step": step,
                "folder": committed.name,
                "bytes": committed.marker.data_bytes,
                "seconds": time.monotonic() - began,
            },
        )
        self._retire()

    def save_async(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Start a save; the state's tensors must not change before `before_update` has returned. Collective."""
        self.save(step, state, metadata)

    def before_update(self) -> None:
        """Call before anything changes the saved tensors (before `optimizer.step()`)."""

    def poll(self) -> None:
        """Deliver events of saves that ended in the background; cheap, call it every step."""

    def find(self) -> StepFolder | None:
        """The newest committed step, or the one that `resume_from` names; None when there is none. Collective."""
        found = self._candidates() if self.rank == 0 else None
        steps = self._share(found)
        assert steps is not None
        return steps[0] if steps else None

    def load(self, where: StepFolder, into: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """Fill the tensors of `into` in place and return the plain values; CheckpointError names what is damaged."""
        return self._load(where, into, strict).values

    def load_newest(self, into: dict[str, Any], strict: bool = True) -> LoadedStep | None:
        """Load the newest whole step, falling back past damaged ones with an event for each. Collective.

        None when there is no step at all; when there are steps but none is whole this raises: starting over in
        silence would lose the run.
        """
        steps: list[StepFolder] | None = self._share(self._candidates() if self.rank == 0 else None)
        assert steps is not None
        problem: CheckpointError | None = None
        for where in steps:
            loaded, failure = None, None
            try:
                loaded = self._load(where, into, strict)
            except CheckpointError as error:
                problem, failure = error, error.message
            failures = [text for text in self._gather(failure) if text]
            if not failures and loaded is not None:
                self._last = (loaded.step, where.marker.time)
                return loaded
            problem = problem or CheckpointError(failures[0])
            self._event("warning", {"step": where.step, "reason": "checkpoint_damaged", "message": failures[0]})
        if problem is not None:
            raise CheckpointError(
                f"no checkpoint in {self._store.locate()} can be loaded; the last problem: {problem.message}",
                problem.hint,
            )
        return None

    def wait(self) -> None:
        """Return when no save is under way. Collective."""

    def close(self) -> None:
        """Wait, then let go of everything. Collective."""
        self.wait()

    def _load(self, where: StepFolder, into: dict[str, Any], strict: bool) -> LoadedStep:
        store = self._store_of(where)
        manifest = commit.read_manifest(store, where)
        values, _ = restore(store, where.name, manifest, into, self.rank, self.world_size, strict)
        return LoadedStep(manifest.step, where, values, manifest.metadata, manifest.world_size)

    def _resume_place(self) -> tuple[str, str] | None:
        parent, _, name = self._config.resume_from.rstrip("/").rpartition("/")
        return (parent or ".", name) if name else None

    def _store_of(self, where: StepFolder) -> Store:
        place = self._resume_place()
        if place is not None and place[1] == where.name:
            return open_store(place[0])
        return self._store

    def _candidates(self) -> list[StepFolder]:
        place = self._resume_place()
        if place is not None:
            try:
                return [commit.read_step(open_store(place[0]), place[1])]
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"checkpoint.resume_from is {self._config.resume_from}, and there is no committed step"
                ) from error

        def damaged(error: CheckpointError) -> None:
            self._event("warning", {"reason": "checkpoint_damaged", "message": error.message})

        return commit.committed_steps(self._store, damaged)

    def _begin(self, step: int) -> Attempt:
        attempt: Attempt | None = None
        if self.rank == 0:
            folder, sequence = commit.next_place(self._store, step)
            attempt = Attempt(step, sequence, folder, secrets.token_hex(4), self.world_size, best_algorithm())
        attempt = self._share(attempt)
        assert attempt is not None
        return attempt

    def _retire(self) -> None:
        if self.rank == 0:
            for step in retention.surplus(commit.committed_steps(self._store), self._config.keep):
                retention.remove_step(self._store, step)

    def _event(self, kind: str, facts: dict[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(kind, facts)

    def _share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _gather(self, value: Any) -> list[Any]:
        """Everyone's value, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _agree(self, failure: str | None, what: str) -> None:
        """Raise on every rank when any rank failed."""
        failures = [text for text in self._gather(failure) if text]
        if failures:
            raise CheckpointError(f"{what}: {failures[0]}")
