"""Step time on this machine: the same parts as a run, synthetic rows, no files."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from keepstep.config.layout import check_layout
from keepstep.config.schema import RunConfig
from keepstep.core.ranks import from_environment
from keepstep.core.verbosity import progress
from keepstep.data.batch import Batch, SyntheticRows
from keepstep.data.loader import Loader
from keepstep.models.size import flops_per_token, parameter_count
from keepstep.parallel.mesh import build_mesh
from keepstep.parallel.world import choose_device, joined_world, share_cores
from keepstep.train.build import build_learner
from keepstep.train.device import (
    check_device,
    chosen_kernels,
    compute_dtype,
    device_name,
    known_peak_flops,
    peak_memory_gib,
    recompute_modes,
    settle_auto,
)
from keepstep.train.telemetry.async_metrics import AsyncMetrics

_KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa", "cudnn_generated")),
    ("matmul", ("gemm", "expert_", "cutlass", "nvjet", "cublas", "_mm", "::mm", "::addmm", "::bmm")),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("communication", ("nccl", "gloo", "all_gather", "reduce_scatter", "all_reduce")),
    ("copies", ("memcpy", "memset", "copy")),
)


@dataclass(frozen=True)
class StepBench:
    """One measurement; the planner's calibration files consist of these."""

    model: str
    parameters: int
    seq_len: int
    global_batch: int
    microbatch: int
    recompute: str
    compile: bool
    joined_products: bool
    precision: str
    device: str
    world_size: int
    torch: str
    step_s: float
    """Median over the measured steps."""
    steps_s: list[float]
    tokens_per_s: float
    mfu: float | None
    """None where the peak of the device is unknown."""
    peak_memory_gib: float
    first_step_s: float
    loss: float
    breakdown: dict[str, float] = field(default_factory=dict)
    """Device seconds per step by kind of kernel."""
    recompute_by_block: list[str] = field(default_factory=list)
    """What each block recomputed, where `recompute` is auto and they differed."""


def bench_step(config: RunConfig, steps: int = 10, warmup: int = 3, breakdown: bool = True) -> StepBench:
    """Run steps of this configuration and time them; every process of the run calls this."""
    ranks = from_environment()
    layout = check_layout(config, ranks.world_size)
    device = choose_device(config.compute.device, ranks.local_rank)
    threads = config.compute.threads or int(config.reproducible == "elastic")
    share_cores(threads, ranks.local_world_size)
    with chosen_kernels(config), joined_world(ranks, device):
        config, line = settle_auto(config)
        if line and ranks.is_first:
            progress(line)
        check_device(config, saves=False)
        dtype = compute_dtype(config.precision, device)
        mesh, modes = build_mesh(layout, device.type), recompute_modes(config, layout, device)
        train_step = build_learner(config, mesh, device).step
        batches = synthetic_batches(config, mesh.data_rank, layout.data_ranks)

        def one() -> torch.Tensor:
            return train_step.run(batches, lr_share=1.0)

        started = time.perf_counter()
        one()[0].item()
        first_step_s = time.perf_counter() - started
        for _ in range(warmup - 1):
            one()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        # Read one step late, as a run does, so that the device never waits for the host.
        pending, seconds, loss = AsyncMetrics(device), [], 0.0
        for _ in range(steps):
            pending.push(one())
        for _ in range(steps):
            numbers, step_s = pending.pop()
            seconds.append(step_s)
            loss = numbers[0]
        step_s = statistics.median(seconds)
        tokens_per_s = config.global_batch * config.model.seq_len / step_s
        peak = known_peak_flops(device, dtype)
        flops_per_s = tokens_per_s * flops_per_token(config.model, config.model.seq_len, frozen=config.lora.rank > 0)
        return StepBench(
            model=config.model.preset,
            parameters=parameter_count(config.model),
            seq_len=config.model.seq_len,
            global_batch=config.global_batch,
            microbatch=config.microbatch,
            recompute=modes[0] if len(set(modes)) == 1 else "auto",
            compile=bool(config.compute.compile),
            joined_products=config.compute.fused_matmuls,
            precision=config.precision,
            device=device_name(device),
            world_size=ranks.world_size,
            torch=torch.__version__,
            step_s=step_s,
            steps_s=seconds,
            tokens_per_s=tokens_per_s,
            mfu=flops_per_s / (peak * ranks.world_size) if peak else None,
            peak_memory_gib=peak_memory_gib(device),
            first_step_s=first_step_s,
            loss=loss,
            breakdown=_breakdown(one, device) if breakdown else {},
            recompute_by_block=list(modes) if len(set(modes)) > 1 else [],
        )


def synthetic_batches(config: RunConfig, rank: int, ranks: int) -> list[Batch]:
    """One process's micro batches of a step."""
    loader = Loader(
        SyntheticRows(config.model.seq_len, config.model.vocab, config.seed), seed=config.seed, shuffle=False
    )
    numbers = range(rank, config.global_batch // config.microbatch, ranks)
    return [loader.rows(number * config.microbatch, config.microbatch) for number in numbers]


def _breakdown(step: Callable[[], torch.Tensor], device: torch.device) -> dict[str, float]:
    """Device seconds of one step, sorted into a few kinds by kernel name; `other` is mostly element-wise work."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        step()[0].item()
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        own_us = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        seconds[kernel_kind(event.key)] += own_us / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def kernel_kind(name: str) -> str:
    """Which part of a step a kernel belongs to."""
    lowered = name.lower()
    return next((kind for kind, marks in _KINDS if any(mark in lowered for mark in marks)), "other")
