"""When things happen: the one loop behind every kind of run.

Order within an iteration: step, numbers, snapshot, save, stop, evaluate. Save comes before evaluate, because a failed
evaluation must not cost the step.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.config.schema import RunConfig
from keepstep.core.errors import StopRequested
from keepstep.resilience.guard import Guard
from keepstep.train.clock import Clock, Interval
from keepstep.train.hooks import LoopHooks, LoopParts
from keepstep.train.optim.schedule import lr_share
from keepstep.train.steps_in_flight import RESUME_HINT, StepsInFlight


def run_loop(parts: LoopParts, hooks: LoopHooks, config: RunConfig) -> None:
    """Train until `max_duration`, or until a stop request."""
    clock = parts.clock
    save_due = Interval(config.checkpoint.interval, clock)
    evaluate_due = Interval(config.evaluate.interval, clock)
    share_at = _schedule(config, clock)
    steps = StepsInFlight(parts, hooks, Guard(config.guard, scaled=parts.state.scaler.enabled))
    saved_step, evaluated_step = parts.saved_step, -1
    parts.rollback.copy_if_due(clock.step)
    # A step is saved before it is evaluated: a resumed run starts with the evaluation that may be missing.
    if not parts.joined and evaluate_due.falls_on_this_step() and steps.pause_for(lambda: _evaluate(parts, hooks)):
        evaluated_step = clock.step
    # The last steps may prove bad when they are read, and take the clock back.
    while not (hooks.stop_early() or (clock.reached(config.max_duration) and steps.drain())):
        steps.advance(share_at(clock.steps_towards(config.max_duration)))
        if parts.faults is not None:
            parts.faults.after_step(clock.step)
        # Numbers first: a snapshot goes together with its loss, and a broken step gets none.
        if hooks.snapshot_due() and steps.settle():
            hooks.snapshot()
        if steps.stop and not clock.step:
            raise StopRequested("stopped on request before the end of the first step: nothing to save", RESUME_HINT)
        # What comes due at a bad step waits for a good one; a step that is done again is not saved again. Reading the
        # step may be what brings the stop request, so ask after that: then the save has to be waited for.
        if (save_due.due() or steps.stop) and clock.step > saved_step:
            if steps.pause_for(lambda: hooks.ensure_saved() if steps.stop else hooks.save()):
                saved_step = clock.step
            else:
                save_due.retry()
        if steps.stop and clock.step <= saved_step:
            # The save may still be under way, and may fail.
            raise _stopped(saved_step, hooks, at_least=saved_step)
        if evaluate_due.due() and clock.step > evaluated_step:
            if not steps.pause_for(lambda: _evaluate(parts, hooks)):
                evaluate_due.retry()
                continue
            evaluated_step = clock.step
            if hooks.stop_early():
                continue
        if config.guard.recheck_interval and clock.step % config.guard.recheck_interval == 0:
            steps.pause_for(hooks.check_corruption)
    if hooks.stop_early():
        parts.recorder.note(f"step {clock.step}: validation no longer improves, stopping early")
    # A save that was started is not a save that succeeded: the run is not done before the step is on disk.
    hooks.ensure_saved(at_least=None if config.checkpoint.at_end else saved_step)
    if config.evaluate.at_end and evaluated_step != clock.step:
        _evaluate(parts, hooks)


def _evaluate(parts: LoopParts, hooks: LoopHooks) -> None:
    """Evaluate the step just done. A stop request meanwhile ends the run with this step; the next start begins with the
    evaluation that is missing."""
    if not hooks.evaluate():
        raise _stopped(parts.clock.step, hooks)


def _stopped(step: int, hooks: LoopHooks, at_least: int | None = None) -> StopRequested:
    hooks.ensure_saved(at_least)
    # The agent may have asked, to start again with more nodes: then nobody needs to read the save.
    if hooks.snapshot_due(last=True):
        hooks.snapshot()
    return StopRequested(f"stopped on request after step {step}, saved", RESUME_HINT)


def _schedule(config: RunConfig, clock: Clock) -> Callable[[int], float]:
    warmup_steps = clock.pace.steps(config.schedule.warmup) or 0
    total_steps = clock.pace.steps(config.max_duration)
    if total_steps is None:
        # config/check allows wall-clock runs with a constant schedule only: nothing else has a known end.
        return lambda step: lr_share(config.schedule, step, step + 1, warmup_steps)
    return lambda step: lr_share(config.schedule, step, total_steps, warmup_steps)
