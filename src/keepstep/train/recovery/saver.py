"""Saves of a run: behind training, or waited for until the step is on disk; and which saves were skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep import __version__
from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.dump import dump_config
from keepstep.core.errors import CheckpointError, NotSavedError, StopRequested
from keepstep.core.units import format_seconds
from keepstep.train.context import RunContext
from keepstep.train.recovery.attempt import sequence_before_command
from keepstep.train.state import TrainState
from keepstep.train.telemetry.recorder import Recorder

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 15.0
Values = Callable[[], Mapping[str, Any]]
"""The plain values that are saved next to the tensors."""


def run_metadata(context: RunContext) -> dict[str, Any]:
    """What every checkpoint of a run says about it."""
    return {
        "keepstep": __version__,
        "torch": torch.__version__,
        "world_size": context.world.ranks.world_size,
        "config": dump_config(context.config),
    }


class Saver:
    """The run's checkpointer, and its records of saves."""

    def __init__(self, context: RunContext, recorder: Recorder) -> None:
        self._context, self._recorder = context, recorder
        self._metadata = run_metadata(context)
        self._blocked_s = 0.0
        self._save_s = 0.0
        self._waited_for = False
        self._failed: list[int] = []
        self._failing = 0
        """Saves that failed since the last commit."""
        self.saved_step = -1
        """The newest step that was on disk when the run resumed."""
        config = context.config.checkpoint
        self._where = Path(config.folder) if config.folder else context.folder.checkpoints
        self.checkpointer = Checkpointer(self._where, config, on_event=self._event)
        if context.is_first:
            self.checkpointer.check_place()
            if config.folder:
                context.leases.hold(config.folder)
            self.checkpointer.fence = context.leases.fence
            if context.leases.contested:
                self.checkpointer.remove_uncommitted()
        if not config.autoresume:
            newest_sequence = self.checkpointer.newest_sequence
            self.checkpointer.resume_after(sequence_before_command(context, newest_sequence, recorder.note))

    def lead(self) -> None:
        """This process and its siblings save for all from now on."""
        if self._context.is_first:
            if self._context.config.checkpoint.folder:
                self._context.leases.hold(self._context.config.checkpoint.folder)
            self.checkpointer.fence = self._context.leases.fence
        newest = self.checkpointer.find()
        self.saved_step = -1 if newest is None else newest.step

    @property
    def skipped_steps(self) -> list[int]:
        """Steps whose save was due and failed, on the first process; not those that were saved later."""
        return list(self._failed)

    def save(self, state: TrainState, values: Values) -> None:
        """Start to save the step just done, behind training. A save that fails is skipped."""
        try:
            self._write(self.checkpointer.save_async, state, values)
        except CheckpointError as error:
            # Without `checkpoint.asynchronous` this waits for the disk, and a full one is no reason to end the run.
            step = state.clock.step
            self._event("warning", {"reason": "checkpoint_failed", "message": error.message, "step": step})

    def ensure_saved(
        self, state: TrainState, values: Values, snapshot: Callable[[], bool], at_least: int | None = None
    ) -> None:
        """Return with the step just done, or any step from `at_least` on, committed and verified.

        Where that fails, `snapshot` copies the state into the agent's memory (True if it can), and the save is retried
        for `checkpoint.retry_s`. NotSavedError after that.
        """
        self._waited_for = True
        with self._counting():
            self.checkpointer.wait()
        self._waited_for = False
        newest, _ = self.checkpointer.last_committed or (-1, 0.0)
        step = state.clock.step
        if at_least is None:
            on_disk = step in (newest, self.saved_step)
        else:
            step = max(newest, self.saved_step)
            on_disk = step >= at_least
        if on_disk and (step < 0 or self._damage(step) is None):
            return
        failure = self._try_save(state, values)
        if failure is not None:
            self._retry(failure, state, values, in_memory=snapshot())

    def _damage(self, step: int) -> CheckpointError | None:
        """What is wrong on disk with the checkpoint of a step; the same on every process."""
        problem = self.checkpointer.check_committed(step)
        return None if problem is None else CheckpointError(f"step {step} is not intact on disk: {problem}")

    def _try_save(self, state: TrainState, values: Values) -> CheckpointError | None:
        """Save and verify; returns why it failed, or None."""
        self._context.heartbeat.busy()
        self._check_grace(state.clock.step)
        self._waited_for = True
        try:
            self._write(self.checkpointer.save, state, values)
            return self._damage(state.clock.step)
        except CheckpointError as error:
            return error
        finally:
            self._waited_for = False

    def _retry(self, failure: CheckpointError, state: TrainState, values: Values, *, in_memory: bool) -> None:
        step, limit_s = state.clock.step, self._retry_limit_s()
        stop_before, pause_s, deadline = self._stop_requested(), FIRST_RETRY_S, time.monotonic() + limit_s
        self._recorder.event("warning", step=step, reason="waiting_for_storage", message=failure.message)
        rescue = f", or run keepstep ckpt rescue {self._context.folder.root} --to FOLDER" if in_memory else ""
        self._recorder.note(f"warning: {failure.message}; retrying for {format_seconds(limit_s)}")
        self._recorder.note(f" hint: {failure.hint or 'check the storage'}{rescue}")
        while self._agree(time.monotonic() + pause_s < deadline) and (stop_before or not self._stop_requested()):
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_RETRY_S)
            again = self._try_save(state, values)
            if again is None:
                self._recorder.note(f"step {step} is on disk now")
                return
            failure = again
        if self._stop_requested():
            raise failure
        newest, _ = self.checkpointer.last_committed or (self.saved_step, 0.0)
        on_disk = f"the newest checkpoint is step {newest}" if newest >= 0 else "there is no checkpoint"
        raise NotSavedError(
            f"{failure.message}; {on_disk}",
            f"{failure.hint or 'check the storage'}; then run keepstep train {self._context.folder.config} to continue",
            failure.exit_code,
        )

    def _retry_limit_s(self) -> float:
        """Seconds that retries may take: less where a scheduler kills the run before."""
        limit_s, grace_s = self._context.config.checkpoint.retry_s, self._context.config.resilience.grace_s
        return min(limit_s, grace_s) if grace_s and self._stop_requested() else limit_s

    def _agree(self, value: bool) -> bool:
        """The first process's answer, on every process."""
        answer = torch.tensor(float(value))
        dist.broadcast(answer, src=0)
        return bool(answer)

    def _stop_requested(self) -> bool:
        """Whether any process was asked to stop; the same on every process."""
        asked = torch.tensor(float(self._context.stop.requested))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    def _write(self, write: Callable[..., None], state: TrainState, values: Values) -> None:
        metadata = {**self._metadata, "loss": self._recorder.last_loss}
        with self._counting():
            write(state.clock.step, {**state.tensors(), **values()}, metadata)

    def before_update(self) -> None:
        """Weights are about to change: a save under way must have its copy, and may have news."""
        with self._counting():
            self.checkpointer.before_update()
        self.checkpointer.poll()

    def _check_grace(self, step: int) -> None:
        """Asked to stop with too little time for a save: let the one under way finish, and leave it at that."""
        stop, grace_s = self._context.stop, self._context.config.resilience.grace_s
        if not grace_s:
            return
        # Signals and commits reach some processes before others.
        seen = torch.tensor([stop.asked_s_ago - grace_s, float(stop.requested), self._save_s])
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        over_s, asked, save_s = seen.tolist()
        if asked and -over_s < save_s:
            self.checkpointer.wait()
            saved, _ = self.checkpointer.last_committed or (0, 0.0)
            raise StopRequested(
                f"stopped on request: {-over_s:.1f} s of grace are left and a save takes {save_s:.1f} s, so the "
                f"checkpoint of step {saved} stands and {step - saved} steps will be done again",
                "start the same command to resume",
            )

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the time in here as time that training waits for a save."""
        started = time.perf_counter()
        try:
            yield
        finally:
            blocked_s = time.perf_counter() - started
            self._recorder.blocked_s += blocked_s
            self._blocked_s += blocked_s

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "checkpoint_committed":
            self._committed(fields)
            return
        self._recorder.event(kind, **fields)
        if kind == "warning" and fields.get("reason") == "checkpoint_failed":
            self._save_failed(int(fields["step"]), str(fields["message"]))
        elif kind == "warning":
            self._recorder.note(f"warning: {fields['message']}")

    def _committed(self, fields: dict[str, Any]) -> None:
        self._recorder.event("checkpoint_committed", **fields, blocked_s=self._blocked_s)
        self._recorder.last_saved_at = time.monotonic()
        self._blocked_s, self._save_s = 0.0, float(fields["seconds"])
        self._failed = [step for step in self._failed if step != fields["step"]]
        self._recorder.skipped_saves = len(self._failed)
        if self._failing > 1:
            self._recorder.note(f"saves work again: step {fields['step']} is on disk")
        self._failing = 0
        self._recorder.callbacks.save(int(fields["step"]), f"{self._where}/{fields['folder']}")

    def _save_failed(self, step: int, message: str) -> None:
        """Count a save that was due. One that is waited for is retried, and reported there."""
        if self._waited_for:
            return
        self._failed.append(step)
        self._recorder.skipped_saves = len(self._failed)
        self._failing += 1
        # The first of a series is enough on the terminal: events.jsonl has them all.
        if self._failing == 1:
            self._recorder.note(f"warning: {message}; this save is skipped, training continues")
