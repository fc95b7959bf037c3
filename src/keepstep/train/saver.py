"""Saves of a run: behind training or at once, what they cost it, and whether there is time for one more."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import StopRequested
from keepstep.resilience.signals import StopFlag
from keepstep.train.record import Recorder


class Saver:
    """A checkpointer, and the run's records about it."""

    def __init__(self, where: Path, config: CheckpointConfig, recorder: Recorder) -> None:
        self._recorder = recorder
        self._blocked_s = 0.0
        self._save_s = 0.0
        self.checkpointer = Checkpointer(where, config, on_event=self._event)

    def save(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any], durable: bool) -> None:
        """Save a step: behind training, or so that it is on disk when this returns."""
        write = self.checkpointer.save if durable else self.checkpointer.save_async
        with self._counting():
            write(step, state, metadata)

    def before_update(self) -> None:
        """Weights are about to change: a save under way must have its copy, and may have news."""
        with self._counting():
            self.checkpointer.before_update()
        self.checkpointer.poll()

    def check_grace(self, step: int, stop: StopFlag, grace_s: float) -> None:
        """Asked to stop with too little time for a save: let the one under way end, and leave it at that."""
        if not grace_s:
            return
        # Signals and commits are news to some processes before they are to others.
        told = torch.tensor([stop.asked_s_ago - grace_s, float(stop.requested), self._save_s])
        dist.all_reduce(told, dist.ReduceOp.MAX)
        over_s, asked, save_s = told.tolist()
        if asked and -over_s < save_s:
            self.checkpointer.wait()
            saved, _ = self.checkpointer.last_committed or (0, 0.0)
            raise StopRequested(
                f"stopped on request: {-over_s:.1f} s of grace are left and a save takes {save_s:.1f} s, so the "
                f"checkpoint of step {saved} stands and {step - saved} steps will be done again",
                "start the same command to go on",
            )

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Time in here is time that training stands still for a save."""
        started = time.perf_counter()
        try:
            yield
        finally:
            blocked_s = time.perf_counter() - started
            self._recorder.blocked_s += blocked_s
            self._blocked_s += blocked_s

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "checkpoint_committed":
            self._recorder.event(kind, **fields, blocked_s=self._blocked_s)
            self._recorder.last_saved_at = time.time()
            self._blocked_s, self._save_s = 0.0, float(fields["seconds"])
            return
        self._recorder.event(kind, **fields)
        if kind in ("warning", "fault"):
            self._recorder.note(f"warning: {fields.get('message', kind)}")
