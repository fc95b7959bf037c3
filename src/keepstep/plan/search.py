"""What fits and what is fastest: recomputation block by block, the smallest changes that make a run fit, all layouts.

Training and planning both choose `compute.recompute: auto` here, so the plan shows what the run does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import gcd
from pathlib import Path
from typing import Any

from keepstep.config.layout import Layout
from keepstep.config.schema import RunConfig
from keepstep.plan.calibrate import calibrate, shipped_runs
from keepstep.plan.cluster import CPU, GIB, Cluster, Machine, cluster_from
from keepstep.plan.memory import offloaded_bytes, plan_memory, stage_memory
from keepstep.plan.speed import UNCALIBRATED, Factors, plan_speed
from keepstep.plan.tensors import process_layers
from keepstep.plan.workload import RECOMPUTE, Precision, Recompute, Workload, is_valid, workload_of

MARGIN = 0.05
"""Share of the device's memory that `auto` leaves free: the error of the estimate must not end in out of memory."""
_PAIRS: tuple[tuple[Recompute, Recompute], ...] = (("none", "full"), ("none", "selective"), ("selective", "full"))
"""Mixtures to consider: as many blocks as fit of the first mode, the rest of the second."""
MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""Micro batches to search."""
_MLP_CHUNK = 8192
"""Tokens of a chunk that still keep the tensor cores busy."""
_Change = tuple[str, dict[str, object]]
"""An override of one setting, and what it changes in the workload."""


def recompute_modes(config: RunConfig, machine: Machine) -> tuple[Recompute, ...]:
    """What each block recomputes on this machine."""
    if config.compute.recompute != "auto":
        return workload_of(config, machine.processes, machine.precision, machine.memory_bytes).modes
    cluster = cluster_from(machine)
    return settled_work(config, machine.processes, cluster, calibrate(shipped_runs(), cluster), machine.precision).modes


def settled_work(
    config: RunConfig, world_size: int, cluster: Cluster, factors: Factors, precision: Precision
) -> Workload:
    """The step of `config` on devices of this cluster, with what its blocks recompute there."""
    work = workload_of(config, world_size, precision, int(cluster.gpu.memory_gib * GIB))
    if cluster.gpu.name == CPU:
        work = replace(work, compile=bool(work.compile))
    return choose_recompute(work, cluster, factors) if config.compute.recompute == "auto" else work


def choose_recompute(work: Workload, cluster: Cluster, factors: Factors = UNCALIBRATED) -> Workload:
    """The work with the fastest mixture that fits; all blocks in full where nothing does, or with offloading."""
    limit = int((1 - MARGIN) * work.device_bytes)
    none, full = (replace(work, recompute=mode, recompute_by_block=()) for mode in ("none", "full"))
    experts = work.model.experts
    if work.degrees.pipeline > 1 and experts.count and (experts.aux_loss or experts.z_loss):
        # Recomputation would weigh the losses of a router by the targets of a later micro batch.
        return none
    if work.offload_activations:
        # Nearly everything fits on the device then, and host memory is what may run out.
        return full
    if plan_memory(none).needed <= limit:
        return none
    # Selective recomputation frees what it saved after one backward pass, and zero_bubble runs two; nor does it work
    # with divided experts.
    unselective = work.splits_backward or work.degrees.expert > 1
    pairs = [pair for pair in _PAIRS if not (unselective and "selective" in pair)]
    mixtures = [mixed for pair in pairs if (mixed := _mixture(work, *pair, limit)) is not None]
    return min(mixtures, key=lambda mixed: plan_speed(mixed, cluster, factors).step.total_s, default=full)


def _mixture(work: Workload, less: Recompute, more: Recompute, limit: int) -> Workload | None:
    """As many blocks with `less` recomputation as fit, stage by stage; None where `more` for all does not fit."""
    mixed = replace(work, recompute=more, recompute_by_block=(more,) * work.model.layers)
    for stage in range(work.degrees.pipeline):
        layers = [layer for held in process_layers(work, stage) for layer in held]

        def needed(count: int, mixed: Workload = mixed, layers: list[int] = layers, stage: int = stage) -> int:
            return stage_memory(_with_mode(mixed, layers[:count], less), stage).needed

        count = bisect_right(range(len(layers) + 1), limit, key=needed) - 1
        if count < 0:
            return None
        mixed = _with_mode(mixed, layers[:count], less)
    return mixed


def _with_mode(work: Workload, layers: Sequence[int], mode: Recompute) -> Workload:
    modes = list(work.modes)
    for layer in layers:
        modes[layer] = mode
    return replace(work, recompute_by_block=tuple(modes))


@dataclass(frozen=True)
class Remedy:
    """One way to fit, as overrides to paste after the command."""

    overrides: tuple[str, ...]
    needed_bytes: int
    step_s: float


def remedies(work: Workload, cluster: Cluster, factors: Factors, open_shard: bool = True) -> list[Remedy]:
    """The three smallest changes that fit: fewest settings first, then least time lost. Empty where none is known.

    `open_shard` says that the run's shard degree is -1, so that it need not be named.
    """
    changes = list(_changes(work, cluster))
    found: list[Remedy] = []
    for count in (1, 2, 3):
        for chosen in combinations(changes, count):
            if len({override.partition("=")[0] for override, _ in chosen}) == count:
                found.extend(_tried(work, chosen, cluster, factors, open_shard))
        if len(found) >= 3:
            break
    return sorted(found, key=lambda remedy: (len(remedy.overrides), remedy.step_s))[:3]


def _tried(
    work: Workload, chosen: tuple[_Change, ...], cluster: Cluster, factors: Factors, open_shard: bool
) -> Iterator[Remedy]:
    degrees = dict[str, int]()
    changed = work
    for _, settings in chosen:
        for name, value in settings.items():
            if hasattr(work.degrees, name):
                degrees[name] = int(str(value))
            else:
                changed = replace(changed, **{name: value})  # type: ignore[arg-type]
    if degrees:
        moved = replace(work.degrees, **degrees)
        rest = work.degrees.world_size // max(1, moved.world_size // moved.shard)
        changed = replace(changed, degrees=replace(moved, shard=max(1, rest)))
    if changed.degrees.world_size != work.degrees.world_size or not is_valid(changed):
        return
    needed = plan_memory(changed).needed
    in_host = offloaded_bytes(changed) * cluster.gpus_per_node
    fits_host = not cluster.host_memory_gib or in_host <= cluster.host_memory_gib * GIB
    if needed <= cluster.gpu.memory_gib * GIB and fits_host:
        overrides = [override for override, _ in chosen]
        if changed.degrees.shard != work.degrees.shard and not open_shard:
            overrides.append(f"parallel.shard={changed.degrees.shard}")
        yield Remedy(tuple(overrides), needed, plan_speed(changed, cluster, factors).step.total_s)


def _changes(work: Workload, cluster: Cluster) -> Iterator[_Change]:
    """Single settings that save memory, with every value that may help."""
    for rows in (each for each in _halves(work.microbatch) if work.global_batch % each == 0):
        yield f"microbatch={rows}", {"microbatch": rows}
    for mode in RECOMPUTE[RECOMPUTE.index(work.recompute) + 1 :]:
        yield f"compute.recompute={mode}", {"recompute": mode, "recompute_by_block": ()}
    if not work.offload_activations:
        yield "compute.offload_activations=true", {"offload_activations": True}
    if not work.chunks_mlp and work.tokens_per_microbatch > _MLP_CHUNK and not work.model.experts.count:
        yield f"compute.mlp_chunk_tokens={_MLP_CHUNK}", {"mlp_chunk_tokens": _MLP_CHUNK}
    if work.keep_gathered and work.degrees.pipeline == 1:
        yield "parallel.keep_gathered=false", {"keep_gathered": False}
    for copies in _halves(work.degrees.replicate):
        yield f"parallel.replicate={copies}", {"replicate": copies}
    for axis in ("tensor", "context", "pipeline"):
        for degree in _doubles(int(getattr(work.degrees, axis)), cluster, axis):
            yield f"parallel.{axis}={degree}", {axis: degree}
    if work.precision == "fp32" and "bf16" in cluster.gpu.tflops:
        yield "precision=bf16", {"precision": "bf16"}


def _halves(number: int) -> list[int]:
    return [number >> power for power in range(1, number.bit_length())]


def _doubles(degree: int, cluster: Cluster, axis: str) -> list[int]:
    limit = cluster.gpus_per_node if axis == "tensor" else min(cluster.gpus, 64)
    return [larger for larger in (degree * 2**power for power in range(1, 7)) if larger <= limit]


@dataclass(frozen=True)
class Candidate:
    """One layout with its cost."""

    work: Workload
    needed_bytes: int
    step_s: float
    tokens_per_s: float
    mfu: float
    fits: bool

    def overrides(self) -> list[str]:
        """The layout as overrides of the run."""
        work = self.work
        overrides = [*work.degrees.overrides(), f"microbatch={work.microbatch}", f"compute.recompute={work.recompute}"]
        if work.degrees.pipeline == 1:
            overrides.append(f"parallel.keep_gathered={str(work.keep_gathered).lower()}")
        base = [f"lora.base={work.lora_base}"] if work.lora_base != "bf16" else []
        base += ["compute.offload_activations=true"] if work.offload_activations else []
        base += [f"compute.mlp_chunk_tokens={work.mlp_chunk_tokens}"] if work.mlp_chunk_tokens else []
        return [*overrides, f"precision={work.precision}", *base]


def precisions(work: Workload, cluster: Cluster, is_open: bool) -> tuple[Precision, ...]:
    """Precisions to search: fp8 as well where the run leaves its precision open and the GPU supports it."""
    # fp8 would replace any other kind of linear.
    choice = is_open and work.precision == "bf16" and "fp8" in cluster.gpu.tflops and work.model.linear == "dense"
    experts = work.model.experts
    # Experts with biases or clipped SwiGLU compute in bf16.
    choice = choice and not (experts.bias or experts.swiglu_limit or work.lora_rank)
    return ("bf16", "fp8") if choice else (work.precision,)


def layouts(base: Workload, cluster: Cluster, precisions: Sequence[Precision]) -> Iterator[Workload]:
    """All valid layouts of the cluster's GPUs, with every micro batch, recomputation, sharding and precision."""
    for degrees, microbatch, recompute in product(_factorings(base, cluster), MICROBATCHES, RECOMPUTE):
        work = replace(base, degrees=degrees, microbatch=microbatch, recompute=recompute, recompute_by_block=())
        # Gathering and precision do not matter to the rules.
        if is_valid(work):
            for keep_gathered, precision in product(_gathered(base, degrees), precisions):
                yield replace(work, keep_gathered=keep_gathered, precision=precision)


def _gathered(base: Workload, degrees: Layout) -> tuple[bool, ...]:
    """Values of keep_gathered to search: one where weights are not sharded, or where a pipeline keeps them gathered."""
    if base.elastic:
        return (False,)
    return (False, True) if degrees.pipeline == 1 else (True,)


def _factorings(base: Workload, cluster: Cluster) -> Iterator[Layout]:
    gpus, model = cluster.gpus, base.model
    for tensor in _divisors(min(cluster.gpus_per_node, model.key_value_heads), gpus):
        for context in _divisors(16, gpus // tensor):
            for pipeline in _divisors(model.layers, gpus // tensor // context):
                data = gpus // tensor // context // pipeline
                for replicate in _divisors(data, data):
                    layout = Layout(replicate, data // replicate, tensor, pipeline, context)
                    for expert in expert_degrees(base, layout, cluster):
                        yield replace(layout, expert=expert)


def expert_degrees(base: Workload, layout: Layout, cluster: Cluster) -> Sequence[int]:
    """Degrees of expert parallelism to search: none, and the largest inside one machine that divides the experts."""
    count = base.model.experts.count
    if not count or base.elastic:
        return (1,)
    near = cluster.gpus_per_node // layout.tensor or 1
    return sorted({1, _divisors(near, gcd(count, layout.weight_shards))[-1]})


def _divisors(limit: int, number: int) -> list[int]:
    return [each for each in range(1, min(limit, number) + 1) if number % each == 0]


def search(base: Workload, cluster: Cluster, factors: Factors, precisions: Sequence[Precision]) -> list[Candidate]:
    """All candidates: those that fit first, fastest first; then the rest, by memory."""
    limit = cluster.gpu.memory_gib * GIB
    found = []
    for work in layouts(base, cluster, precisions):
        needed = plan_memory(work).needed
        speed = plan_speed(work, cluster, factors)
        found.append(Candidate(work, needed, speed.step.total_s, speed.tokens_per_s, speed.mfu, needed <= limit))
    return sorted(found, key=lambda each: (not each.fits, each.step_s if each.fits else each.needed_bytes))


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The Pareto front: candidates that no other beats in both time and memory, by rising memory."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda candidate: (candidate.needed_bytes, candidate.step_s)):
        if not front or each.step_s < front[-1].step_s:
            front.append(each)
    return front


def pareto_picture(candidates: Sequence[Candidate], cluster: Cluster, path: Path, title: str) -> None:
    """Time against memory as PNG: all layouts, the Pareto front, and the device's memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    by_tensor: dict[int, list[Candidate]] = {}
    for each in candidates:
        by_tensor.setdefault(each.work.degrees.tensor, []).append(each)
    for tensor, group in sorted(by_tensor.items()):
        axes.scatter(*_points(group), s=7, alpha=0.45, linewidths=0, label=f"tensor {tensor}")
    front = pareto(candidates)
    axes.plot(*_points(front), color="black", linewidth=1.2, marker="o", markersize=3.5, label="Pareto front")
    axes.axvline(cluster.gpu.memory_gib, color="crimson", linestyle="--", linewidth=1)
    place, style = (cluster.gpu.memory_gib, 0.98), {"rotation": 90, "va": "top", "ha": "right", "fontsize": 8}
    name = f"memory of {cluster.gpu.name}"
    axes.annotate(name, place, xycoords=("data", "axes fraction"), color="crimson", **style)
    axes.set(xscale="log", yscale="log", xlabel="memory per GPU (GiB)", ylabel="seconds per step", title=title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [each.needed_bytes / GIB for each in candidates], [each.step_s for each in candidates]
