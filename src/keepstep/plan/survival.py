"""Effective training time where a lost replica costs one step and not a restart, with spare replicas or without.

Replicas fail independently and are back after `restart_s`. Each loss stops the others for `stall_s`: they notice, and
redo the step in flight. Each return stops them for `join_stall_s`. The global batch stays, so fewer replicas deal out
the same micro batches and a step takes longer; a spare avoids that, and costs its GPUs all the time. The loss of all
replicas within one repair is so rare that going back to a checkpoint is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, lgamma, log, log1p, sqrt

from keepstep.plan.goodput import Recovery, best_interval_s, effective_share, mtbf_s

SCALES = (1024, 16_384, 100_000)
"""Numbers of GPUs that every plan shows."""


@dataclass(frozen=True)
class Replica:
    """One of the equal replicas of a run."""

    gpus: int
    """GPUs of one replica: one copy of the weights."""
    microbatches: int
    """What each of its processes computes in a step, where no replica is lost."""
    step_s: float


@dataclass(frozen=True)
class SurvivalPlan:
    """Both models at one number of GPUs. Shares are of all GPUs, spares included."""

    gpus: int
    replicas: int
    mtbf_s: float
    restart_share: float
    """Where every failure restarts all, at the best save interval."""
    survive_share: float
    """Where the other replicas continue, without spares."""
    spares: int
    """The number of replicas that is best held back as spares."""
    spares_share: float


def survival_share(
    run: Replica, replicas: int, spares: int, failures_per_gpu_s: float, recovery: Recovery, save_interval_s: float
) -> float:
    """Share of the time of all GPUs that makes progress: `replicas` of them train where all are well."""
    rate = failures_per_gpu_s * run.gpus
    down = rate * recovery.restart_s / (1 + rate * recovery.restart_s)
    speed = training = 0.0
    for lost, probability in _binomial(replicas + spares, down):
        members = min(replicas + spares - lost, replicas)
        training += probability * members
        if members:
            speed += probability * run.microbatches / ceil(replicas * run.microbatches / members)
    # Nothing moves at a moment with a loss or a return shortly before it; both happen at random.
    stall_s = recovery.replica_stall_s + run.step_s + recovery.join_stall_s
    saving = save_interval_s / (save_interval_s + recovery.stall_s)
    return speed * exp(-rate * training * stall_s) * saving * replicas / (replicas + spares)


def _binomial(count: int, chance: float) -> Iterator[tuple[int, float]]:
    """(k, probability of k among `count`) for every k that is not all but impossible."""
    mean, deviation = count * chance, sqrt(count * chance * (1 - chance))
    for k in range(max(0, int(mean - 9 * deviation)), min(count, int(mean + 9 * deviation) + 9) + 1):
        ways = lgamma(count + 1) - lgamma(k + 1) - lgamma(count - k + 1)
        yield k, exp(ways + k * log(chance) + (count - k) * log1p(-chance))


def plan_survival(run: Replica, gpus: int, failures_per_gpu_hour: float, recovery: Recovery) -> SurvivalPlan | None:
    """Both models at `gpus` GPUs; None where these are not even two replicas."""
    replicas = gpus // run.gpus
    if replicas < 2:
        return None
    mean_s = mtbf_s(failures_per_gpu_hour, gpus)
    interval_s = best_interval_s(recovery, mean_s)

    def share(spares: int) -> float:
        rate = failures_per_gpu_hour / 3600
        return survival_share(run, replicas - spares, spares, rate, recovery, interval_s)

    down = gpus * failures_per_gpu_hour / 3600 * recovery.restart_s
    most = min(replicas - 1, int(down + 6 * sqrt(down)) + 2)
    spares = max(range(most + 1), key=share)
    restart_share = effective_share(interval_s, recovery, mean_s)
    return SurvivalPlan(gpus, replicas, mean_s, restart_share, share(0), spares, share(spares))


def plan_scales(run: Replica, gpus: int, failures_per_gpu_hour: float, recovery: Recovery) -> list[SurvivalPlan]:
    """The run's own number of GPUs, and the scales."""
    plans = (plan_survival(run, count, failures_per_gpu_hour, recovery) for count in sorted({gpus, *SCALES}))
    return [plan for plan in plans if plan is not None]
