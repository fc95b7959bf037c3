"""When things happen: the one loop behind every kind of run.

Order within a turn: step, numbers, save, evaluate, stop. Save comes before evaluate, because a failed evaluation must
not cost the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.config.schema import RunConfig
from keepstep.core.errors import StopRequested
from keepstep.data.loader import Batch, GivenUpError, StepFeed
from keepstep.resilience.chaos import Chaos
from keepstep.resilience.guard import Guard, Reading, Verdict
from keepstep.resilience.pulse import Pulse
from keepstep.resilience.signals import StopFlag
from keepstep.train.clock import Clock, Interval
from keepstep.train.profile import Profiler
from keepstep.train.readback import Readback
from keepstep.train.record import Recorder, StepFacts
from keepstep.train.schedule import lr_share
from keepstep.train.state import Moment
from keepstep.train.step import GRAD_NORM, LOSS, SPENT_S, STOP, TARGETS, VOID, TrainStep


@dataclass
class LoopParts:
    """What the loop drives; each part was built by `run` and knows only its own section."""

    step: TrainStep
    feed: StepFeed
    clock: Clock
    recorder: Recorder
    profiler: Profiler
    stop: StopFlag
    save: Callable[[bool], None]
    """Save the step just done; True waits until it is on disk."""
    before_update: Callable[[], None]
    evaluate: Callable[[], bool]
    """Measure the step just done; False where somebody asked to stop on the way."""
    ensure_saved: Callable[[], None]
    """Return with the step just done on disk, whether its save is under way or was never begun."""
    moment: Callable[[], Moment]
    """Where the run stands before a step, beside its tensors."""
    return_to: Callable[[Moment], None]
    """Take back steps since that moment, which changed no tensor."""
    pulse: Pulse
    guard: Guard
    keep_due: Callable[[], bool] = lambda: False
    """Whether the step just done is to be kept in memory that survives this process."""
    keep: Callable[[], None] = lambda: None
    remember: Callable[[int], None] = lambda _: None
    """Keep the state after this step to go back to, where the guard may want that and nothing else keeps it."""
    go_back: Callable[[Reading, bool], bool] = lambda *_: False
    """Go back to the last good state before this step, with True to leave its samples out from now on; False where
    there is none."""
    recheck: Callable[[], None] = lambda: None
    """Look for silent corruption; raises where some is found."""
    chaos: Chaos | None = None
    """Faults to suffer on purpose."""
    enough: Callable[[], bool] = lambda: False
    """Whether evaluations say that going on is of no use."""
    saved_step: int = -1
    """The checkpoint that the run goes on from: there is no need to save that step again."""


def run_loop(parts: LoopParts, config: RunConfig) -> None:
    """Train until `max_duration`, or until somebody asks to stop."""
    clock = parts.clock
    save_due = Interval(config.checkpoint.interval, clock)
    evaluate_due = Interval(config.evaluate.interval, clock)
    share_at = _schedule(config, clock)
    steps = _Steps(parts)
    saved_step, evaluated_step = parts.saved_step, -1
    parts.remember(clock.step)
    # A step is saved before it is evaluated: going on from it begins with what may not have been done.
    if evaluate_due.falls_on_this_step() and steps.pause_for(lambda: _evaluate(parts)):
        evaluated_step = clock.step
    # The last steps may prove bad when they are read, and take the clock back.
    while not (parts.enough() or (clock.reached(config.max_duration) and steps.drain())):
        steps.advance(share_at(clock.steps_towards(config.max_duration)))
        if parts.chaos is not None:
            parts.chaos.after_step(clock.step)
        # Numbers first: a state is kept together with its loss, and a broken one not at all.
        if parts.keep_due() and steps.settle():
            parts.keep()
        # What comes due at a step that is not good waits for one that is; a step done again is not saved again. Whether
        # to stop is asked once the step is read: that may be what tells of it, and then the save has to be waited for.
        if (save_due.due() or steps.stop) and clock.step > saved_step:
            if steps.pause_for(lambda: parts.save(steps.stop)):
                saved_step = clock.step
            else:
                save_due.again()
        if steps.stop and clock.step <= saved_step:
            if clock.step == saved_step:
                parts.ensure_saved()
            raise _stopped(saved_step)
        if evaluate_due.due() and clock.step > evaluated_step:
            if not steps.pause_for(lambda: _evaluate(parts)):
                evaluate_due.again()
                continue
            evaluated_step = clock.step
            if parts.enough():
                continue
        if config.guard.recheck_interval and clock.step % config.guard.recheck_interval == 0:
            steps.pause_for(parts.recheck)
    if parts.enough():
        parts.recorder.note(f"step {clock.step}: validation no longer improves, stopping early")
    if config.checkpoint.at_end and saved_step != clock.step:
        parts.save(True)
    if config.evaluate.at_end and evaluated_step != clock.step:
        _evaluate(parts)


def _evaluate(parts: LoopParts) -> None:
    """Evaluate the step just done. Asked to stop meanwhile, the run ends with this step: going on from it, or starting
    the command again where it was the last one, begins with the evaluation that is missing."""
    if not parts.evaluate():
        parts.ensure_saved()
        raise _stopped(parts.clock.step)


def _stopped(step: int) -> StopRequested:
    return StopRequested(f"stopped on request after step {step}, saved", "start the same command to go on")


def _schedule(config: RunConfig, clock: Clock) -> Callable[[int], float]:
    warmup_steps = clock.pace.steps(config.schedule.warmup) or 0
    total_steps = clock.pace.steps(config.max_duration)
    if total_steps is None:
        # config/check admits wall-clock runs with a constant schedule only: nothing else has a known end.
        return lambda step: lr_share(config.schedule, step, step + 1, warmup_steps)
    return lambda step: lr_share(config.schedule, step, total_steps, warmup_steps)


class _Steps:
    """Steps under way: the device works on the newest while the host reads the one before."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._pending = Readback(parts.step.device)
        self._facts: list[StepFacts] = []
        self._moments: list[Moment] = []
        """Where the run stood before each of them."""
        self._batches: list[Batch] | None = None
        """This process's micro batches of the newest step."""
        self._void = False
        """Whether this process was asked to stop while it waited for data, and only computes along."""
        self._ended = False
        """Whether a void step was read, on every process: none is to follow."""
        self._good = True
        """Whether the newest step that was read can be trusted."""
        self._untold_s = 0.0
        """Seconds of this process that no step has told the others of yet."""
        self.stop = False
        """Whether any process was asked to stop, as far as steps have been read."""

    def advance(self, share: float) -> None:
        """Start the next step and read the last one."""
        parts = self._parts
        if self._ended:
            return
        started = time.perf_counter()
        batches = self._next_batches()
        data_s = time.perf_counter() - started
        parts.recorder.meet(parts.clock.step + 1)
        self._moments.append(parts.moment())
        scale, asked = parts.step.loss_scale, parts.stop.requested
        numbers = parts.step.run(batches, share, asked, parts.before_update, self._untold_s, self._void)
        self._pending.push(numbers)
        parts.clock.advance(0.0, parts.feed.position)
        done = parts.clock
        self._facts.append(StepFacts(done.step, done.samples, done.tokens, share, data_s, scale))
        newest = parts.clock.step
        if len(self._pending) > 1:
            self._take()
        if parts.clock.step == newest:
            parts.remember(newest)
        self._untold_s = time.perf_counter() - started
        parts.profiler.step()
        parts.pulse.stepped(parts.clock.step)

    def _next_batches(self) -> list[Batch]:
        """The next step's micro batches. Asked to stop while they do not come, the last ones once more.

        The other processes may be in the middle of the step and cannot be told otherwise: this one computes along, says
        that the step is void, and so all of them end with the step before.
        """
        parts = self._parts
        if not self._void:
            try:
                self._batches = parts.feed.next_step(parts.pulse.waiting, lambda: parts.stop.requested)
            except GivenUpError:
                self._void = True
        if self._batches is None:
            message = "stopped on request while waiting for the data of the first step: nothing new was there to save"
            raise StopRequested(message, "start the same command to go on")
        return self._batches

    def settle(self) -> bool:
        """Read every step under way; whether the newest is one to build on."""
        return self.drain() and self._good

    def pause_for(self, action: Callable[[], None]) -> bool:
        """Read every step under way, act, and leave that time out of step times.

        False, and no action, where the newest step is not good: nothing is saved or measured on its word.
        """
        if not self.settle():
            return False
        self._parts.pulse.busy()
        action()
        self._pending.restart()
        return True

    def drain(self) -> bool:
        """Read every step under way; False where that took the run back."""
        newest = self._parts.clock.step
        while len(self._pending):
            self._take()
        return self._parts.clock.step == newest

    def _take(self) -> None:
        """Read the oldest step under way and act on it."""
        parts = self._parts
        numbers, step_s = self._pending.pop()
        facts, moment = self._facts.pop(0), self._moments.pop(0)
        if numbers[VOID]:
            self._take_back(facts.step, moment, numbers[SPENT_S])
            return
        count = parts.clock.pace.samples_per_step
        first, targets = facts.samples - count, int(numbers[TARGETS])
        reading = Reading(facts.step, numbers[LOSS], numbers[GRAD_NORM], first, count, targets)
        # Of one process and read by all at the same step: with clocks of their own, one would save on the hour while
        # another still trains, and both would wait for each other for good.
        parts.clock.elapsed_s += numbers[SPENT_S]
        verdict = parts.guard.judge(reading)
        self._good = verdict.what == "good"
        if self._good:
            parts.recorder.step_done(facts, step_s, numbers[LOSS], numbers[GRAD_NORM])
            usual = parts.guard.outlier(reading)
            if usual is not None:
                parts.recorder.event("outlier", **reading.facts(), usual=usual)
        else:
            self._intervene(verdict, reading)
        self.stop = self.stop or numbers[STOP] > 0

    def _intervene(self, verdict: Verdict, reading: Reading) -> None:
        parts = self._parts
        went_back = verdict.action != "skip" and self._go_back(reading, leave_out=verdict.action == "rollback")
        action = verdict.action if went_back else "skip"
        parts.recorder.event("guard", what=verdict.what, action=action, **reading.facts())
        told = {
            # Already done: no optimizer takes a step on numbers that are not finite.
            "skip": "skipped, weights are as before",
            "retry": f"once more from step {parts.clock.step}",
            "rollback": f"back to step {parts.clock.step}, without these samples",
        }
        parts.recorder.note(f"{reading}: {told[action]}")

    def _take_back(self, step: int, moment: Moment, spent_s: float) -> None:
        """A void step, and any that follows it, changed no weights: it never was. What is there is to be saved."""
        parts = self._parts
        elapsed_s = parts.clock.elapsed_s + spent_s + self._forget_pending()
        parts.return_to(moment)
        parts.clock.elapsed_s = elapsed_s
        self._good = self.stop = self._ended = True
        parts.recorder.note(f"asked to stop while waiting for the data of step {step}")

    def _forget_pending(self) -> float:
        """Forget the steps under way; returns the seconds they tell of."""
        spent_s = 0.0
        while len(self._pending):
            numbers, _ = self._pending.pop()
            spent_s += numbers[SPENT_S]
        self._facts.clear()
        self._moments.clear()
        return spent_s

    def _go_back(self, reading: Reading, leave_out: bool) -> bool:
        self._parts.before_update()
        if not self._parts.go_back(reading, leave_out):
            return False
        # A step that is under way stands on the bad one.
        self._parts.clock.elapsed_s += self._forget_pending()
        self._pending.restart()
        return True
