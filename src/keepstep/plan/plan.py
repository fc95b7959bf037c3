"""The plan of one run on one cluster: memory, speed, storage and goodput."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep.config.schema import RunConfig
from keepstep.core.units import Duration, Pace
from keepstep.plan.calibrate import calibrate, shipped_runs
from keepstep.plan.capacity import HostPlan, choose_microbatch, plan_host
from keepstep.plan.cluster import GIB, Cluster, Machine, cluster_from
from keepstep.plan.goodput import (
    GoodputPlan,
    Recovery,
    SaveTime,
    cheapest,
    dataset_bytes,
    known_recoveries,
    plan_goodput,
    save_times,
    saved_bytes,
)
from keepstep.plan.memory import MemoryPlan, plan_memory
from keepstep.plan.search import Remedy, remedies
from keepstep.plan.speed import UNCALIBRATED, Factors, SpeedPlan, plan_speed
from keepstep.plan.survival import Replica, SurvivalPlan, plan_scales
from keepstep.plan.workload import RECOMPUTE, Precision, Recompute, Workload


@dataclass(frozen=True)
class Assumptions:
    """What a plan assumes, apart from the run and the cluster."""

    recovery: Recovery
    factors: Factors = UNCALIBRATED
    calibrated_by: int = 0
    """Measured runs behind the factors."""
    save_within_s: float = 60.0


@dataclass(frozen=True)
class StoragePlan:
    """Bytes on disk and the time to write them."""

    checkpoint_bytes: int
    copies: int
    dataset_bytes: int | None
    local_save_s: float | None
    """Where every machine writes its part to its own disks; None where the profile has no rate for them."""
    saves: list[SaveTime]
    save_within_s: float
    cheapest: SaveTime | None


@dataclass(frozen=True)
class Plan:
    """Memory, speed, storage and goodput of one run."""

    config: RunConfig
    cluster: Cluster
    work: Workload
    memory: MemoryPlan
    host: HostPlan
    by_recompute: dict[Recompute, MemoryPlan]
    remedies: list[Remedy]
    speed: SpeedPlan
    steps: int | None
    storage: StoragePlan
    goodput: GoodputPlan
    assumptions: Assumptions
    chosen: tuple[str, ...] = ()
    """Overrides that nobody gave: the run needs them on this cluster."""
    chose_microbatch: bool = False
    """Whether the configuration has `microbatch: auto`; `config` has the number."""

    @property
    def fits(self) -> bool:
        """Whether the fullest process fits on its device, and the machine's processes in host memory."""
        return self.fits_device and self.host.fits

    @property
    def fits_device(self) -> bool:
        """Whether the fullest process fits on its device."""
        return self.memory.needed <= self.cluster.gpu.memory_gib * GIB

    @property
    def busy_s(self) -> float | None:
        """Seconds of steps in the whole run; None where its length is in epochs."""
        return _seconds(self.config.max_duration, self.work, self.speed)

    @property
    def effective_share(self) -> float:
        """Goodput with the run's own save interval; with the best one where it is not known."""
        return self.goodput.best_share if self.goodput.share is None else self.goodput.share

    @property
    def replica(self) -> Replica:
        """What a failure takes out where replicas survive each other."""
        gpus = self.cluster.gpus // self.work.degrees.replicate
        return Replica(gpus, self.work.microbatches, self.speed.step.total_s)

    @property
    def survival(self) -> list[SurvivalPlan]:
        """Restarts against replicas that survive, on these and on more GPUs."""
        rate = self.cluster.failures_per_gpu_hour
        return plan_scales(self.replica, self.cluster.gpus, rate, self.assumptions.recovery)

    @property
    def wall_s(self) -> float | None:
        """Seconds of the whole run, with failures and saves."""
        return None if self.busy_s is None else self.busy_s / max(self.effective_share, 1e-9)

    @property
    def cost(self) -> float | None:
        """Price of the machines for that time; None where the price or the length is not known."""
        price = self.cluster.price_per_node_hour * self.cluster.nodes
        return None if self.wall_s is None or not price else self.wall_s / 3600 * price


def make_plan(config: RunConfig, cluster: Cluster, assumptions: Assumptions, precision: Precision = "bf16") -> Plan:
    """Plan a run on all GPUs of a cluster; a ConfigError where its degrees do not multiply to their number."""
    work = choose_microbatch(config, cluster.gpus, cluster, assumptions.factors, precision)
    memory = plan_memory(work)
    speed = plan_speed(work, cluster, assumptions.factors)
    fits = memory.needed <= cluster.gpu.memory_gib * GIB
    storage = _storage(config, work, cluster, assumptions.save_within_s)
    recovery = assumptions.recovery
    if not recovery.lag_s:
        recovery = replace(recovery, lag_s=_lag_s(storage))
    return Plan(
        config=replace(config, microbatch=work.microbatch),
        cluster=cluster,
        work=work,
        memory=memory,
        host=plan_host(work, cluster, storage.checkpoint_bytes),
        by_recompute={mode: plan_memory(replace(work, recompute=mode, recompute_by_block=())) for mode in RECOMPUTE},
        remedies=[] if fits else remedies(work, cluster, assumptions.factors, config.parallel.shard == -1),
        speed=speed,
        steps=_steps(config.max_duration, work),
        storage=storage,
        goodput=plan_goodput(
            cluster.failures_per_gpu_hour, cluster.gpus, recovery, _save_interval_s(config, work, speed)
        ),
        assumptions=replace(assumptions, recovery=recovery),
        chose_microbatch=not config.microbatch,
    )


def _storage(config: RunConfig, work: Workload, cluster: Cluster, within_s: float) -> StoragePlan:
    size = saved_bytes(config, work)
    # One more than `keep`: a new step is complete before an old one is deleted.
    copies = (config.checkpoint.keep or 10) + 1
    tokens = _tokens(config)
    local_gb_s = cluster.nodes * cluster.nvme_gb_s
    return StoragePlan(
        checkpoint_bytes=size,
        copies=copies,
        dataset_bytes=None if tokens is None else dataset_bytes(tokens, config.model.vocab),
        local_save_s=size / (local_gb_s * 1e9) if local_gb_s else None,
        saves=save_times(cluster.storage, size, copies),
        save_within_s=within_s,
        cheapest=cheapest(cluster.storage, size, copies, within_s),
    )


def _lag_s(storage: StoragePlan) -> float:
    """A save counts when shared storage has it; local disks where the profile names no storage."""
    if storage.cheapest is not None:
        return storage.cheapest.seconds
    return min((save.seconds for save in storage.saves), default=storage.local_save_s or 0.0)


def _steps(duration: Duration, work: Workload) -> int | None:
    """Steps of a duration; None for epochs (the data decides) and for seconds."""
    return None if duration.unit == "ep" else Pace(work.global_batch, work.model.seq_len, 0).steps(duration)


def _tokens(config: RunConfig) -> float | None:
    row = config.model.seq_len
    tokens_per_unit = {"ba": config.global_batch * row, "sp": row, "tok": 1}.get(config.max_duration.unit)
    return None if tokens_per_unit is None else config.max_duration.value * tokens_per_unit


def _save_interval_s(config: RunConfig, work: Workload, speed: SpeedPlan) -> float | None:
    """Seconds of work between saves; the whole run where it saves only at its end, None where epochs decide."""
    every_s, whole_s = (_seconds(each, work, speed) for each in (config.checkpoint.interval, config.max_duration))
    if not config.checkpoint.interval.value:
        return whole_s
    return every_s if whole_s is None or every_s is None else min(every_s, whole_s)


def _seconds(duration: Duration, work: Workload, speed: SpeedPlan) -> float | None:
    """A duration in seconds of steps; None where it is in epochs."""
    if duration.unit == "s":
        return duration.value
    steps = _steps(duration, work)
    return None if steps is None else steps * speed.step.total_s


def plan_on_machine(config: RunConfig, machine: Machine) -> Plan:
    """Plan a run on the machine it has started on."""
    cluster = cluster_from(machine)
    runs = shipped_runs()
    usable = sum(cluster.gpu.is_named(run.device) for run in runs)
    assumptions = Assumptions(known_recoveries()["keepstep"], calibrate(runs, cluster), usable)
    return make_plan(config, cluster, assumptions, machine.precision)
