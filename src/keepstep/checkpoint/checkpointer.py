"""`Checkpointer`: what the training loop sees. It knows state dicts, not models."""

from __future__ import annotations

import errno
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint import commit
from keepstep.checkpoint.background import WriterProcess
from keepstep.checkpoint.commit import Attempt
from keepstep.checkpoint.finding import BEGAN_AT, Finder, LoadedStep
from keepstep.checkpoint.hashing import best_algorithm
from keepstep.checkpoint.layout import RANK_KEY, Holding, check_plain, holding, settle_owners, split_state
from keepstep.checkpoint.manifest import Marker, StepFolder
from keepstep.checkpoint.nearby import Nearby
from keepstep.checkpoint.retention import Rules
from keepstep.checkpoint.shards import PieceSpec, lay_out
from keepstep.checkpoint.snapshot import Snapshot
from keepstep.checkpoint.store import Store, open_store
from keepstep.checkpoint.together import Together
from keepstep.checkpoint.writer import Job, Publication
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError, ConfigError
from keepstep.core.units import format_bytes

SPARE_BYTES = 16 * 1024 * 1024
"""Left over for manifests when a save is weighed against the free space."""
VISIBLE_DELAY_S = 0.05
CLOSE_TIMEOUT_S = 120.0
"""How long `close` lets a save go on; after that the writer gives the other ranks half a minute more."""


@dataclass(frozen=True)
class _Plan:
    """Which pieces this process writes, for one layout of the state."""

    layout: list[tuple[Any, ...]]
    specs: list[PieceSpec]
    size_bytes: int


class Checkpointer:
    """Saves a run's state so that it cannot be lost, and finds it again.

    Every process makes one with the same arguments, after the process group if there is one. All methods but `load`,
    `before_update`, `poll`, `prepare` and `close` are collective. `on_event(kind, facts)` is only called from inside
    them: `checkpoint_started`, `checkpoint_committed`, and `warning` with a `reason` and a `message`.
    """

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._config = config
        self._place = str(folder)
        self._store: Store = open_store(folder)
        self._on_event = on_event
        self._last: tuple[int, float] | None = None
        self._snapshot: Snapshot | None = None
        self._writer: WriterProcess | None = None
        self._plan: _Plan | None = None
        self._sequence: int | None = None
        self._unfinished: list[str] | None = None
        """Folders of saves that failed, to be cleared away; None before the first save, when any may lie there."""
        self._flying: Attempt | None = None
        self._report: dict[str, Any] | None = None
        self._together = Together()
        self.rank, self.world_size = self._together.rank, self._together.world_size
        self._nearby = Nearby(self._store, self._together) if config.format == "local" and self.world_size > 1 else None
        self._finder = Finder(self._store, config, self._together, self._nearby, self._warn)

    @property
    def last_committed(self) -> tuple[int, float] | None:
        """Step and unix time of the newest commit this process knows of, or None."""
        self.poll()
        return self._last

    def check_place(self) -> None:
        """Raise where no save can ever succeed; what may pass, such as a full disk, is no reason not to begin."""
        probe = f".probe-{secrets.token_hex(4)}"
        try:
            self._store.replace(probe, b"")
            self._store.remove(probe)
        except OSError as error:
            never = (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)
            if isinstance(error, never) or error.errno == errno.EROFS:
                raise ConfigError(
                    f"checkpoint.folder {self._store.locate()} cannot be written: {error.strerror or error}",
                    "name a folder, or a bucket that exists, which this process may write to",
                ) from error

    # ---------------------------------------------------------------- saving

    def save(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Save and commit; returns when the step is on disk, raises when it is not."""
        self._start(step, state, metadata)
        failure = self._settle()
        if failure is not None:
            raise CheckpointError(f"step {step} is not committed: {failure}")

    def save_async(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Start a save and return; the state's tensors must not change before `before_update` has returned.

        A save that is still being written delays this one, visibly. A save that fails becomes a `warning` event.
        """
        if not self._config.asynchronous:
            self.save(step, state, metadata)
            return
        try:
            self._start(step, state, metadata)
        except CheckpointError as error:
            self._warn("checkpoint_failed", error.message, step=step)

    def before_update(self) -> None:
        """Call before anything changes the saved tensors (before `optimizer.step()`); waits for the copy if need be."""
        if self._snapshot is not None:
            self._snapshot.before_update()

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make the copy buffer and start the writer ahead of the first save, which then costs what later ones do."""
        tensors, _ = split_state(state)
        holdings = [holding(name, tensor, self.rank, self.world_size) for name, tensor in tensors.items()]
        needed = sum(held.local.nbytes for held in holdings if held.owned is not False)
        self._ensure_writer().ensure(needed, cuda=any(held.local.is_cuda for held in holdings))

    def poll(self) -> None:
        """Deliver the events of a save that ended in the background; cheap, call it every step."""
        if self._flying is not None and self._report is None and self._writer is not None:
            self._take_report(self._writer.report(0))

    def wait(self) -> None:
        """Return when no save is under way."""
        self._settle()

    def close(self) -> None:
        """Let the save under way end, then let go of the writer and the memory.

        Not collective: a run that breaks closes too, and its other processes may be gone. A healthy run calls `wait`
        first: with node-local checkpoints other nodes' copies need this writer until the commit.
        """
        if self._writer is not None:
            if self._flying is not None and self._report is None:
                assert self._snapshot is not None
                self._snapshot.join()
                self._take_report(self._writer.report(CLOSE_TIMEOUT_S))
            self._flying, self._report = None, None
            self._writer.close()
            self._writer = None
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def _start(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        self._settle(before=step)
        tensors, plain = split_state(state)
        check_plain(metadata, "metadata")
        rank_values = plain.pop(RANK_KEY, {})
        holdings = [holding(name, tensor, self.rank, self.world_size) for name, tensor in tensors.items()]
        if self._config.format == "full":
            holdings = _gathered(holdings, tensors, self._together)
        layout = [(held.name, held.dtype, held.shape, held.box) for held in holdings]
        known = self._plan is not None and self._plan.layout == layout
        self._tidy()
        proposals = self._together.gather((known, self._propose(step) if self.rank == 0 else None))
        if not all(same for same, _ in proposals):
            owned = settle_owners(holdings, self.rank, self.world_size, self._together.group)
            self._plan = _Plan(layout, *lay_out([(held.name, held.dtype, held.shape, held.box) for held in owned]))
            self._total_bytes = sum(self._together.gather(self._plan.size_bytes))
        plan = self._plan
        assert plan is not None
        attempt, free_bytes, failure = proposals[0][1]
        if attempt is None:
            raise CheckpointError(f"step {step} is not committed: {failure}")
        self._check_space(free_bytes)
        self._event("checkpoint_started", {"step": step})
        snapshot = self._ensure_writer()
        writer = self._writer
        assert writer is not None
        memory = {(held.name, held.box): held.local for held in holdings}
        rules = Rules(self._config.keep, self._config.keep_every, self._config.keep_best)
        facts = {**metadata, BEGAN_AT: self._config.resume_from} if self._config.resume_from else dict(metadata)
        publication = Publication(plain, facts, rules, self._config.parity) if self.rank == 0 else None
        job = Job(
            place=self._place,
            attempt=attempt,
            rank=self.rank,
            size_bytes=plan.size_bytes,
            specs=plan.specs,
            holds={held.name: (held.dtype, held.shape) for held in holdings},
            rank_values=rank_values,
            publication=publication,
            threads=self._together.threads(share=2),
            peers=self._nearby.peers(self._place, writer) if self._nearby is not None else None,
        )
        self._flying, self._report = attempt, None

        def copied(error: Exception | None) -> None:
            if error is None:
                writer.submit(job)
            else:
                writer.fail(f"rank {self.rank} could not copy its state: {error}")

        try:
            snapshot.start([(s, memory[s.tensor, s.box]) for s in plan.specs], plan.size_bytes, copied)
        except (OSError, RuntimeError) as error:
            # Out of host memory, say. The other ranks are under way: this one must fail like a writer, not alone.
            copied(error)

    def _propose(self, step: int) -> tuple[Attempt | None, int | None, str]:
        """Rank 0 chooses folder, sequence number and token, and looks at the free space; or says why it cannot."""
        try:
            return self._new_attempt(step), self._store.free_bytes(), ""
        except (OSError, CheckpointError) as error:
            return None, None, str(error)

    def _new_attempt(self, step: int) -> Attempt:
        if self._sequence is None:
            self._sequence = max((found.marker.sequence for found in commit.committed_steps(self._store)), default=0)
        self._sequence += 1
        folder = commit.free_folder(self._store, step)
        return Attempt(step, self._sequence, folder, secrets.token_hex(4), self.world_size, best_algorithm())

    def _tidy(self) -> None:
        """Clear away what jobs that were killed, and saves of this one that failed, have left half written.

        One process for each disk does so, while nobody writes: else the room is gone for every save to come.
        """
        first, failed, self._unfinished = self._unfinished is None, self._unfinished or [], []
        if first and self._nearby is not None:
            self._nearby.share_descriptions()
        if not (self._nearby.leads if self._nearby is not None else self.rank == 0):
            return
        try:
            for name in commit.leftovers(self._store) if first else failed:
                commit.remove_leftover(self._store, name)
        except (OSError, CheckpointError) as error:
            self._warn("checkpoint_retention", f"what was never committed could not be removed: {error}")

    def _check_space(self, free_bytes: int | None) -> None:
        copies = 2 if self._config.parity or self._nearby is not None else 1
        nodes = self._nearby.node_count if self._nearby is not None else 1
        needed = self._total_bytes * copies // nodes + SPARE_BYTES
        if free_bytes is not None and free_bytes < needed:
            raise CheckpointError(
                f"{self._store.locate()} has {format_bytes(free_bytes)} free and this save needs "
                f"{format_bytes(needed)}: it is skipped, the run goes on",
                "free some space, or lower checkpoint.keep",
            )

    def _ensure_writer(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = Snapshot()
        if self._writer is not None and not self._writer.alive:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = WriterProcess(self._snapshot.handle)
            if self._nearby is not None:
                self._nearby.forget()
        return self._snapshot

    def _settle(self, before: int | None = None) -> str | None:
        """Wait for the save under way, on every rank; what went wrong with it, or None."""
        if self._flying is None:
            return None
        attempt, began = self._flying, time.monotonic()
        assert self._snapshot is not None
        assert self._writer is not None
        self._snapshot.join()
        if self.rank == 0:
            self.poll()
        elif self._report is None:
            self._take_report(self._writer.report(None))
        reports = self._together.gather(self._report)
        if reports[0] is None:
            # A rank whose writer died leaves no part file: without this the commit would wait for it for half an hour.
            if self.rank == 0:
                if any(report and report["kind"] == "failed" for report in reports):
                    self._writer.abort(attempt.token)
                self._take_report(self._writer.report(None))
            reports[0] = self._together.share(self._report)
        self._flying, self._report = None, None
        waited_s = time.monotonic() - began
        if before is not None and waited_s > VISIBLE_DELAY_S and self.rank == 0:
            message = (
                f"the save of step {before} waited {waited_s:.1f} s for the one of step {attempt.step} to be written"
            )
            self._warn("checkpoint_delayed", message, step=before, seconds=waited_s)
        if reports[0]["kind"] == "committed":
            self._last = (attempt.step, reports[0]["marker"]["time"])
            return None
        assert self._unfinished is not None
        self._unfinished.append(attempt.folder)
        failed = [report["message"] for report in reports if report["kind"] == "failed"]
        return str(failed[0])

    def _take_report(self, report: dict[str, Any] | None) -> None:
        """Turn a writer's report into events."""
        if report is None or self._flying is None:
            return
        self._report = report
        step = self._flying.step
        if report["kind"] == "failed":
            self._warn("checkpoint_failed", f"step {step} is not committed: {report['message']}", step=step)
        elif report["kind"] == "committed":
            marker = Marker(**report["marker"])
            self._last = (step, marker.time)
            facts = {"step": step, "folder": report["folder"], "bytes": marker.data_bytes, "seconds": report["seconds"]}
            self._event("checkpoint_committed", facts)
            for note in report["notes"]:
                self._warn("checkpoint_retention", note, step=step)

    # ---------------------------------------------------------------- loading

    def find(self) -> StepFolder | None:
        """The newest committed step; the one that `resume_from` names until there is one that came after it.

        None when there is none. Without `autoresume` always the one that `resume_from` names, unless there are steps
        that `go_on_after` lets count.
        """
        return self._finder.find()

    def newest_sequence(self) -> int:
        """The sequence number of the newest commit in the run's own place; 0 when there is none."""
        return self._finder.newest_sequence()

    def go_on_after(self, sequence: int) -> None:
        """Without `autoresume`: count the run's own steps committed after this number, and no earlier ones."""
        self._finder.own_after = sequence

    @property
    def begins(self) -> bool:
        """Whether what was found or loaded last is the step that `resume_from` names, and not one of the run's own."""
        return self._finder.begins

    def load(self, where: StepFolder, into: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """Fill the tensors of `into` in place and return the plain values; CheckpointError names what is damaged.

        Whole sections (top-level keys) may be left out of `into`; without `strict`, single tensors as well. What lies
        below the key `rank` is filled if a process of this number saved it.
        """
        return self._finder.load(where, into, strict)

    def load_newest(self, into: dict[str, Any], strict: bool = True, only: str = "") -> LoadedStep | None:
        """Load the newest whole step, repairing it or falling back past it if it is damaged, with an event for each.

        None when there is no step at all; when there are steps but none is whole this raises: starting over in
        silence would lose the run. So does a state that does not fit the step. `only` names one step by the hash of its
        manifest, and None then means that it is not there.
        """
        loaded = self._finder.load_newest(into, strict, only)
        if loaded is not None:
            self._last = (loaded.step, loaded.where.marker.time)
        return loaded

    def _event(self, kind: str, facts: dict[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(kind, facts)

    def _warn(self, reason: str, message: str, **facts: Any) -> None:
        self._event("warning", {"reason": reason, "message": message, **facts})


def _gathered(holdings: list[Holding], tensors: Mapping[str, torch.Tensor], together: Together) -> list[Holding]:
    """For `format: full`: every tensor whole on the first process that has it, and what belongs to each alone.

    That is rank 0 for all of them, but for the later stages of a pipeline: rank 0 has no part of those.
    """
    names = [held.name for held in holdings if not held.name.startswith(f"{RANK_KEY}.")]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    alike = len(set(together.gather(digest))) == 1
    held_by = [set(names)] if alike else [set(others) for others in together.gather(names)]
    whole: list[Holding] = []
    for held, tensor in zip(holdings, tensors.values(), strict=True):
        if held.name.startswith(f"{RANK_KEY}."):
            whole.append(held)
            continue
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if together.rank == next(rank for rank, held_there in enumerate(held_by) if held.name in held_there):
            # Host memory, one tensor at a time: the whole model need not fit on one device.
            whole.append(holding(held.name, full.detach().cpu(), 0, 1))
    return whole
