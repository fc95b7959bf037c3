"""Find the step to resume from and load it: repair damage, else fall back to an older step, never load damage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from keepstep.checkpoint.node_local.loader import NodeLocalLoader
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol import commit, parity
from keepstep.checkpoint.protocol.layout import split_state
from keepstep.checkpoint.protocol.manifest import CommittedCheckpoint
from keepstep.checkpoint.protocol.restore import restore
from keepstep.checkpoint.protocol.retention import reading
from keepstep.checkpoint.storage.store import Store, UnreadableError, open_store
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError, MissingCheckpointError, StateMismatchError, StorageError

READ_HINT = "check that the location exists, can be reached, and is readable with your user or credentials"
_RETRY_WAITS_S = (1.0, 5.0, 20.0)
"""Waits between attempts to read a step: a short storage outage must not cost the steps since an older checkpoint."""
RESUMED_FROM = "resume_from"
"""Metadata key of a step: the value of `resume_from` with which its run started."""


@dataclass(frozen=True)
class LoadedStep:
    """What a load returns, apart from the tensors it filled."""

    step: int
    where: CommittedCheckpoint
    values: dict[str, Any]
    metadata: Mapping[str, Any]
    world_size: int
    """The number of processes that saved it."""
    bytes_read: int
    """Bytes read by this process."""


class CheckpointLoader:
    """The loading half of a `Checkpointer`."""

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._store = open_store(folder)
        self._config = config
        self._on_event = on_event
        self._last: tuple[int, float] | None = None
        self._processes = ProcessGroupInfo()
        self.rank, self.world_size = self._processes.rank, self._processes.world_size
        node_local = config.format == "local" and self.world_size > 1
        self._node_local = NodeLocalLoader(self._store, self._processes) if node_local else None
        parent, _, name = config.resume_from.rstrip("/").rpartition("/")
        self._resume_place = (parent or ".", name) if name else None
        self._resume_after: int | None = None
        self.uses_resume_from = False
        """Whether the last search found the step of `resume_from`, and not one of the run's own steps."""

    def find(self) -> CommittedCheckpoint | None:
        """The newest committed step, or the step of `resume_from` until the run has committed one since; None if none.

        Without `autoresume` it is always the step of `resume_from`, unless there are steps that `resume_after` admits.
        """
        steps = self._candidates()
        return steps[0] if steps else None

    def newest_sequence(self) -> int:
        """The sequence number of the newest commit in the run's own folder; 0 when there is none."""
        return max((step.marker.sequence for step in self._own_steps()), default=0)

    def resume_after(self, sequence: int) -> None:
        """Without `autoresume`: use the run's own steps that were committed after this sequence number."""
        self._resume_after = sequence

    def load(self, where: CommittedCheckpoint, into: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """Fill the tensors of `into` in place and return the plain values; CheckpointError names what is damaged.

        Whole sections (top-level keys) may be left out of `into`; without `strict`, single tensors as well. State
        below the key `rank` is filled if a process with this rank saved it.
        """
        return self._load(where, into, strict).values

    def load_newest(
        self, into: dict[str, Any], strict: bool = True, only: str = "", elsewhere: frozenset[str] = frozenset()
    ) -> LoadedStep | None:
        """Load the newest intact step; a damaged step is repaired or skipped, with an event for each.

        None when there is no step at all. Raises when there are steps but none is intact, because starting over
        silently would lose the run, and when the state does not fit the step. `only` selects one step by the hash of
        its manifest; None then means that it does not exist. `elsewhere` names tensors that are loaded by other calls.
        """
        elsewhere = elsewhere.union(*self._processes.gather(set(split_state(into)[0])))
        problem: CheckpointError | None = None
        tried: set[CommittedCheckpoint] = set()
        waits_s = list(_RETRY_WAITS_S)
        # Search again after each failure: a running job may have deleted the step and committed a newer one.
        while (where := self._next(tried, only)) is not None:
            tried.add(where)
            loaded, problem = self._try_load(where, into, strict, elsewhere)
            while isinstance(problem, UnreadableError) and waits_s:
                wait_s = waits_s.pop(0)
                self._warn("checkpoint_unreadable", f"{problem.message}; retrying in {wait_s:g} s", step=where.step)
                time.sleep(wait_s)
                loaded, problem = self._try_load(where, into, strict, elsewhere)
            if isinstance(problem, StateMismatchError):
                # Nothing is damaged: another configuration saved this. Older steps would not fit either.
                raise problem
            if problem is not None and self._repair(where):
                loaded, problem = self._try_load(where, into, strict, elsewhere)
            if loaded is not None:
                self._last = (loaded.step, where.marker.time)
                return loaded
            assert problem is not None
            if self._still_exists(where):
                self._warn("checkpoint_damaged", problem.message, step=where.step)
        if problem is not None:
            kind = StorageError if isinstance(problem, StorageError) else CheckpointError
            message = f"no checkpoint in {self._store.locate()} can be loaded; the last problem: {problem.message}"
            raise kind(message, problem.hint)
        return None

    def _next(self, tried: set[CommittedCheckpoint], only: str) -> CommittedCheckpoint | None:
        steps = (step for step in self._candidates() if only in ("", step.marker.manifest_hash))
        return next((step for step in steps if step not in tried), None)

    def _try_load(
        self, where: CommittedCheckpoint, into: dict[str, Any], strict: bool, elsewhere: frozenset[str]
    ) -> tuple[LoadedStep | None, CheckpointError | None]:
        """Load on every rank; a failure of one rank is a failure on all."""
        loaded, own = None, None
        try:
            if self._node_local is not None and not self.uses_resume_from:
                self._node_local.fetch(where, into)
            loaded = self._load(where, into, strict, elsewhere)
        except CheckpointError as error:
            own = error
        failures = [failure for failure in self._processes.gather(own) if failure is not None]
        # If any process found damage, waiting does not help: prefer that error.
        failures.sort(key=lambda failure: isinstance(failure, UnreadableError))
        return (None, failures[0]) if failures else (loaded, None)

    def _still_exists(self, where: CommittedCheckpoint) -> bool:
        """Whether a step has not been deleted since it was found."""
        try:
            return commit.read_step(self._source(), where.name) == where
        except FileNotFoundError:
            return False
        except (OSError, CheckpointError):
            return True

    def _repair(self, where: CommittedCheckpoint) -> bool:
        """Rebuild a damaged step from parity or replicas; returns whether anything was replaced."""
        if self._node_local is not None and not self.uses_resume_from:
            dropped = self._node_local.drop_damaged(where)
            if dropped:
                self._warn("checkpoint_repaired", f"{where.name}: fetching {', '.join(dropped)} again", step=where.step)
            return bool(dropped)
        rebuilt: list[str] = []
        if self.rank == 0:
            with suppress(OSError, CheckpointError):
                _, rebuilt = parity.repair(self._source(), where)
        rebuilt = self._processes.broadcast(rebuilt)
        if rebuilt:
            message = f"{where.name}: rebuilt {', '.join(rebuilt)} from parity"
            self._warn("checkpoint_repaired", message, step=where.step)
        return bool(rebuilt)

    def _load(
        self, where: CommittedCheckpoint, into: dict[str, Any], strict: bool, elsewhere: frozenset[str] = frozenset()
    ) -> LoadedStep:
        store = self._source()
        with reading(store, where.name):
            manifest = commit.read_manifest(store, where)
            threads = self._processes.threads(share=1)
            values, bytes_read = restore(
                store, where.name, manifest, into, self.rank, self.world_size, strict, threads, elsewhere
            )
        return LoadedStep(manifest.step, where, values, manifest.metadata, manifest.world_size, bytes_read)

    def _source(self) -> Store:
        return open_store(self._resume_place[0]) if self.uses_resume_from and self._resume_place else self._store

    def _candidates(self) -> list[CommittedCheckpoint]:
        """The steps to try, best first. A run with steps of its own resumes from those, not from `resume_from`."""
        own = self._own_steps() if self._config.autoresume or self._resume_after is not None else []
        if not self._config.autoresume:
            own = [step for step in own if step.marker.sequence > (self._resume_after or 0)]
        if self._resume_place is not None:
            own = self._saved_after_resume(own)
        self.uses_resume_from = self._resume_place is not None and not own
        return self._on_first_rank(self._named_step) if self.uses_resume_from else own

    def _own_steps(self) -> list[CommittedCheckpoint]:
        return self._node_local.steps() if self._node_local is not None else self._on_first_rank(self._committed_steps)

    def _saved_after_resume(self, steps: list[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
        """The newest of the run's own steps that were saved since it started from `resume_from`."""
        reads = self._node_local.is_node_leader if self._node_local is not None else self.rank == 0
        known: dict[str, bool] = {}
        for step in steps if reads else ():
            try:
                resumed_from = commit.read_manifest(self._store, step).metadata.get(RESUMED_FROM)
            except CheckpointError:
                # Damaged, or on another node; loading finds out which.
                continue
            known[step.name] = resumed_from == self._config.resume_from
            if not known[step.name]:
                break
        for others in self._processes.gather(known):
            known |= others
        names = list(takewhile(lambda name: known.get(name, True), (step.name for step in steps)))
        return steps[: len(names)] if any(known.get(name) for name in names) else []

    def _on_first_rank(self, search: Callable[[], list[CommittedCheckpoint]]) -> list[CommittedCheckpoint]:
        """Search on rank 0; its result or its error applies to all ranks."""
        found: list[CommittedCheckpoint] | CheckpointError = []
        if self.rank == 0:
            try:
                found = search()
            except CheckpointError as error:
                found = error
            except OSError as error:
                place = self._config.resume_from if search == self._named_step else self._store.locate()
                found = StorageError(f"checkpoints in {place} cannot be listed: {error}", READ_HINT)
        found = self._processes.broadcast(found)
        if isinstance(found, CheckpointError):
            raise found
        return found

    def _committed_steps(self) -> list[CommittedCheckpoint]:
        damages: list[CheckpointError] = []
        steps = commit.committed_steps(self._store, damages.append)
        for error in damages:
            self._warn("checkpoint_damaged", error.message)
        # With `resume_from` there is another step to start from, which the user named.
        if damages and not steps and self._resume_place is None:
            raise damages[0]
        return steps

    def _named_step(self) -> list[CommittedCheckpoint]:
        assert self._resume_place is not None
        folder, name = self._resume_place
        try:
            return [commit.read_step(open_store(folder), name)]
        except FileNotFoundError as error:
            raise MissingCheckpointError(
                f"checkpoint.resume_from is {self._config.resume_from}, but that is not a committed step",
                "keepstep ckpt ls RUN lists the steps of a run",
            ) from error

    def _event(self, kind: str, facts: dict[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(kind, facts)

    def _warn(self, reason: str, message: str, **facts: Any) -> None:
        self._event("warning", {"reason": reason, "message": message, **facts})
