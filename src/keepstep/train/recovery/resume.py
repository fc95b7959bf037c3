"""Resume: find the newest state, in the agent's memory or on disk, and load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.in_memory.snapshots import newest_snapshot
from keepstep.config.schema import RunConfig
from keepstep.data.loader import Loaders, changed_order
from keepstep.interop.initial_weights import WeightsId, load_pretrained
from keepstep.observe.run_folder import read_last_step
from keepstep.train.context import RunContext
from keepstep.train.recovery.best_weights import BestWeights
from keepstep.train.recovery.snapshot_policy import SnapshotPolicy
from keepstep.train.state import TrainState
from keepstep.train.telemetry.recorder import Recorder


def step_settings(config: RunConfig) -> dict[str, str]:
    """Settings that change the bits of a step and need no new run, as a user writes them."""
    schedule = config.schedule
    return {
        "microbatch": str(config.microbatch),
        "compute.compile": str(bool(config.compute.compile)).lower(),
        "optimizer.lr": f"{config.optimizer.lr:g}",
        "schedule.name": schedule.name,
        "schedule.warmup": str(schedule.warmup),
        "schedule.final": f"{schedule.final:g}",
    }


def may_resume(checkpointer: Checkpointer, memory_files: tuple[Path, ...]) -> bool:
    """Whether there seems to be a state to resume from; the same on every process."""
    on_disk = checkpointer.find() is not None
    found = torch.tensor(float(on_disk or newest_snapshot(memory_files) >= 0))
    # A new process gets its state from those that have one.
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


class Resume:
    """Loads a state into the parts of a run that is about to train."""

    def __init__(
        self,
        context: RunContext,
        checkpointer: Checkpointer,
        snapshots: SnapshotPolicy,
        state: TrainState,
        best: BestWeights,
        recorder: Recorder,
        loaders: Loaders,
    ) -> None:
        self._context, self._config = context, context.config
        self._checkpointer, self._snapshots = checkpointer, snapshots
        self._state, self._best, self._recorder, self._loaders = state, best, recorder, loaders
        self.saved_step = -1
        """The newest step that the run has on disk already."""

    def load(self) -> bool:
        """Load from memory or from a checkpoint, whichever is newer; False where there is nothing to load."""
        if self._from_memory() or self._from_disk():
            return True
        self._start_best()
        return False

    def _from_memory(self) -> bool:
        """Load the agent's snapshot, where it is newer than every checkpoint."""
        step = self._snapshots.newest()
        newest = self._checkpointer.find()
        # Steps of another run do not count: a snapshot is newer than where this run began.
        own = None if self._checkpointer.uses_resume_from else newest
        if step is None or (own is not None and own.step > step):
            return False
        if own is not None:
            self.saved_step = own.step
        self.adopt("memory", self._snapshots.restore(step))
        return True

    def _from_disk(self) -> bool:
        settings = self._config.checkpoint
        self._checkpointer.find()
        first_start = self._checkpointer.uses_resume_from
        weights_only = settings.skip_optimizer and first_start
        into = self._state.tensors()
        if weights_only:
            into = {"model": into["model"]}
        loaded = self._checkpointer.load_newest(into)
        if loaded is None:
            return False
        if first_start:
            self._start_best()
        if weights_only:
            self._state.optimizers.adopt(into["model"])
            self._recorder.note(
                f"weights from {loaded.where.name}; optimizer, schedule and data start from the beginning"
            )
        else:
            self._state.adopt(loaded.values["numbers"], into)
            self.adopt(loaded.where.name, loaded.values)
        if not first_start:
            self.saved_step = loaded.step
            if settings.resume_from and settings.autoresume:
                self._recorder.note(
                    f"notice: the run started at {settings.resume_from}; set checkpoint.autoresume=false to start "
                    "there again"
                )
        return True

    def _start_best(self) -> None:
        moved_to = self._best.start(self._context.is_first)
        if moved_to is not None:
            self._recorder.note(f"notice: the best weights of an earlier run of this name were moved to {moved_to}")

    def adopt(self, source: str, values: Mapping[str, Any]) -> None:
        """Take over the plain values of a state whose tensors are loaded."""
        clock = self._state.clock
        if self._context.is_first:
            recorded = read_last_step(self._context.folder.metrics)
            tail = [line for line in values.get("tail", []) if line["step"] <= clock.step]
            self._recorder.complete(tail, recorded)
        if "best" in values:
            self._best.restore(values["best"])
        self._recorder.callbacks.restore(values.get("callbacks", {}))
        self._restore_origin(values.get("origin"))
        self._recorder.event("resume", step=clock.step, folder=source)
        self._recorder.note(f"resumed at step {clock.step} from {source}")
        for key, was in values.get("run", {}).items():
            # Whoever sets resume_from wants the steps of another run.
            if was != (wanted := getattr(self._config, key)) and not self._checkpointer.uses_resume_from:
                self._recorder.note(
                    f"notice: {key} is {wanted}, but the steps up to {clock.step} are of a run with {key}={was}; to "
                    "start a new run, use another name, and another checkpoint.folder if you set one"
                )
        for key, wanted in step_settings(self._config).items():
            if (was := values.get("rates", {}).get(key, wanted)) != wanted:
                self._recorder.note(
                    f"notice: {key} is {wanted} from here on; the steps up to {clock.step} had {was}, and {key}={was} "
                    "keeps that"
                )
        before, now = values.get("order"), self._loaders.train.order_facts
        if before is not None and before != now:
            self._recorder.note(
                f"notice: the order of the data changed ({changed_order(before, now)}): sample {clock.samples:,} "
                "is another row now, so some rows come twice and some not at all; to avoid this, use the data and "
                "the seed that the run started with"
            )

    def _restore_origin(self, origin: WeightsId | None) -> None:
        """Adapters and the reference of preference learning are the weights that the run started with, though the
        folder may hold others by now."""
        if origin is None:
            return
        if self._state.frozen is not None and origin != self._state.origin:
            load_pretrained(self._state.frozen, Path(self._config.finetune.start_from), origin)
        self._state.origin = origin
