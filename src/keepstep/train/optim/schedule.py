"""Learning-rate shapes: pure functions from a step to a share of the peak."""

from __future__ import annotations

from math import cos, pi

from keepstep.config.schema import ScheduleConfig


def lr_share(config: ScheduleConfig, step: int, total_steps: int, warmup_steps: int) -> float:
    """The learning rate of the step after `step` finished ones, as a share of the peak.

    Warmup rises linearly and reaches the peak at its last step; the shape then runs from the peak to `final`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    span = max(1, total_steps - warmup_steps)
    done = min(1.0, (step - warmup_steps) / span)
    match config.name:
        case "constant":
            return 1.0
        case "cosine":
            return config.final + (1 - config.final) * (1 + cos(pi * done)) / 2
        case "linear":
            return _between(1.0, config.final, done)
        case "two_stage":
            if done < config.stage_at:
                return _between(1.0, config.stage_lr, done / config.stage_at)
            return _between(config.stage_lr, config.final, (done - config.stage_at) / (1 - config.stage_at))
        case "wsd":
            decay_from = 1 - config.decay_share
            return 1.0 if done < decay_from else _between(1.0, config.final, (done - decay_from) / config.decay_share)


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share
