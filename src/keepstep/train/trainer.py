"""The trainer: build data, checkpoints, model and optimizer in order, load the newest state, then fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.core.errors import HardwareError, KeepstepError, RunTakenError, StopRequested
from keepstep.resilience.fault_injection import FaultInjector
from keepstep.train.build import build_learner
from keepstep.train.clock import Clock
from keepstep.train.context import RunContext, run_context
from keepstep.train.data import open_data, open_feed
from keepstep.train.evaluation import Evaluation
from keepstep.train.hooks import LoopParts
from keepstep.train.loop import run_loop
from keepstep.train.recovery.corruption_check import check_corruption
from keepstep.train.recovery.replicas import CommonState
from keepstep.train.recovery.resume import Resume, may_resume, step_settings
from keepstep.train.recovery.rollback import Rollback
from keepstep.train.recovery.saver import Saver, run_metadata
from keepstep.train.recovery.snapshot_policy import SnapshotPolicy
from keepstep.train.state import TrainState, seed_everything
from keepstep.train.telemetry.profiler import Profiler
from keepstep.train.telemetry.run_record import Callbacks, RunRecord


def train(config: RunConfig, callbacks: Callbacks = ()) -> None:
    """Run to the end, or to a saved stop. Every process of the run calls this with the same configuration."""
    with run_context(config) as context:
        trainer = Trainer(context, callbacks)
        trainer.resume()
        trainer.fit()


class Trainer:
    """The parts of one run. Its methods are the loop's hooks: the actions that join several parts."""

    def __init__(self, context: RunContext, callbacks: Callbacks = ()) -> None:
        self._context = context
        config = context.config
        self._leads = context.replica is not None and context.replica.leads
        self._loaders = open_data(context)
        self._clock = Clock.of(config.global_batch, config.model.seq_len, self._loaders.train.samples_per_epoch)
        self._record = RunRecord(context, self._loaders, self._clock.pace, callbacks)
        self._recorder = self._record.recorder
        self._callbacks = self._recorder.callbacks
        self._evaluation = Evaluation(context, self._loaders, self._recorder)
        # Before the model: a state that is about to be loaded needs no first weights.
        self._saver = Saver(context, self._recorder)
        # A replica that joins others copies their state.
        self._joins = context.replica is not None and not context.replica.leads
        found = self._joins or may_resume(self._saver.checkpointer, context.world.ranks.memory_files)
        self._build_model(fill=not found)

    def _build_model(self, fill: bool) -> None:
        """Model, parallelism, optimizer and step. With `fill` the model gets its first weights."""
        context, config = self._context, self._context.config
        seed_everything(config.seed, context.world.ranks.rank)
        learner = build_learner(config, context.mesh, context.world.device, fill=fill, loaders=self._loaders)
        self._filled, self._step = fill, learner.step
        if context.replica is not None:
            self._step.join(context.replica)
        data = self._loaders.train
        self._state = TrainState(
            learner.model, learner.optimizers, learner.scaler, self._clock, learner.origin, data, learner.frozen
        )
        memory_files = context.world.ranks.memory_files
        self._snapshots = SnapshotPolicy(
            memory_files, config.resilience, self._state, context.world.device, run_metadata(context)
        )

    def resume(self) -> None:
        """Load the newest state where there is one; else start with first weights."""
        self._record.announce()
        ranks = self._context.world.ranks
        self._recorder.event("start", step=0, world_size=self._context.processes, restarts=ranks.restarts)
        newest = Resume(
            self._context,
            self._saver.checkpointer,
            self._snapshots,
            self._state,
            self._evaluation.best,
            self._recorder,
            self._loaders,
        )
        if self._joins and self._context.replica is not None:
            # What a first step compiles and allocates is ready before the others wait for it.
            self._step.warm_up(self._loaders.train.rows(0, self._context.config.microbatch))
            common = CommonState(self._state, self._step, self._values)
            values = self._context.replica.copy_from_members(common)
            mine = step_settings(self._context.config)
            # `auto` may choose something else on another kind of machine.
            for name in ("microbatch", "compute.compile"):
                if (theirs := values["rates"][name]) != mine[name]:
                    raise HardwareError(
                        f"{name} is {mine[name]} here, but {theirs} in the other replicas", f"{name}={theirs}"
                    )
            common.adopt(values)
            newest.adopt("living replicas", values)
            return
        found = newest.load()
        self._saver.saved_step = newest.saved_step
        if not found and not self._filled:
            # What seemed to be there does not fit: start from first weights after all.
            self._build_model(fill=True)
        if ranks.restarts:
            self._callbacks.fault(self._clock.step, f"restart {ranks.restarts}, from step {self._clock.step}")

    def fit(self) -> None:
        """Train to the end, then close every part."""
        context, config = self._context, self._context.config
        # Not before the state is loaded: settings that do not fit it must leave the folder's own as they are.
        self._record.write_description()
        if self._clock.step and self._clock.reached(config.max_duration):
            # Else a user who gives a finished run's name to other data or settings takes `done` for theirs.
            self._recorder.note(
                f"notice: nothing is left to train: step {self._clock.step} is the end by max_duration "
                f"({config.max_duration}); set a longer one to continue, or another name to start a new run"
            )
        context.heartbeat.expect_stop_within(self._record.planned_step_s * config.microbatch / config.global_batch)
        context.heartbeat.start_steps()
        if context.is_first and not context.world.ranks.supervised:
            context.stop.notice = lambda number: context.heartbeat.newest.stop_notice(number)
        feed, skipped = open_feed(context, self._loaders, self._clock.samples)
        rank, device = context.world.ranks.rank, context.world.device
        profiler = Profiler(config.profile, context.folder.profile, rank, device, self._clock.step)
        parts = LoopParts(
            step=self._step,
            feed=feed,
            state=self._state,
            recorder=self._recorder,
            profiler=profiler,
            heartbeat=context.heartbeat,
            rollback=Rollback(self._state, self._snapshots, feed, skipped, config.guard),
            stop=context.stop,
            faults=self._inject_faults(),
            replica=context.replica,
            joined=self._joins,
            saved_step=self._saver.saved_step,
        )
        if not self._joins:
            self._saver.checkpointer.prepare(self._state.tensors())
        outcome = "fault"
        try:
            if context.replica is not None and not self._joins:
                context.replica.enter(self._clock.step)
            with profiler:
                run_loop(parts, self, config)
            # Together while all are well; closing must not wait for a process that is gone.
            self._saver.checkpointer.wait()
            self._finish_among_replicas()
            outcome = "finish"
        except StopRequested:
            self._finish_among_replicas()
            # On several nodes the process that was asked may be one that records nothing.
            outcome = "stop"
            raise
        except RunTakenError:
            # The folder is another run's: write nothing more into it.
            outcome = "taken"
            raise
        except Exception as error:
            with suppress(KeepstepError):
                self._callbacks.fault(self._clock.step, f"{type(error).__name__}: {error}")
            raise
        finally:
            feed.close()
            self._snapshots.close()
            self._saver.checkpointer.close()
            self._evaluation.best.close()
            self._close_recorder("stop" if context.stop.requested and outcome == "fault" else outcome)

    def _inject_faults(self) -> FaultInjector | None:
        faults = FaultInjector.from_environment(self._context.world.ranks.rank)
        if faults is not None:
            self._step.poison = lambda: faults.poisoned(self._clock.step + 1)
        return faults

    def _close_recorder(self, outcome: str) -> None:
        if outcome != "taken" and (outcome != "fault" or not self._context.world.ranks.supervised):
            # An agent records faults itself: it also knows those of processes that cannot report any more.
            skipped = self._saver.skipped_steps
            facts = {"skipped_saves": len(skipped)} if skipped else {}
            self._recorder.event(outcome, step=self._clock.step, **facts)
            if skipped:
                steps = ", ".join(map(str, skipped[-8:]))
                self._recorder.note(f"warning: saves skipped: {len(skipped)} (step {steps})")
        self._recorder.close()

    # ---------------------------------------------------------------- hooks of the loop

    def before_update(self) -> None:
        """Weights are about to change: copies under way finish first. A run that lost its folder ends here."""
        self._context.leases.raise_if_lost()
        self._snapshots.before_update()
        self._saver.before_update()

    def snapshot_due(self, last: bool = False) -> bool:
        """Whether the step just done, perhaps the last one before a stop, goes into the agent's memory."""
        return self._snapshots.due(self._clock, last)

    def snapshot(self) -> None:
        """Copy the step just done, with its numbers, into the agent's memory."""
        self._snapshots.take(self._clock.step, self._values(), self._recorder.last_loss)

    def at_boundary(self, settle: Callable[[], bool]) -> None:
        """Before a step: let replicas join."""
        replica = self._context.replica
        assert replica is not None
        if replica.at_boundary(CommonState(self._state, self._step, self._values, settle)):
            self._take_over_roles()

    def rejoin(self) -> None:
        """A replica was lost in the middle of a step: form the new membership with the others."""
        replica = self._context.replica
        assert replica is not None
        replica.rejoin()
        self._take_over_roles()

    def _take_over_roles(self) -> None:
        """After a change of membership: the first of those who are left writes for all."""
        context, replica = self._context, self._context.replica
        assert replica is not None
        self._recorder.ranks = replica.ranks * replica.siblings.size
        if replica.leads and not self._leads:
            self._leads = True
            if context.is_first:
                context.take_folder()
                self._evaluation.best.lead(context.leases.fence)
                self._record.lead()
            self._saver.lead()

    def _finish_among_replicas(self) -> None:
        if self._context.replica is not None:
            self._context.replica.finish()

    def save(self) -> None:
        """Start to save the step just done, behind training."""
        if not self._context.saves:
            return
        self._saver.save(self._state, self._values)

    def ensure_saved(self, at_least: int | None = None) -> None:
        """Return with the step just done, or any step from `at_least` on, committed and verified."""
        if not self._context.saves:
            return
        self._saver.ensure_saved(self._state, self._values, self._snapshot_unsaved, at_least)

    def _snapshot_unsaved(self) -> bool:
        """Copy a step that cannot be saved into the agent's memory; False where there is none."""
        return self._snapshots.take_now(self._clock.step, self._values(), self._recorder.last_loss)

    def evaluate(self) -> bool:
        """Evaluate the step just done; False where a stop request cut this short."""
        return self._evaluation.run(self._state, self._step)

    def stop_early(self) -> bool:
        """Whether validation has not improved for as long as the configuration waits."""
        return self._evaluation.best.out_of_patience

    def check_corruption(self) -> None:
        """Compare the bits that all processes compute from the same rows; a HardwareError names those that differ."""
        config = self._context.config
        first = max(0, self._clock.samples - config.global_batch)
        batch = self._loaders.train.rows(first, config.microbatch)
        self._state.model.eval()
        check_corruption(self._step.evaluate, batch, self._context.mesh, self._recorder, self._clock.step)
        self._state.model.train()

    def _values(self) -> dict[str, Any]:
        """The plain values that are saved next to the tensors."""
        return {
            "numbers": self._state.numbers(),
            "tail": list(self._recorder.tail),
            "best": self._evaluation.best.state(),
            "callbacks": self._callbacks.state(),
            "order": self._loaders.train.order_facts,
            "origin": self._state.origin,
            "run": {"name": self._context.config.name, "seed": self._context.config.seed},
            "rates": step_settings(self._context.config),
        }
