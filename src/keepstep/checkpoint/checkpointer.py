"""`Checkpointer`: the interface of this package for the training loop. It knows state dicts, not models."""

from __future__ import annotations

import errno
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keepstep.checkpoint.async_save.plan import SavePlan, make_plan, shards_to_save
from keepstep.checkpoint.async_save.staging import StagingBuffer
from keepstep.checkpoint.async_save.writer import Job, Publication, WriterProcess
from keepstep.checkpoint.loader import RESUMED_FROM, CheckpointLoader
from keepstep.checkpoint.protocol import commit
from keepstep.checkpoint.protocol.commit import Attempt
from keepstep.checkpoint.protocol.layout import RANK_KEY, check_plain, split_state
from keepstep.checkpoint.protocol.lease import NO_FENCE, Fence
from keepstep.checkpoint.protocol.manifest import Marker
from keepstep.checkpoint.protocol.retention import Rules, quick_problem
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError, ConfigError, RunTakenError, StorageError, StorageFullError
from keepstep.core.requests import take_requests
from keepstep.core.units import format_bytes

SPARE_BYTES = 16 * 1024 * 1024
"""Reserved for manifests when the size of a save is compared with the free space."""
VISIBLE_DELAY_S = 0.05
CLOSE_TIMEOUT_S = 120.0
"""How long `close` waits for a save; after that the writer waits half a minute more for the other ranks."""


class Checkpointer(CheckpointLoader):
    """Saves a run's state durably, and finds it again.

    Every process creates one with the same arguments, after the process group if there is one. All methods except
    `load`, `before_update`, `poll`, `prepare` and `close` are collective. They call `on_event(kind, facts)` with the
    kinds `checkpoint_started`, `checkpoint_committed`, and `warning` with a `reason` and a `message`.
    """

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        fence: Fence = NO_FENCE,
    ) -> None:
        super().__init__(folder, config, on_event)
        self.fence = fence
        """The leases under which the committing rank saves; RunTakenError when another process has taken over."""
        self._place = str(folder)
        self._staging: StagingBuffer | None = None
        self._writer: WriterProcess | None = None
        self._plan: SavePlan | None = None
        self._sequence: int | None = None
        self._failed_folders: list[str] | None = None
        """Folders of failed saves, to be deleted; None before the first save, when earlier jobs may have left some."""
        self._pending: Attempt | None = None
        self._report: dict[str, Any] | None = None
        self._requests: Counter[str] = Counter()
        """To object stores, of all ranks, since the last commit."""

    @property
    def last_committed(self) -> tuple[int, float] | None:
        """Step and unix time of the newest commit known to this process, or None."""
        self.poll()
        return self._last

    def check_place(self) -> None:
        """Raise if no save can ever succeed here. A full disk may get free again and is no reason not to start."""
        probe = f".probe-{secrets.token_hex(4)}"
        try:
            self._store.replace(probe, b"")
            self._store.remove(probe)
        except OSError as error:
            permanent = (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)
            if isinstance(error, permanent) or error.errno == errno.EROFS:
                raise ConfigError(
                    f"checkpoint.folder {self._store.locate()} cannot be written: {error.strerror or error}",
                    "name a folder, or a bucket that exists, which this process may write to",
                ) from error

    def save(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Save and commit. The step is on disk when this returns; otherwise it raises.

        StorageFullError says how many bytes are needed and free: the same save may succeed later.
        """
        self._start(step, state, metadata)
        failure = self.wait()
        if failure is not None:
            raise failure

    def save_async(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Start a save and return; the state's tensors must not change before `before_update` has returned.

        If the previous save is still being written, this call waits for it, with a warning. A save that fails becomes
        a `warning` event.
        """
        if not self._config.asynchronous:
            self.save(step, state, metadata)
            return
        try:
            self._start(step, state, metadata)
        except CheckpointError as error:
            self._warn_failed(step, error)

    def before_update(self) -> None:
        """Call before anything changes the saved tensors (before `optimizer.step()`); waits for the copy if needed."""
        if self._staging is not None:
            self._staging.before_update()

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the staging buffer and start the writer, so that the first save costs as much as later ones."""
        shards = shards_to_save(split_state(state)[0], self._processes, full=False).values()
        needed = sum(shard.local.nbytes for shard in shards if shard.owned is not False)
        self._ensure_writer()[0].ensure(needed, cuda=any(shard.local.is_cuda for shard in shards))

    def poll(self) -> None:
        """Deliver the events of a save that ended in the background; cheap, call it every step."""
        if self._pending is not None and self._report is None and self._writer is not None:
            self._take_report(self._writer.report(0))
            self._raise_if_taken([self._report])

    def close(self) -> None:
        """Let the save under way end, then stop the writer and release the memory.

        Not collective, because after a fault the other processes may be gone. A healthy run calls `wait` first: with
        node-local checkpoints the copies of other nodes need this writer until the commit.
        """
        if self._writer is not None:
            if self._pending is not None and self._report is None:
                assert self._staging is not None
                self._staging.join()
                self._take_report(self._writer.report(CLOSE_TIMEOUT_S))
            self._pending, self._report = None, None
            self._writer.close()
            self._writer = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _start(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        self.wait(before=step)
        tensors, plain = split_state(state)
        check_plain(metadata, "metadata")
        rank_values = plain.pop(RANK_KEY, {})
        shards = shards_to_save(tensors, self._processes, full=self._config.format == "full")
        known = self._plan is not None and self._plan.layout == [shard.layout for shard in shards.values()]
        self._remove_uncommitted()
        proposals = self._processes.gather((known, self._propose(step) if self.rank == 0 else None))
        if not all(known for known, _ in proposals):
            self._plan = make_plan(list(shards.values()), self._processes)
        plan = self._plan
        assert plan is not None
        attempt, free_bytes, failure = proposals[0][1]
        if attempt is None:
            raise StorageError(f"step {step} is not committed: {failure}")
        if free_bytes is not None and free_bytes < self._needed_bytes(plan):
            raise self._full(step, plan, free_bytes)
        self._event("checkpoint_started", {"step": step})
        staging, writer = self._ensure_writer()
        job = Job(
            place=self._place,
            attempt=attempt,
            rank=self.rank,
            size_bytes=plan.size_bytes,
            specs=plan.specs,
            holds={shard.name: (shard.dtype, shard.shape) for shard in shards.values()},
            rank_values=rank_values,
            publication=self._publication(plain, metadata) if self.rank == 0 else None,
            threads=self._processes.threads(share=2),
            peers=self._node_local.peers(self._place, writer) if self._node_local is not None else None,
        )
        self._pending, self._report = attempt, None

        def copied(error: Exception | None) -> None:
            if error is None:
                writer.submit(job)
            else:
                writer.fail(f"rank {self.rank} could not copy its state: {error}")

        try:
            staging.start([(s, shards[s.tensor, s.tensor_slice].local) for s in plan.specs], plan.size_bytes, copied)
        except (OSError, RuntimeError) as error:
            # For example out of host memory. The other ranks have started: report this like a failure of the writer.
            copied(error)

    def _publication(self, values: dict[str, Any], metadata: Mapping[str, Any]) -> Publication:
        rules = Rules(self._config.keep, self._config.keep_every, self._config.keep_best)
        facts = {**metadata, RESUMED_FROM: self._config.resume_from} if self._config.resume_from else dict(metadata)
        return Publication(values, facts, rules, self._config.parity, self.fence)

    def _propose(self, step: int) -> tuple[Attempt | None, int | None, str]:
        """On rank 0: a new attempt and the free space, or why there is none."""
        try:
            if self._sequence is None:
                self._sequence = commit.newest_sequence(self._store)
            self._sequence += 1
            attempt = commit.new_attempt(self._store, step, self.world_size, self._sequence)
            return attempt, self._store.free_bytes(), ""
        except (OSError, CheckpointError) as error:
            return None, None, str(error)

    def remove_uncommitted(self) -> None:
        """Delete all unfinished saves. If a paused process wakes up in the middle of one, it then finds no files."""
        with suppress(OSError):
            for name in commit.uncommitted_folders(self._store):
                commit.remove_uncommitted(self._store, name)

    def _remove_uncommitted(self) -> None:
        """Delete what killed jobs and failed saves have left half written, so that its space is free again.

        One process per disk does this, while no save is under way.
        """
        first, failed, self._failed_folders = self._failed_folders is None, self._failed_folders or [], []
        if first and self._node_local is not None:
            self._node_local.share_manifests()
        if not (self._node_local.is_node_leader if self._node_local is not None else self.rank == 0):
            return
        try:
            # After a pause, unfinished saves may be those of a successor.
            self.fence.check()
            for name in commit.uncommitted_folders(self._store) if first else failed:
                commit.remove_uncommitted(self._store, name)
        except (OSError, CheckpointError) as error:
            self._warn("checkpoint_retention", f"an uncommitted step could not be removed: {error}")

    def _needed_bytes(self, plan: SavePlan) -> int:
        """Bytes that one disk needs for a save."""
        copies = 2 if self._config.parity or self._node_local is not None else 1
        nodes = self._node_local.node_count if self._node_local is not None else 1
        return plan.total_bytes * copies // nodes + SPARE_BYTES

    def _full(self, step: int, plan: SavePlan, free_bytes: int | None, quota: str | None = None) -> StorageFullError:
        """`quota` is the remedy where the disk has room, but not for this user."""
        needed_bytes, place = self._needed_bytes(plan), self._store.locate()
        free = f"has {format_bytes(free_bytes)} free" if free_bytes is not None else "is full"
        free = "is at the limit of its quota" if quota else free
        message = f"step {step} is not committed: {place} {free}, and a save needs {format_bytes(needed_bytes)}"
        hint = quota or "free some space there, or lower checkpoint.keep"
        return StorageFullError(message, hint, needed_bytes, free_bytes)

    def _ensure_writer(self) -> tuple[StagingBuffer, WriterProcess]:
        if self._staging is None:
            self._staging = StagingBuffer()
        if self._writer is not None and not self._writer.alive:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = WriterProcess(self._staging.fd)
            if self._node_local is not None:
                self._node_local.reset_peers()
        return self._staging, self._writer

    def wait(self, before: int | None = None) -> CheckpointError | None:
        """Wait until no save is under way; returns why the last one was not committed, or None.

        `before` is the step whose save has to wait, for a warning.
        """
        if self._pending is None:
            return None
        attempt, began = self._pending, time.monotonic()
        assert self._staging is not None
        assert self._writer is not None
        self._staging.join()
        if self.rank == 0:
            self.poll()
        elif self._report is None:
            self._take_report(self._writer.report(None))
        gathered = self._processes.gather((self._report, take_requests()))
        reports = [report for report, _ in gathered]
        if reports[0] is None:
            # A rank whose writer died leaves no part file: without an abort the commit would wait half an hour for it.
            if self.rank == 0:
                if any(report and report["kind"] == "failed" for report in reports):
                    self._writer.abort(attempt.token)
                self._take_report(self._writer.report(None))
            reports[0] = self._processes.broadcast(self._report)
        for counts in (*(own for _, own in gathered), *(report.get("requests", {}) for report in reports)):
            self._requests.update(counts)
        self._pending, self._report = None, None
        self._raise_if_taken(reports)
        waited_s = time.monotonic() - began
        if before is not None and waited_s > VISIBLE_DELAY_S and self.rank == 0:
            message = f"the save of step {before} waited {waited_s:.1f} s for the save of step {attempt.step}"
            self._warn("checkpoint_delayed", message, step=before, seconds=waited_s)
        if reports[0]["kind"] == "committed":
            self._last = (attempt.step, reports[0]["marker"]["time"])
            if self._requests and self.rank == 0:
                self._event("storage_requests", {"step": attempt.step, **self._requests})
            self._requests.clear()
            return None
        assert self._failed_folders is not None
        self._failed_folders.append(attempt.folder)
        return self._failure(attempt.step, [report for report in reports if report["kind"] == "failed"])

    def _raise_if_taken(self, reports: Sequence[dict[str, Any] | None]) -> None:
        for report in reports:
            if report is not None and report.get("taken"):
                raise RunTakenError(report["message"], report["taken"])

    def _failure(self, step: int, reports: list[dict[str, Any]]) -> CheckpointError:
        """The error for a save that was not committed; the same on every rank."""
        hint = next((report["hint"] for report in reports if report.get("hint")), None)
        if self._plan is not None and any(report.get("full") for report in reports):
            return self._full(step, self._plan, None, hint)
        reason = str(reports[0]["message"])
        return StorageError(reason if reason.startswith("step ") else f"step {step} is not committed: {reason}", hint)

    def _take_report(self, report: dict[str, Any] | None) -> None:
        """Turn a writer's report into events."""
        if report is None or self._pending is None:
            return
        self._report = report
        step = self._pending.step
        if report["kind"] == "failed" and not report.get("taken"):
            self._warn_failed(step, self._failure(step, [report]))
        elif report["kind"] == "committed":
            marker = Marker(**report["marker"])
            self._last = (step, marker.time)
            facts = {"step": step, "folder": report["folder"], "bytes": marker.data_bytes, "seconds": report["seconds"]}
            self._event("checkpoint_committed", facts)
            for note in report["notes"]:
                self._warn("checkpoint_retention", note, step=step)

    def check_committed(self, step: int) -> str | None:
        """None when the checkpoint of `step` is on disk with intact manifest, file sizes and headers; else the problem.

        Collective.
        """
        problem: str | None = self._processes.broadcast(self._problem_of(step) if self.rank == 0 else None)
        return problem

    def _problem_of(self, step: int) -> str | None:
        try:
            found = [each for each in commit.committed_steps(self._store) if each.step == step]
        except (OSError, CheckpointError) as error:
            return str(error)
        return quick_problem(self._store, found[0], self._node_local is not None) if found else "it is not there"

    def _warn_failed(self, step: int, error: CheckpointError) -> None:
        room = error.room if isinstance(error, StorageFullError) else {}
        self._warn("checkpoint_failed", error.message, step=step, **room)
