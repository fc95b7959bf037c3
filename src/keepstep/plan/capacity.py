"""Host memory of a run, and the checks at its start: what would exceed host or device memory is refused.

With `parallel.offload`, FSDP2 keeps three things in host memory: weights and gradients in pinned memory, which torch
allocates in powers of two, and the optimizer's moments. With `compute.offload_activations`, what blocks save for the
backward pass is there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from keepstep.config.layout import microbatch_choices
from keepstep.config.schema import RunConfig
from keepstep.core.errors import PreflightError
from keepstep.plan.calibrate import calibrate, shipped_runs
from keepstep.plan.cluster import CPU, GIB, Cluster, Machine, cluster_from
from keepstep.plan.goodput import saved_bytes
from keepstep.plan.memory import moment_bytes, offloaded_bytes, plan_memory
from keepstep.plan.search import MARGIN, recompute_modes, remedies, settled_work
from keepstep.plan.speed import UNCALIBRATED, Factors, plan_speed
from keepstep.plan.tensors import FP32, block_matrices, stage_parameters
from keepstep.plan.workload import Precision, Workload, workload_of

TOLERANCE = 0.03
"""An estimate may be wrong by this much: a run that exceeds its memory by less starts, with a warning."""
PIPELINE_TOLERANCE = 0.15
"""The same for pipeline schedules other than 1f1b, whose peak the formula overestimates."""
ENOUGH_SPEED = 0.99
"""`microbatch: auto` treats layouts that reach this share of the best speed as equally fast."""
ENOUGH_TOKENS = 16384
"""Among those it takes the fewest rows with this many tokens: with fewer, matmuls may be too small for a GPU, which the
plan does not count. An assumption, not a measurement."""
FEW_ROWS = 8
"""The most rows of a forward pass that `microbatch: auto` chooses on CPUs and in elastic runs."""
GPU_PROCESS_BYTES = 2 * GIB
"""Host memory of a process that uses a GPU: Python, torch and the CUDA context."""
CPU_PROCESS_BYTES = GIB // 2


@dataclass(frozen=True)
class HostPlan:
    """Host memory that the run needs on one machine."""

    offloaded: int
    """Weights, gradients and moments of all its processes, where they are in host memory."""
    activations: int
    """What blocks of all its processes save, where that is offloaded."""
    copy: int
    """The machine's part of a checkpoint, copied so that training continues while it is written."""
    processes: int
    """The programs themselves."""
    available_gib: float
    """0 where the profile does not state it."""

    @property
    def needed(self) -> int:
        """The sum. In-memory snapshots come on top, but only where there is room for them."""
        return self.offloaded + self.activations + self.copy + self.processes

    @property
    def fits(self) -> bool:
        """Whether a machine has this much memory; assumed where the profile does not state it."""
        return not self.available_gib or self.needed <= self.available_gib * GIB

    def parts(self) -> str:
        """What the memory is for, in GiB."""
        names = ("weights, gradients and moments", "activations", "a copy for saves", "processes")
        sizes = (self.offloaded, self.activations, self.copy, self.processes)
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in zip(names, sizes, strict=True) if size)


def plan_host(work: Workload, cluster: Cluster, checkpoint_bytes: int) -> HostPlan:
    """Host memory of one machine, as if all its processes were the fullest one."""
    return HostPlan(
        offloaded=state_bytes(work, pinned=True) * cluster.gpus_per_node if work.offload else 0,
        activations=offloaded_bytes(work) * cluster.gpus_per_node,
        copy=-(-checkpoint_bytes // cluster.nodes),
        processes=GPU_PROCESS_BYTES * cluster.gpus_per_node,
        available_gib=cluster.host_memory_gib,
    )


def state_bytes(work: Workload, *, pinned: bool) -> int:
    """Weights, gradients and moments of the fullest process; in `pinned` memory matrices take powers of two."""
    last = work.degrees.pipeline - 1
    return max(_stage_state_bytes(work, stage, pinned) for stage in {0, min(1, last), last})


def _stage_state_bytes(work: Workload, stage: int, pinned: bool) -> int:
    counts, shard = stage_parameters(work, stage), work.degrees.weight_shards
    weight_size = work.compute_bytes if counts.adapters else FP32
    matrices = [*block_matrices(work) * counts.blocks, *counts.tables]

    def allocated(size: int) -> int:
        sizes = [size * matrix // shard for matrix in matrices]
        rest = size * (counts.total - sum(matrices)) // shard
        return sum(1 << (each - 1).bit_length() if pinned and each else each for each in sizes) + rest

    adapters = 2 * FP32 * counts.trained // shard
    trained = adapters if counts.adapters else allocated(FP32)
    return allocated(weight_size) + trained + moment_bytes(work, counts)


def machines_for_host(host: HostPlan, machines: int) -> int:
    """Machines that are enough for the state: doubled, so that batches still divide."""
    wanted = machines * host.needed / GIB / host.available_gib
    while machines < wanted:
        machines *= 2
    return machines


@dataclass(frozen=True)
class HostMachine:
    """One machine of a run, before its processes start."""

    processes: int
    """Of the whole run."""
    processes_here: int
    gpu: bool
    """Whether the processes compute on GPUs; else all their tensors are in host memory."""
    available_bytes: int
    """Host memory that this machine can give; 0 where it does not say."""
    saves: bool = True
    """Whether a copy for saves is held; a measurement of steps holds none."""


def check_host_memory(config: RunConfig, machine: HostMachine) -> Iterator[str]:
    """Raise a PreflightError where the run needs more host memory than there is; yields warnings."""
    host = _host_of(config, machine)
    if host.fits:
        return
    message = f"this machine has {host.available_gib:.1f} GiB of host memory free, and the run needs about "
    message += f"{host.needed / GIB:.1f} GiB here ({host.parts()})"
    if host.needed <= (1 + TOLERANCE) * machine.available_bytes:
        yield f"warning: {message}"
        return
    raise PreflightError(message, ", or ".join(_host_remedies(config, machine)) or "a machine with more memory")


def _host_of(config: RunConfig, machine: HostMachine) -> HostPlan:
    work = workload_of(config, machine.processes, "bf16" if machine.gpu else "fp32")
    if config.compute.recompute == "auto":
        # Only offloading asks, and with it auto is full.
        work = replace(work, recompute="full")
    in_host = work.offload or not machine.gpu
    here = machine.processes_here
    return HostPlan(
        offloaded=state_bytes(work, pinned=machine.gpu) * here if in_host else 0,
        activations=offloaded_bytes(work) * here if machine.gpu else 0,
        copy=saved_bytes(config, work) * here // machine.processes if machine.saves else 0,
        processes=(GPU_PROCESS_BYTES if machine.gpu else CPU_PROCESS_BYTES) * here,
        available_gib=machine.available_bytes / GIB,
    )


def _host_remedies(config: RunConfig, machine: HostMachine) -> Iterator[str]:
    """Changes with which the run fits into host memory."""
    if config.parallel.offload and machine.gpu:
        kept = replace(config, parallel=replace(config.parallel, offload=False))
        if _host_of(kept, machine).fits:
            yield "parallel.offload=false where the GPU has room (keepstep plan says)"
    if config.compute.offload_activations:
        kept = replace(config, compute=replace(config.compute, offload_activations=False))
        if _host_of(kept, machine).fits:
            yield "compute.offload_activations=false with compute.recompute=full"
    if not config.lora.rank and _host_of(replace(config, lora=replace(config.lora, rank=16)), machine).fits:
        yield "lora.rank=16"
    if config.parallel.offload or config.compute.offload_activations or not machine.gpu:
        yield f"{machines_for_host(_host_of(config, machine), 1)} machines like this one"


def choose_microbatch(
    config: RunConfig, world_size: int, cluster: Cluster, factors: Factors, precision: Precision
) -> Workload:
    """The step of `config`; of `microbatch: auto` with as many rows as make it fastest among those that fit.

    A CPU's speed is not planned well enough for that: there it is the most rows that fit, at most `FEW_ROWS`. So it is
    in elastic runs, which are to be the same on any number of processes: what is fastest depends on the number.
    """
    few = cluster.gpu.name == CPU or config.whole_weights
    fitting: list[Workload] = []
    for rows in [config.microbatch] if config.microbatch else microbatch_choices(config, world_size):
        work = settled_work(replace(config, microbatch=rows), world_size, cluster, factors, precision)
        # Elastic runs and survivors may have fewer micro batches than processes, of which some would then do nothing.
        too_many = rows * work.degrees.data_ranks > work.global_batch or (few and rows > FEW_ROWS)
        # Memory grows with the rows. Where nothing fits, whoever checks memory says so of the fewest.
        if fitting and (too_many or not _fits_with_margin(config, work, cluster)):
            break
        fitting.append(work)
    if few:
        return fitting[-1]
    # The host's time for compiled blocks is not known, but they need less of it than others.
    speeds = [plan_speed(replace(work, compile=False), cluster, factors).tokens_per_s for work in fitting]
    fast = [work for work, speed in zip(fitting, speeds, strict=True) if speed >= ENOUGH_SPEED * max(speeds)]
    return next((work for work in fast if work.tokens_per_microbatch >= ENOUGH_TOKENS), fast[-1])


def _fits_with_margin(config: RunConfig, work: Workload, cluster: Cluster) -> bool:
    if work.offload_activations and not plan_host(work, cluster, saved_bytes(config, work)).fits:
        return False
    return plan_memory(work).needed <= (1 - MARGIN) * work.device_bytes


def microbatch_on(config: RunConfig, machine: Machine, host_bytes: int = 0) -> tuple[Workload, float]:
    """`choose_microbatch` on the machine that a run has started on, and the planned seconds of its step.

    `host_bytes` is the machine's free host memory, which activations may be moved to; 0 where it does not say.
    """
    cluster = replace(cluster_from(machine), host_memory_gib=host_bytes / GIB)
    factors = calibrate(shipped_runs(), cluster)
    work = choose_microbatch(config, machine.processes, cluster, factors, machine.precision)
    return work, plan_speed(work, cluster, factors).step.total_s


def check_device_memory(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Raise a PreflightError where the run cannot fit on its device even with full recomputation; yields warnings."""
    cluster = cluster_from(machine)
    work = workload_of(config, machine.processes, machine.precision, machine.memory_bytes)
    if config.compute.recompute == "auto":
        work = replace(work, recompute_by_block=recompute_modes(config, machine))
    needed = plan_memory(work).needed
    if needed <= machine.memory_bytes:
        return
    least = plan_memory(replace(work, recompute="full", recompute_by_block=()))
    message = f"the run needs about {needed / GIB:.1f} GiB on its fullest device, and {machine.device} has "
    message += f"{machine.memory_bytes / GIB:.1f} GiB"
    rough = work.degrees.pipeline > 1 and work.schedule != "1f1b"
    if least.needed <= (1 + (PIPELINE_TOLERANCE if rough else TOLERANCE)) * machine.memory_bytes:
        hint = "compute.recompute=auto" if needed > least.needed else "a smaller microbatch"
        yield f"warning: {message}; if it runs out of memory, set {hint}"
        return
    parts = {name: size for name, size in vars(least.parts).items() if size}
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    found = remedies(work, cluster, UNCALIBRATED, config.parallel.shard == -1)
    hint = "; or ".join(" ".join(each.overrides) for each in found) or "more or larger GPUs: keepstep plan --search"
    raise PreflightError(f"{message}; with compute.recompute=full {least.needed / GIB:.1f} GiB ({listed})", hint)
