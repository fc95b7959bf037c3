"""How much of the time a run that is interrupted now and then moves forward, and how often it should save.

A run works `interval_s`, saves (work stops for `stall_s`, and the save counts `lag_s` later), and goes on. Failures
come at random, on average every `mtbf_s`; each throws away what no committed save holds and costs `restart_s`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import exp, expm1, sqrt

LLAMA3_GPUS = 16384
LLAMA3_DAYS = 54
LLAMA3_INTERRUPTIONS = 419
"""Unexpected interruptions; the published effective training time is more than 90%."""


@dataclass(frozen=True)
class Recovery:
    """What saving and coming back cost."""

    stall_s: float
    """Work stops this long for a save."""
    restart_s: float
    """From a failure to the first step after it: detection, new processes, loading."""
    lag_s: float = 0.0
    """From the start of a save until it counts."""
    source: str = ""


@dataclass(frozen=True)
class GoodputPlan:
    """What to expect of a run on this many devices."""

    mtbf_s: float
    failures_per_day: float
    best_interval_s: float
    best_share: float
    """Share of the time that moves the run forward at the best interval."""
    interval_s: float | None
    """The interval the run has."""
    share: float | None
    simulated_share: float
    """The best interval's share once more, from a simulation of many failures."""


def mtbf_s(failures_per_gpu_hour: float, gpus: int) -> float:
    """Mean time between failures of any of the devices."""
    return 3600 / (failures_per_gpu_hour * gpus)


def young_daly_s(stall_s: float, mean_s: float) -> float:
    """√(2·C·M): the interval that balances saves against lost work."""
    return sqrt(2 * stall_s * mean_s)


def lost_share(interval_s: float, recovery: Recovery, mean_s: float) -> float:
    """First-order share of the time lost: saves, and for each failure half an interval, the lag and a restart."""
    return recovery.stall_s / interval_s + (interval_s / 2 + recovery.lag_s + recovery.restart_s) / mean_s


def effective_share(interval_s: float, recovery: Recovery, mean_s: float) -> float:
    """Share of the time that moves the run forward, exact for failures that come independently.

    A failure may strike during a save or a restart too, which first-order formulas leave out.
    """
    segment_s = interval_s + recovery.stall_s
    if segment_s / mean_s > 700:
        return 0.0
    wall_s = mean_s * exp((recovery.restart_s + recovery.lag_s) / mean_s) * expm1(segment_s / mean_s)
    return interval_s / wall_s


def best_interval_s(recovery: Recovery, mean_s: float) -> float:
    """Young–Daly's interval, but never shorter than a save takes to count."""
    return max(young_daly_s(recovery.stall_s, mean_s), recovery.lag_s, 1.0)


def simulate(interval_s: float, recovery: Recovery, mean_s: float, failures: int = 20_000, seed: int = 17) -> float:
    """The same share from a discrete-event simulation: from failure to failure, counting the saves that held."""
    draw = random.Random(seed)
    segment_s = interval_s + recovery.stall_s
    now = saved_s = 0.0
    for _ in range(failures):
        running_s = draw.expovariate(1 / mean_s)
        # A save that the failure overtakes never counted.
        saves = int(max(0.0, running_s - recovery.lag_s) // segment_s)
        saved_s += saves * interval_s
        now += running_s + _restart_s(recovery.restart_s, draw, mean_s)
    return saved_s / now


def _restart_s(restart_s: float, draw: random.Random, mean_s: float) -> float:
    """Come back, perhaps at the second try: failures do not wait for restarts to end."""
    spent_s = 0.0
    while (until_failure_s := draw.expovariate(1 / mean_s)) < restart_s:
        spent_s += until_failure_s
    return spent_s + restart_s


def plan_goodput(failures_per_gpu_hour: float, gpus: int, recovery: Recovery, interval_s: float | None) -> GoodputPlan:
    """Failures to expect, the best interval, and what it and the run's own interval give."""
    mean_s = mtbf_s(failures_per_gpu_hour, gpus)
    best_s = best_interval_s(recovery, mean_s)
    return GoodputPlan(
        mtbf_s=mean_s,
        failures_per_day=86400 / mean_s,
        best_interval_s=best_s,
        best_share=effective_share(best_s, recovery, mean_s),
        interval_s=interval_s,
        share=None if interval_s is None else effective_share(interval_s, recovery, mean_s),
        simulated_share=simulate(best_s, recovery, mean_s, failures=2000),
    )


def llama3_share(recovery: Recovery) -> float:
    """What these save and restart times would have given in Llama 3's 54 days, at their best interval."""
    mean_s = LLAMA3_DAYS * 86400 / LLAMA3_INTERRUPTIONS
    return effective_share(best_interval_s(recovery, mean_s), recovery, mean_s)


@cache
def known_recoveries() -> dict[str, Recovery]:
    """Save and restart times by name, with where they come from."""
    import yaml

    path = resources.files("keepstep.plan") / "data" / "recovery.yaml"
    return {name: Recovery(**entry) for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items()}
