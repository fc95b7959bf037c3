"""Steps in flight: the device computes the newest step while the host reads the numbers of the one before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.core.errors import StopRequested
from keepstep.data.batch import Batch
from keepstep.data.step_feed import WaitCancelledError
from keepstep.resilience.guard import Guard, Reading, Verdict
from keepstep.resilience.survivors.control import CoordinatorLostError
from keepstep.resilience.survivors.replica import MembershipChangedError
from keepstep.train.hooks import LoopHooks, LoopParts
from keepstep.train.state import StepState
from keepstep.train.step import GRAD_NORM, LOSS, SPENT_S, STOP, TARGETS, VOID, StepSignals
from keepstep.train.telemetry.async_metrics import AsyncMetrics
from keepstep.train.telemetry.recorder import StepFacts

SHORT_STEP_S = 1.0
"""A stop request waits for the end of steps up to this, without asking the other processes."""
LONG_STEP_S = 10.0
"""A stop request takes effect between the micro batches of steps from this on."""
RESUME_HINT = "start the same command to resume"


class StepsInFlight:
    """Starts steps, reads their numbers, and acts on those that cannot be trusted."""

    def __init__(self, parts: LoopParts, hooks: LoopHooks, guard: Guard) -> None:
        self._parts, self._hooks, self._guard = parts, hooks, guard
        self._metrics = AsyncMetrics(parts.step.device)
        self._facts: list[StepFacts] = []
        self._before: list[StepState] = []
        """The state before each step in flight."""
        self._batches: list[Batch] | None = None
        """This process's micro batches of the newest step."""
        self._share: list[int] = []
        """Among replicas: the numbers of these micro batches in the global batch."""
        self._dealt: list[int] | None = None
        """Among replicas: the micro batches of each step that are read ahead."""
        self._void = False
        """Whether this process was asked to stop while it waited for data, and only computes along."""
        self._ended = False
        """Whether a void step was read, on every process: no step follows it."""
        self._abandoned = False
        """Whether the newest step was left between two micro batches, on every process."""
        self._step_s: float | None = None
        """Seconds of a recent step, the same on every process; None before the first was measured."""
        self._good = True
        """Whether the newest step that was read can be trusted."""
        self._unreported_s = 0.0
        """Seconds that this process has spent and no step has reported yet."""
        self.stop = False
        """Whether any process was asked to stop, as far as steps have been read."""

    def advance(self, lr_share: float) -> None:
        """Start the next step and read the one before."""
        if self._ended:
            return
        try:
            self._advance(lr_share)
        except CoordinatorLostError:
            # The agent is gone: the step before is the last one, and is saved.
            del self._before[len(self._metrics) :]
            self.stop = self._ended = True

    def _advance(self, lr_share: float) -> None:
        parts, clock = self._parts, self._parts.clock
        if parts.replica is not None:
            self._hooks.at_boundary(self.drain)
        started = time.perf_counter()
        position = parts.feed.position
        batches = self._share_of_step(position, {})
        data_s = time.perf_counter() - started
        parts.recorder.before_step(clock.step + 1)
        self._before.append(parts.state.step_state())
        scale = parts.step.loss_scale
        self._metrics.push(self._run_step(batches, lr_share, position))
        clock.advance(0.0, parts.feed.position)
        self._facts.append(StepFacts(clock.step, clock.samples, clock.tokens, lr_share, data_s, scale))
        newest = clock.step
        if self._abandoned:
            self.drain()
        elif len(self._metrics) > 1:
            self._read_oldest()
        if clock.step == newest:
            parts.rollback.copy_if_due(newest)
        self._unreported_s = time.perf_counter() - started
        parts.profiler.step()
        parts.heartbeat.expect_stop_within(self._stop_within_s(1 if parts.step.objective.prepares else len(batches)))
        parts.heartbeat.stepped(clock.step)

    def _run_step(self, batches: list[Batch], lr_share: float, position: int) -> Tensor:
        while True:
            try:
                return self._parts.step.run(batches, lr_share, self._signals(), self._hooks.before_update)
            except MembershipChangedError:
                # Nobody has applied this step: those who are left also do the part of those who are gone.
                self._hooks.rejoin()
                batches = self._share_of_step(position, dict(zip(self._share, batches, strict=False)))

    def _signals(self) -> StepSignals:
        parts = self._parts
        step, stop = parts.clock.step + 1, parts.stop.requested
        if parts.replica is None:
            return StepSignals(step, stop, self._unreported_s, self._void, self._abandon)
        return StepSignals(step, stop, self._unreported_s if parts.replica.leads else 0.0, self._void)

    def _share_of_step(self, position: int, have: dict[int, Batch]) -> list[Batch]:
        """This process's micro batches of the step at `position`, of which it has some already, by their number."""
        parts = self._parts
        if parts.replica is None:
            return self._next_batches()
        self._share = parts.replica.share(parts.feed.microbatches)
        missing = [number for number in self._share if number not in have]
        if missing or not have:
            if missing != self._dealt:
                parts.feed.redeal(position, missing)
                self._dealt = missing
            have = {**have, **dict(zip(missing, self._next_batches(), strict=False))}
        # A void step computes along with what there is.
        self._batches = [have[number] for number in self._share if number in have]
        return self._batches

    def _stop_within_s(self, microbatches: int) -> float:
        """How long a stop request takes to have effect, at most; see `_abandon`."""
        step_s = self._step_s or 0.0
        return step_s if step_s < LONG_STEP_S else max(SHORT_STEP_S, step_s / max(1, microbatches))

    def _abandon(self, number: int, count: int) -> bool:
        """Whether all processes leave the step before micro batch `number` of `count`, because one was asked to stop.

        Asked about once a second in long steps, and before the first micro batch of steps of a second or more: what is
        shorter is finished.
        """
        step_s = self._step_s
        if step_s is not None and (step_s < SHORT_STEP_S or (number and step_s < LONG_STEP_S)):
            return False
        every = 1 if step_s is None else max(1, math.ceil(SHORT_STEP_S * count / step_s))
        if number % every:
            return False
        if number and self._parts.step.device.type == "cuda":
            # The host would run ahead by the whole step. It waits here once a second at most.
            torch.cuda.synchronize(self._parts.step.device)
        asked = torch.tensor(float(self._parts.stop.requested))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        self._abandoned = bool(asked)
        return self._abandoned

    def _next_batches(self) -> list[Batch]:
        """The next step's micro batches. Asked to stop while they do not come: the last ones once more.

        The other processes may be in the middle of the step and cannot be interrupted. So this one computes along and
        marks the step as void, and all of them end with the step before.
        """
        parts = self._parts
        if not self._void:
            try:
                self._batches = parts.feed.next_step(parts.heartbeat.waiting, lambda: parts.stop.requested)
            except WaitCancelledError:
                self._void = True
        if self._batches is None:
            message = "stopped on request while waiting for the data of the first step: there is nothing new to save"
            raise StopRequested(message, RESUME_HINT)
        return self._batches

    def settle(self) -> bool:
        """Read every step in flight; whether the newest can be trusted."""
        return self.drain() and self._good

    def pause_for(self, action: Callable[[], None]) -> bool:
        """Read every step in flight, then act, and leave that time out of step times.

        False, and no action, where the newest step cannot be trusted: nothing is saved or measured from it.
        """
        if not self.settle():
            return False
        self._parts.heartbeat.busy()
        action()
        self._parts.heartbeat.start_steps()
        self._metrics.restart()
        return True

    def drain(self) -> bool:
        """Read every step in flight; False where that rolled the run back."""
        newest = self._parts.clock.step
        while len(self._metrics):
            self._read_oldest()
        return self._parts.clock.step == newest

    def _read_oldest(self) -> None:
        """Read the oldest step in flight and act on it."""
        parts = self._parts
        numbers, step_s = self._metrics.pop()
        facts, before = self._facts.pop(0), self._before.pop(0)
        if numbers[VOID]:
            self._undo_void_step(facts.step, before, numbers[SPENT_S])
            return
        count = parts.clock.pace.samples_per_step
        first, targets = facts.samples - count, int(numbers[TARGETS])
        reading = Reading(facts.step, numbers[LOSS], numbers[GRAD_NORM], first, count, targets)
        # The first process's seconds, read by all at the same step. With clocks of their own, one process would save
        # on the hour while another still trains, and both would wait for each other forever.
        parts.clock.elapsed_s += numbers[SPENT_S]
        self._step_s = numbers[SPENT_S] or self._step_s
        verdict = self._guard.judge(reading)
        self._good = verdict.what == "good"
        if self._good:
            metrics = dict(zip(parts.step.metric_names, numbers[TARGETS + 1 :], strict=True))
            parts.recorder.step_done(facts, step_s, numbers[LOSS], numbers[GRAD_NORM], metrics)
            usual = self._guard.outlier(reading)
            if usual is not None:
                parts.recorder.event("outlier", **reading.facts(), usual=usual)
        else:
            self._intervene(verdict, reading)
        self.stop = self.stop or numbers[STOP] > 0

    def _intervene(self, verdict: Verdict, reading: Reading) -> None:
        parts = self._parts
        rolled_back = verdict.action != "skip" and self._roll_back(reading, skip_samples=verdict.action == "rollback")
        action = verdict.action if rolled_back else "skip"
        parts.recorder.event("guard", what=verdict.what, action=action, **reading.facts())
        outcomes = {
            # Nothing is left to do: no optimizer takes a step on numbers that are not finite.
            "skip": "skipped, weights are as before",
            "retry": f"once more from step {parts.clock.step}",
            "rollback": f"back to step {parts.clock.step}, without these samples",
        }
        parts.recorder.note(f"warning: {reading}: {outcomes[action]}")
        parts.recorder.callbacks.fault(reading.step, f"{reading}: {outcomes[action]}")

    def _undo_void_step(self, step: int, before: StepState, spent_s: float) -> None:
        """A void step, and any after it, changed no weights: return to the numbers before it, which are to be saved."""
        parts = self._parts
        elapsed_s = parts.clock.elapsed_s + spent_s + self._drop_in_flight()
        parts.state.restore_step_state(before)
        parts.clock.elapsed_s = elapsed_s
        self._good = self.stop = self._ended = True
        if self._abandoned:
            parts.recorder.note(f"step {step} is abandoned on a stop request")
        else:
            parts.recorder.note(f"stop requested while waiting for the data of step {step}")

    def _drop_in_flight(self) -> float:
        """Forget the steps in flight; returns the seconds that they report."""
        spent_s = 0.0
        while len(self._metrics):
            numbers, _ = self._metrics.pop()
            spent_s += numbers[SPENT_S]
        self._facts.clear()
        self._before.clear()
        return spent_s

    def _roll_back(self, reading: Reading, *, skip_samples: bool) -> bool:
        self._hooks.before_update()
        if not self._parts.rollback.to_before(reading, skip_samples=skip_samples):
            return False
        # A step in flight was computed from the bad one.
        self._parts.clock.elapsed_s += self._drop_in_flight()
        self._metrics.restart()
        return True
