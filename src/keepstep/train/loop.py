"""When things happen: the one loop behind every kind of run.

Order within a turn: step, numbers, save, evaluate, stop. Save comes before evaluate, because a failed evaluation must
not cost the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isfinite

from keepstep.config.schema import RunConfig
from keepstep.core.errors import KeepstepError, StopRequested
from keepstep.data.loader import StepFeed
from keepstep.resilience.chaos import Chaos
from keepstep.resilience.pulse import Pulse
from keepstep.resilience.signals import StopFlag
from keepstep.train.clock import Clock, Interval
from keepstep.train.profile import Profiler
from keepstep.train.readback import Readback
from keepstep.train.record import Recorder, StepFacts
from keepstep.train.schedule import lr_share
from keepstep.train.step import GRAD_NORM, LOSS, STOP, TrainStep


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
    evaluate: Callable[[], None]
    pulse: Pulse
    keep_due: Callable[[], bool] = lambda: False
    """Whether the step just done is to be kept in memory."""
    keep: Callable[[], None] = lambda: None
    chaos: Chaos | None = None
    """Faults to suffer on purpose."""
    enough: Callable[[], bool] = lambda: False
    """Asked after an evaluation: whether going on is of no use."""


def run_loop(parts: LoopParts, config: RunConfig) -> None:
    """Train until `max_duration`, or until somebody asks to stop."""
    clock = parts.clock
    save_due = Interval(config.checkpoint.interval, clock)
    evaluate_due = Interval(config.evaluate.interval, clock)
    share_at = _schedule(config, clock)
    steps = _Steps(parts)
    saved_step = evaluated_step = -1
    while not clock.reached(config.max_duration):
        stop = steps.advance(share_at(clock.step))
        if parts.chaos is not None:
            parts.chaos.after_step(clock.step)
        if parts.keep_due():
            # Numbers first: a state is kept together with its loss, and a broken one not at all.
            stop = steps.drain() or stop
            parts.keep()
        if save_due.due() or stop:
            steps.pause_for(partial(parts.save, stop))
            saved_step = clock.step
        if stop:
            raise StopRequested(f"stopped on request after step {clock.step}, saved", "start the same command to go on")
        if evaluate_due.due():
            steps.pause_for(parts.evaluate)
            evaluated_step = clock.step
            if parts.enough():
                parts.recorder.note(f"step {clock.step}: validation no longer improves, stopping early")
                break
    if config.checkpoint.at_end and saved_step != clock.step:
        steps.pause_for(partial(parts.save, True))
    if config.evaluate.at_end and evaluated_step != clock.step:
        steps.pause_for(parts.evaluate)
    steps.drain()


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

    def advance(self, share: float) -> bool:
        """Start the next step and read the last one; True when any process asked to stop."""
        parts = self._parts
        started = time.perf_counter()
        batches = parts.feed.next_step()
        data_s = time.perf_counter() - started
        parts.recorder.meet(parts.clock.step + 1)
        self._pending.push(parts.step.run(batches, share, parts.stop.requested, parts.before_update))
        stop = self._take() if len(self._pending) > 1 else False
        parts.clock.advance(time.perf_counter() - started)
        self._facts.append(StepFacts(parts.clock.step, parts.clock.samples, parts.clock.tokens, share, data_s))
        parts.profiler.step()
        parts.pulse.stepped(parts.clock.step)
        return stop

    def pause_for(self, action: Callable[[], None]) -> None:
        """Read every step under way (a broken one must not be saved), act, and leave that time out of step times."""
        self.drain()
        self._parts.pulse.busy()
        action()
        self._pending.restart()

    def drain(self) -> bool:
        """Read every step under way; True when any process asked to stop (which shows again in the next step)."""
        stop = False
        while len(self._pending):
            stop = self._take() or stop
        return stop

    def _take(self) -> bool:
        numbers, step_s = self._pending.pop()
        facts = self._facts.pop(0)
        if not isfinite(numbers[LOSS]):
            raise KeepstepError(
                f"the loss is {numbers[LOSS]} at step {facts.step}: weights saved before this step are still good",
                "lower optimizer.lr or lengthen schedule.warmup, then start again from the last checkpoint",
            )
        self._parts.recorder.step_done(facts, step_s, numbers[LOSS], numbers[GRAD_NORM])
        return numbers[STOP] > 0
