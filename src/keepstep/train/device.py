"""This process's device: its kernels, its number format for matmuls, its memory and its peak rate."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepstep.config.layout import Layout, check_layout, may_compile, microbatch_choices
from keepstep.config.load import load_config
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError, HardwareError
from keepstep.core.proc import available_memory_bytes
from keepstep.core.ranks import from_environment
from keepstep.models.block_plan import RecomputeMode
from keepstep.models.kernels.attention_backward import supports
from keepstep.models.kernels.attention_schedule import KEYS
from keepstep.models.kernels.cuda import is_hopper, multiplies_fp8
from keepstep.models.ops.backend import has_triton
from keepstep.models.ops.varlen_attention import flash_supports
from keepstep.models.size import peak_flops
from keepstep.parallel.world import choose_device
from keepstep.plan.capacity import HostMachine, check_device_memory, check_host_memory, microbatch_on
from keepstep.plan.cluster import GIB, Machine
from keepstep.plan.memory import plan_memory
from keepstep.plan.search import recompute_modes as plan_recompute
from keepstep.plan.workload import Precision

_FIRST_WITH_TRITON = (7, 0)
_ATTENTION = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The number format of matmuls."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise HardwareError(
            f"precision is bf16, but {torch.cuda.get_device_name(device)} does not support it",
            "precision=fp16 or precision=fp32",
        )
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    return dtypes[precision]


def device_name(device: torch.device) -> str:
    """The device as the driver names it, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def known_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak rate that MFU is measured against; None where it is unknown: on CPUs, and on GPUs that no table has."""
    if device.type != "cuda":
        return None
    return peak_flops(device_name(device), "fp32" if dtype == torch.float32 else "bf16")


def describe_machine(config: RunConfig, device: torch.device, processes: int, processes_per_node: int) -> Machine:
    """The machines of a run as plans know them."""
    dtype = compute_dtype(config.precision, device)
    precisions: dict[torch.dtype, Precision] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes_per_node
    return Machine(
        device=device_name(device),
        memory_bytes=memory_bytes,
        peak_flops=known_peak_flops(device, dtype) or measured_peak_flops(device),
        precision="fp8" if config.precision == "fp8" else precisions[dtype],
        processes=processes,
        processes_per_node=processes_per_node,
    )


@cache
def measured_peak_flops(device: torch.device) -> float:
    """The matmul rate of this machine in fp32, for hardware that is in no table: the best of a few matmuls."""
    size = 1024
    own = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=own) for _ in range(2))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def check_device(config: RunConfig, *, saves: bool = True) -> None:
    """Raise where this process's device lacks fp8 matmuls or memory for the run; the first process prints warnings."""
    ranks = from_environment()
    device = choose_device(config.compute.device, ranks.local_rank)
    # Under adapters fp8 is the format of the frozen weights, which are dequantised where they cannot be multiplied.
    if config.precision == "fp8" and not config.lora.rank and device.type == "cuda" and not multiplies_fp8(device):
        raise HardwareError(f"precision is fp8, but {device_name(device)} has no fp8 matmuls", "precision=bf16")
    warnings: list[str] = []
    if device.type == "cuda":
        machine = describe_machine(config, device, ranks.world_size, ranks.local_world_size)
        warnings += check_device_memory(config, machine)
    # Once per machine, and before its first start only: later its agent holds snapshots in the same memory.
    if ranks.local_rank == 0 and not ranks.restarts:
        processes, gpu = (ranks.world_size, ranks.local_world_size), device.type == "cuda"
        here = HostMachine(*processes, gpu, available_memory_bytes(), saves)
        warnings += check_host_memory(config, here)
    if ranks.is_first:
        for warning in warnings:
            print(warning, file=sys.stderr, flush=True)


def recompute_modes(config: RunConfig, layout: Layout, device: torch.device) -> Sequence[RecomputeMode]:
    """What each block recomputes; `auto` chooses by the memory of the GPU, and nothing on a CPU."""
    if config.compute.recompute != "auto":
        return [config.compute.recompute] * config.model.layers
    if device.type != "cuda":
        return ["none"] * config.model.layers
    ranks = from_environment()
    # A layout of one replica that outlives others is not that of the whole run.
    processes = ranks.world_size if config.replica_size > 1 else layout.world_size
    per_node = min(processes, ranks.local_world_size)
    return plan_recompute(config, describe_machine(config, device, processes, per_node))


def settle_auto(config: RunConfig, stored: Path | None = None) -> tuple[RunConfig, str]:
    """The configuration with values in place of `compute.compile: auto` and `microbatch: auto`, and a line about the
    rows; every process gets the same.

    A run keeps the values of its `stored` configuration where they obey the rules on this many processes, so that a
    restart computes the same bits. Every process of the process group calls this.
    """
    ranks = from_environment()
    device = choose_device(config.compute.device, ranks.local_rank)
    before = _stored_config(config, stored)
    if config.compute.compile is None:
        compiled = _settled_compile(config, before, device)
        config = replace(config, compute=replace(config.compute, compile=compiled))
    return (config, "") if config.microbatch else _settle_microbatch(config, before, stored, device)


def _settled_compile(config: RunConfig, before: RunConfig | None, device: torch.device) -> bool:
    """Whether blocks are compiled: as at the run's first start, else where every process can."""
    if device.type != "cuda":
        return False
    ranks = from_environment()
    layout = check_layout(config, ranks.all_processes or ranks.world_size)
    # Whatever its layout is, it must obey the rules of today's settings.
    kept = before.compute.compile if before is not None and may_compile(config, Layout()) else None
    missing = missing_for_compile(device) if may_compile(config, layout) else "another layout"
    # Only some processes may see the run's folder, and machines may differ.
    votes = torch.tensor([-1 if kept is None else int(kept), int(bool(missing))])
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return not votes[1] if votes[0] < 0 else bool(votes[0])


def missing_for_compile(device: torch.device) -> str:
    """What torch.compile needs on a GPU and is not there; empty if nothing."""
    if torch.cuda.get_device_capability(device) < _FIRST_WITH_TRITON:
        return "a GPU of compute capability 7.0 or newer"
    if not has_triton():
        return "Triton"
    # Triton builds a small module in C around each kernel.
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return "" if found else "a C compiler (gcc or clang)"


def _settle_microbatch(
    config: RunConfig, before_run: RunConfig | None, stored: Path | None, device: torch.device
) -> tuple[RunConfig, str]:
    """Where the run has no number yet each process plans for its own device, and the smallest number counts: it obeys
    the rules, which are the same everywhere, and fits on all."""
    ranks = from_environment()
    machine = describe_machine(config, device, ranks.world_size, ranks.local_world_size)
    before = before_run.microbatch if before_run is not None else 0
    kept = before if before in microbatch_choices(config, ranks.world_size) else 0
    planned = kept or microbatch_on(config, machine, available_memory_bytes())[0].microbatch
    # Only some processes may see the run's folder.
    largest = torch.tensor([kept, -planned])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    kept, planned = int(largest[0]), -int(largest[1])
    config = replace(config, microbatch=kept or planned)
    work, step_s = microbatch_on(config, machine)
    facts = f"{plan_memory(work).needed / GIB:.2f} of {machine.memory_bytes / GIB:.1f} GiB planned"
    if device.type == "cuda":
        facts += f", {step_s:.3f} s a step"
    why = f"; kept from {stored}" if kept else f"; it was {before}, which does not suit {ranks.world_size} processes"
    line = f"microbatch auto: {config.microbatch} rows per forward pass ({facts}{why if kept or before else ''})"
    return config, line


def _stored_config(config: RunConfig, stored: Path | None) -> RunConfig | None:
    """The settings of an earlier start of this run; None where there is none, or the folder has another model's run."""
    if stored is None or not stored.is_file():
        return None
    with suppress(ConfigError):
        before = load_config(stored).config
        if replace(before.model, preset="") == replace(config.model, preset=""):
            return before
    return None


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has taken: of its GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def chosen_kernels(config: RunConfig) -> Iterator[None]:
    """Attention and determinism as configured; to be entered before a GPU is first used."""
    on_gpu = config.compute.device != "cpu" and torch.cuda.is_available()
    deterministic = config.reproducible == "elastic" or (on_gpu and config.reproducible == "resume")
    if on_gpu and deterministic and config.compute.attention == "cudnn":
        raise ConfigError(
            "compute.attention is cudnn, whose backward pass is not deterministic",
            "compute.attention=auto, or reproducible=off",
        )
    with ExitStack() as choices:
        if deterministic:
            choices.enter_context(deterministic_kernels())
        if config.compute.attention != "auto":
            choices.enter_context(sdpa_kernel(_ATTENTION[config.compute.attention]))
        yield


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch, cuBLAS and Inductor compute with kernels that give the same bits each time."""
    import torch._inductor.config as inductor

    # cuBLAS reads this when it starts; without it its matmuls may differ between two calls.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # A debugging aid against reads of memory that was never written; costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        # Inductor times several forms of a reduction and keeps the fastest: a restart could keep another one.
        with inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def uses_varlen_attention(config: RunConfig, layout: Layout, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed documents use variable-length attention in place of a mask; an error where flash is impossible."""
    kernel, head_size = config.compute.attention, config.model.head_size
    if kernel not in ("auto", "flash"):
        return False
    supported = flash_supports(device, dtype, head_size)
    if kernel == "flash" and device.type == "cuda" and not supported:
        number, gpu = str(dtype).removeprefix("torch."), torch.cuda.get_device_name(device)
        raise HardwareError(
            f"compute.attention is flash, which {gpu} cannot compute with heads of {head_size} in {number}",
            "compute.attention=auto; flash supports heads of 8, 16, 24 to 256 in bf16 or fp16, on Ampere GPUs or newer",
        )
    # The kernel's backward pass supports no ALiBi, soft cap or sinks; a ring and a pipeline have masks of their own.
    plain = config.model.positions != "alibi" and config.model.kernel_scores
    whole = layout.context == 1 and layout.pipeline == 1 and plain
    # Without a GPU, flash means the variable-length form without the kernel.
    return whole and (supported or kernel == "flash")


def speed_notice(config: RunConfig, device: torch.device) -> str:
    """Why fp8 is slow on a CPU, or a GPU does without its kernels unasked; empty if neither."""
    if device.type != "cuda":
        slow = "notice: precision=fp8 saves no time on a CPU: numbers are rounded to fp8 and multiplied unrounded"
        return slow if config.precision == "fp8" else ""
    if not config.compute.compile and (missing := missing_for_compile(device)):
        return f"notice: without {missing} blocks are not compiled, and steps take longer than they could"
    model = config.model
    plain = config.compute.attention == "auto" and compute_dtype(config.precision, device) == torch.bfloat16
    if not (plain and is_hopper(device)):
        return ""
    rows = -(-model.seq_len // KEYS) * KEYS
    reasons = {
        "soft-capped scores are computed without a kernel, in memory for all pairs": model.attn_logit_softcapping > 0,
        "attention sinks have no kernel of our own": model.attention_sinks,
        "ALiBi needs a mask": model.positions == "alibi",
        "latent attention has no kernel of our own": model.kv_lora_rank > 0,
        f"heads of {model.head_size} have no kernel of our own": not supports(KEYS, model.head_size, torch.bfloat16),
        f"model.seq_len is {model.seq_len}; {rows} would be a multiple of {KEYS}": model.seq_len != rows,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    return f"notice: attention is slower here than for other shapes: {reason}" if reason else ""
