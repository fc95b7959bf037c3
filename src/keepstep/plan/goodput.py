"""Saves and failures: how large and how slow a save is, how often to save, and the goodput that results.

Goodput is the share of time in which an interrupted run makes progress. A run works for `interval_s`, saves (work stops
for `stall_s`, and the save counts `lag_s` later), and continues. Failures are random, on average every `mtbf_s`; each
loses the work since the last committed save and costs `restart_s`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import exp, expm1, sqrt

from keepstep.config.layout import Layout
from keepstep.config.parse import load_own_yaml
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.models.size import block_parameters, parameter_count
from keepstep.plan.cluster import Storage
from keepstep.plan.tensors import block_adapters
from keepstep.plan.workload import Workload

TIB = 2**40

LLAMA3_GPUS = 16384
LLAMA3_DAYS = 54
LLAMA3_INTERRUPTIONS = 419
"""Unexpected interruptions; the published effective training time is more than 90%."""


@dataclass(frozen=True)
class SaveTime:
    """Writing one checkpoint to one storage of one size."""

    tier: str
    sku: str
    size_tib: float
    write_gb_s: float
    seconds: float
    price_per_month: float

    @property
    def minutes(self) -> float:
        """Minutes of a save."""
        return self.seconds / 60

    @property
    def minutes_mixed_units(self) -> float:
        """Minutes as published tables have them, which divide GiB by GB/s: 7% too low."""
        return self.minutes * 1e9 / 2**30


def checkpoint_bytes(model: ModelConfig, optimizer: str = "adamw") -> int:
    """One checkpoint: fp32 weights and both moments, 12 bytes per parameter; Muon has one moment for matrices."""
    parameters = parameter_count(model)
    if optimizer == "muon":
        matrices = block_parameters(model) * model.layers
        return 8 * matrices + 12 * (parameters - matrices)
    return 12 * parameters


def saved_bytes(config: RunConfig, work: Workload) -> int:
    """One checkpoint of this run; where it trains adapters, without the frozen weights."""
    if not work.lora_rank:
        return checkpoint_bytes(config.model, config.optimizer.name)
    adapters = block_adapters(replace(work, degrees=Layout())) * work.model.layers
    return (8 if work.optimizer == "muon" else 12) * adapters


def dataset_bytes(tokens: float, vocab: int) -> int:
    """Tokens on disk: two bytes each for a vocabulary up to 65,536, else four."""
    return int(tokens * (2 if vocab <= 2**16 else 4))


def save_time(storage: Storage, size_tib: float, size_bytes: float) -> SaveTime:
    """Writing `size_bytes` to a storage of this size at its full rate."""
    rate = storage.write_gb_s(size_tib)
    price = storage.price_per_tib_month * size_tib
    return SaveTime(storage.name, storage.sku, size_tib, rate, size_bytes / (rate * 1e9), price)


def smallest_size_tib(storage: Storage, capacity_bytes: float, rate_gb_s: float = 0.0) -> float | None:
    """The smallest size that holds `capacity_bytes` and writes at `rate_gb_s`; None where no size does."""
    wanted = capacity_bytes / TIB
    if storage.gb_s:
        if storage.gb_s < rate_gb_s:
            return None
    else:
        wanted = max(wanted, rate_gb_s * 1000 / storage.mb_s_per_tib)
    return max(1, math.ceil(wanted / storage.step_tib - 1e-9)) * storage.step_tib


def save_times(tiers: Iterable[Storage], size_bytes: float, copies: int, within_s: float = math.inf) -> list[SaveTime]:
    """One entry per tier: the smallest size that holds `copies` checkpoints and writes one within the time."""
    sizes = ((tier, smallest_size_tib(tier, copies * size_bytes, size_bytes / within_s / 1e9)) for tier in tiers)
    return [save_time(tier, size, size_bytes) for tier, size in sizes if size is not None]


def cheapest(tiers: Iterable[Storage], size_bytes: float, copies: int, within_s: float) -> SaveTime | None:
    """The cheapest tier and size that holds the copies and writes one within the time."""
    return min(save_times(tiers, size_bytes, copies, within_s), key=lambda each: each.price_per_month, default=None)


@dataclass(frozen=True)
class Recovery:
    """The cost of a save and of a restart."""

    stall_s: float
    """How long a save stops the run."""
    restart_s: float
    """From a failure to the first step after it: detection, new processes, loading."""
    lag_s: float = 0.0
    """From the start of a save until it is committed."""
    replica_stall_s: float = 0.0
    """How long the other replicas stop where one is lost and they survive, apart from the step that they redo."""
    join_stall_s: float = 0.0
    """How long they stop for one that joins."""
    source: str = ""


@dataclass(frozen=True)
class GoodputPlan:
    """What to expect from a run on this many devices."""

    mtbf_s: float
    failures_per_day: float
    best_interval_s: float
    best_share: float
    """Goodput at the best interval."""
    interval_s: float | None
    """The run's own interval."""
    share: float | None
    simulated_share: float
    """Goodput at the best interval by a simulation of many failures."""


def mtbf_s(failures_per_gpu_hour: float, gpus: int) -> float:
    """Mean time between failures of any of the devices."""
    return 3600 / (failures_per_gpu_hour * gpus)


def young_daly_s(stall_s: float, mean_s: float) -> float:
    """√(2·C·M): the interval that balances the cost of saves with lost work."""
    return sqrt(2 * stall_s * mean_s)


def effective_share(interval_s: float, recovery: Recovery, mean_s: float) -> float:
    """Goodput, exact for independent failures: they may also strike during a save or a restart."""
    segment_s = interval_s + recovery.stall_s
    if segment_s / mean_s > 700:
        return 0.0
    wall_s = mean_s * exp((recovery.restart_s + recovery.lag_s) / mean_s) * expm1(segment_s / mean_s)
    return interval_s / wall_s


def best_interval_s(recovery: Recovery, mean_s: float) -> float:
    """Young–Daly's interval, but at least the time that a save takes to commit."""
    return max(young_daly_s(recovery.stall_s, mean_s), recovery.lag_s, 1.0)


def simulate(interval_s: float, recovery: Recovery, mean_s: float, failures: int = 20_000, seed: int = 17) -> float:
    """Goodput by a discrete-event simulation: from failure to failure, counting the committed saves."""
    draw = random.Random(seed)
    segment_s = interval_s + recovery.stall_s
    now = saved_s = 0.0
    for _ in range(failures):
        running_s = draw.expovariate(1 / mean_s)
        # A save that had not committed when the failure struck does not count.
        saves = int(max(0.0, running_s - recovery.lag_s) // segment_s)
        saved_s += saves * interval_s
        now += running_s + _restart_s(recovery.restart_s, draw, mean_s)
    return saved_s / now


def _restart_s(restart_s: float, draw: random.Random, mean_s: float) -> float:
    """Time of a restart, with failures that strike during it."""
    spent_s = 0.0
    while (until_failure_s := draw.expovariate(1 / mean_s)) < restart_s:
        spent_s += until_failure_s
    return spent_s + restart_s


def plan_goodput(failures_per_gpu_hour: float, gpus: int, recovery: Recovery, interval_s: float | None) -> GoodputPlan:
    """Expected failures, the best interval, and the goodput of it and of the run's own interval."""
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
    """Goodput that these save and restart times would have given in Llama 3's 54 days, at the best interval."""
    mean_s = LLAMA3_DAYS * 86400 / LLAMA3_INTERRUPTIONS
    return effective_share(best_interval_s(recovery, mean_s), recovery, mean_s)


@cache
def known_recoveries() -> dict[str, Recovery]:
    """Save and restart times by name, with where they come from."""
    path = resources.files("keepstep.plan") / "data" / "recovery.yaml"
    return {name: Recovery(**entry) for name, entry in load_own_yaml(path.read_text(encoding="utf-8")).items()}
