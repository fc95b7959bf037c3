"""The whole answer for one run on one cluster, as plain values: what the command prints and every run stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.core.units import Duration
from keepstep.models.size import parameter_count
from keepstep.plan.calibrate import Measured, calibrate, measured_run, same_device
from keepstep.plan.cluster import Cluster, Gpu, read_profiles
from keepstep.plan.fit import Remedy, remedies
from keepstep.plan.goodput import GoodputPlan, Recovery, known_recoveries, llama3_share, plan_goodput
from keepstep.plan.host import HostPlan, plan_host
from keepstep.plan.memory import MemoryPlan, plan_memory
from keepstep.plan.speed import UNCALIBRATED, Factors, SpeedPlan, plan_speed
from keepstep.plan.storage import (
    SaveTime,
    adapter_bytes,
    cheapest,
    checkpoint_bytes,
    dataset_bytes,
    local_save_s,
    save_times,
)
from keepstep.plan.workload import Precision, Recompute, Workload, workload_of

GIB = 2**30


@dataclass(frozen=True)
class Assumptions:
    """What a plan takes as given beside the run and the cluster."""

    recovery: Recovery
    factors: Factors = UNCALIBRATED
    calibrated_by: int = 0
    """Measured runs behind the factors."""
    save_within_s: float = 60.0


@dataclass(frozen=True)
class StoragePlan:
    """Bytes on disk and the time to write them."""

    checkpoint_bytes: int
    kept: int
    dataset_bytes: int | None
    saves: list[SaveTime]
    local_s: float | None
    wanted_s: float
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

    @property
    def fits(self) -> bool:
        """Whether the fullest process has room on its device, and each machine in its own memory."""
        return self.fits_device and self.host.fits

    @property
    def fits_device(self) -> bool:
        """Whether the fullest process has room on its device."""
        return self.memory.needed <= self.cluster.gpu.memory_gib * GIB

    @property
    def busy_s(self) -> float | None:
        """Seconds of steps in the whole run; None where its length is not known in steps or seconds."""
        return _seconds(self.config.max_duration, self.work, self.speed)

    @property
    def effective_share(self) -> float:
        """Of the time, what moves the run forward with its own saves; with the best where those are not known."""
        return self.goodput.best_share if self.goodput.share is None else self.goodput.share

    @property
    def wall_s(self) -> float | None:
        """The same with what failures and saves cost."""
        return None if self.busy_s is None else self.busy_s / max(self.effective_share, 1e-9)

    @property
    def cost(self) -> float | None:
        """Price of the machines for that time; None where no price or no length is known."""
        price = self.cluster.price_per_node_hour * self.cluster.nodes
        return None if self.wall_s is None or not price else self.wall_s / 3600 * price


def make_plan(config: RunConfig, cluster: Cluster, assumptions: Assumptions, precision: Precision = "bf16") -> Plan:
    """Plan a run on all GPUs of a cluster; a ConfigError where its layout does not make up their number."""
    work = workload_of(config, cluster.gpus, precision, int(cluster.gpu.memory_gib * GIB))
    if config.compute.recompute == "auto":
        work = _least_recompute(work)
    memory = plan_memory(work)
    speed = plan_speed(work, cluster, assumptions.factors)
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    fits = memory.needed <= cluster.gpu.memory_gib * GIB
    storage = _storage(config, work, cluster, assumptions.save_within_s)
    recovery = assumptions.recovery
    if not recovery.lag_s:
        recovery = replace(recovery, lag_s=_lag_s(storage))
    gpus = cluster.gpus
    every_s = _save_interval_s(config, work, speed)
    return Plan(
        config=config,
        cluster=cluster,
        work=work,
        memory=memory,
        host=plan_host(work, cluster, storage.checkpoint_bytes),
        by_recompute={mode: plan_memory(replace(work, recompute=mode)) for mode in modes},
        remedies=[] if fits else remedies(work, cluster, assumptions.factors, config.parallel.shard == -1),
        speed=speed,
        steps=_steps(config.max_duration, work),
        storage=storage,
        goodput=plan_goodput(cluster.failures_per_gpu_hour, gpus, recovery, every_s),
        assumptions=replace(assumptions, recovery=recovery),
    )


def _least_recompute(work: Workload) -> Workload:
    """The run chooses block by block; a plan says what the least that fits for all of them would be."""
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    choices = [replace(work, recompute=mode) for mode in modes]
    return next((each for each in choices if plan_memory(each).needed <= work.device_bytes), choices[-1])


def _storage(config: RunConfig, work: Workload, cluster: Cluster, within_s: float) -> StoragePlan:
    size = adapter_bytes(work) if work.lora_rank else checkpoint_bytes(config.model, config.optimizer.name)
    # One more than is kept: a new step is whole before an old one goes.
    copies = (config.checkpoint.keep or 10) + 1
    tokens = _tokens(config)
    return StoragePlan(
        checkpoint_bytes=size,
        kept=copies,
        dataset_bytes=None if tokens is None else dataset_bytes(tokens, config.model.vocab),
        saves=save_times(cluster.storage, size, copies),
        local_s=local_save_s(cluster, size),
        wanted_s=within_s,
        cheapest=cheapest(cluster.storage, size, copies, within_s),
    )


def _lag_s(storage: StoragePlan) -> float:
    """A save counts once shared storage has it; local disks where a profile names no other."""
    if storage.cheapest is not None:
        return storage.cheapest.seconds
    return min((save.seconds for save in storage.saves), default=storage.local_s or 0.0)


def _steps(duration: Duration, work: Workload) -> int | None:
    """Steps of a duration; None for epochs (the data decides) and for seconds."""
    match duration.unit:
        case "ba":
            return int(duration.value)
        case "sp":
            return -(-int(duration.value) // work.global_batch)
        case "tok":
            return -(-int(duration.value) // work.tokens_per_step)
        case _:
            return None


def _tokens(config: RunConfig) -> float | None:
    duration, row = config.max_duration, config.model.seq_len
    match duration.unit:
        case "ba":
            return duration.value * config.global_batch * row
        case "sp":
            return duration.value * row
        case "tok":
            return duration.value
        case _:
            return None


def _save_interval_s(config: RunConfig, work: Workload, speed: SpeedPlan) -> float | None:
    """Seconds of work between saves: of all of it where they come only at the end; None where epochs decide."""
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


def as_values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON holds it; sizes in GiB and seconds, named so."""
    work, memory, speed, goodput = plan.work, plan.memory, plan.speed, plan.goodput
    recovery = plan.assumptions.recovery
    return {
        "model": plan.config.model.preset,
        "parameters": parameter_count(plan.config.model),
        "cluster": {
            "name": plan.cluster.name,
            "gpu": plan.cluster.gpu.name,
            "nodes": plan.cluster.nodes,
            "gpus": plan.cluster.gpus,
        },
        "layout": {**asdict(work.degrees), "microbatch": work.microbatch, "microbatches": work.microbatches},
        "precision": work.precision,
        "recompute": work.recompute,
        "memory": {
            "parts_gib": {name: size / GIB for name, size in asdict(memory.parts).items()},
            "allocated_gib": memory.allocated / GIB,
            "slack_gib": memory.slack / GIB,
            "needed_gib": memory.needed / GIB,
            "available_gib": plan.cluster.gpu.memory_gib,
            "instant": memory.instant,
            "stage": memory.stage,
            "fits": plan.fits_device,
            "needed_by_recompute_gib": {mode: each.needed / GIB for mode, each in plan.by_recompute.items()},
            "remedies": [
                {"words": list(each.words), "needed_gib": each.needed_bytes / GIB, "step_s": each.step_s}
                for each in plan.remedies
            ],
        },
        "host": {
            "offloaded_gib": plan.host.offloaded / GIB,
            "copy_gib": plan.host.copy / GIB,
            "needed_gib": plan.host.needed / GIB,
            "available_gib": plan.host.available_gib or None,
            "fits": plan.host.fits,
        },
        "speed": {
            **asdict(speed.step),
            "step_s": speed.step.total_s,
            "communication_s": speed.traffic_s,
            "flops_per_token": speed.flops_per_token,
            "tokens_per_step": work.tokens_per_step,
            "tokens_per_s": speed.tokens_per_s,
            "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
            "mfu": speed.mfu,
            "calibrated_by_runs": plan.assumptions.calibrated_by,
        },
        "run": {"steps": plan.steps, "busy_s": plan.busy_s, "wall_s": plan.wall_s, "cost": plan.cost},
        "storage": {
            "checkpoint_bytes": plan.storage.checkpoint_bytes,
            "copies": plan.storage.kept,
            "dataset_bytes": plan.storage.dataset_bytes,
            "local_save_s": plan.storage.local_s,
            "saves": [_save_values(each) for each in plan.storage.saves],
            "save_within_s": plan.storage.wanted_s,
            "cheapest": None if plan.storage.cheapest is None else _save_values(plan.storage.cheapest),
        },
        "goodput": {
            **asdict(goodput),
            "recovery": asdict(recovery),
            "llama3_share": llama3_share(replace(recovery, lag_s=0.0)),
        },
    }


def _save_values(save: SaveTime) -> dict[str, Any]:
    return {**asdict(save), "minutes": save.minutes, "minutes_mixed_units": save.minutes_mixed_units}


@dataclass(frozen=True)
class DeviceFacts:
    """The machine a run has started on, in plain numbers."""

    name: str
    """As the driver calls it, `NVIDIA H200`, or `CPU`."""
    memory_bytes: int
    peak_flops: float
    """In the run's precision."""
    processes: int
    processes_per_node: int


def plan_for_run(config: RunConfig, facts: DeviceFacts, precision: Precision) -> dict[str, Any]:
    """What a run that starts on this machine should need and reach: stored with it, and read by its report."""
    cluster = cluster_from(facts)
    runs = shipped_runs()
    usable = sum(same_device(run.device, cluster.gpu) for run in runs)
    assumptions = Assumptions(known_recoveries()["keepstep"], calibrate(runs, cluster), usable)
    return as_values(make_plan(config, cluster, assumptions, precision))


def cluster_from(facts: DeviceFacts) -> Cluster:
    """A profile for a machine found running: the known GPU of that name, else one made of its own numbers."""
    known = [gpu for gpu in read_profiles().gpus.values() if same_device(facts.name, gpu)]
    memory_gib = facts.memory_bytes / GIB
    if known:
        gpu = min(known, key=lambda each: abs(each.memory_gib - memory_gib))
        gpu = replace(gpu, memory_gib=memory_gib)
    else:
        rate = facts.peak_flops / 1e12
        # A processor's memory feeds it at about an eighth of a byte for each operation.
        gpu = Gpu(facts.name, memory_gib, dict.fromkeys(("fp32", "bf16", "fp16"), rate), rate * 1e12 / 8 / 1e9)
    nodes = -(-facts.processes // facts.processes_per_node)
    return Cluster(facts.name, gpu, gpus_per_node=-(-facts.processes // nodes), nodes=nodes)


def shipped_runs() -> list[Measured]:
    """Runs that we measured, by which plans for those devices are calibrated."""
    import json

    text = (resources.files("keepstep.plan") / "data" / "measured.json").read_text(encoding="utf-8")
    return [measured_run(entry, f"measured.json[{number}]") for number, entry in enumerate(json.loads(text)["runs"])]


def predicted_beside_measured(plan: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A stored plan against the metric lines of its run: name, predicted, measured, error; empty without steps.

    The first fifth of the steps (compilation, warm caches) is left out of times, and the median is taken of the rest.
    """
    from statistics import median

    settled = steps[len(steps) // 5 :]
    if not settled:
        return []
    speed, memory = plan["speed"], plan["memory"]
    measured = {
        "step_s": (speed["step_s"], median(line["step_s"] for line in settled)),
        "tokens_per_s": (speed["tokens_per_s"], median(line["tokens_per_s"] for line in settled)),
    }
    if all("mfu" in line for line in settled):
        measured["mfu"] = (speed["mfu"], median(line["mfu"] for line in settled))
    if all("memory_gib" in line for line in steps):
        measured["memory_gib"] = (memory["allocated_gib"], max(line["memory_gib"] for line in steps))
    return [
        {"name": name, "predicted": predicted, "measured": seen, "error": predicted / seen - 1 if seen else None}
        for name, (predicted, seen) in measured.items()
    ]
