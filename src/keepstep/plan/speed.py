"""Time of a step: matmuls, attention, memory traffic, exposed communication, and the pipeline's bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from keepstep.models.size import active_width, flops_per_token, matmul_parameters, token_copies
from keepstep.plan.cluster import Cluster
from keepstep.plan.memory import offloaded_per_pass
from keepstep.plan.network import Network
from keepstep.plan.tensors import StageParameters, stage_parameters
from keepstep.plan.traffic import block_traffic, head_traffic, update_traffic, weight_traffic
from keepstep.plan.workload import Workload


@dataclass(frozen=True)
class Factors:
    """Calibration by measured runs on this device: each part's time is multiplied by its factor."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    step_s: float = 0.0
    """Fixed seconds per step."""
    host_s: float = 0.0
    """Seconds in which the host starts the kernels of one block that is not compiled, forward and backward."""


UNCALIBRATED = Factors()
_EXPERT_MATMULS = 0.83
"""Rate of the matmuls of experts relative to those of dense layers: the mean of three shapes on an H200, each
kernel measured alone (`kernels` in benchmarks/results/moe.json)."""
_NARROW, _NARROWEST = 240, 512
"""Matmuls of narrow models take longer than their operations: by the square of this over the width. Fitted to
smollm-135m (576) and mpt-125m (768) next to llama-1b (2048) on an H200; nothing is known below `_NARROWEST`."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest process, by kind of work; they add up to `total_s`."""

    matmul_s: float
    attention_s: float
    memory_s: float
    """Element-wise kernels, the loss, casts and reductions of weights."""
    update_s: float
    exposed_s: dict[str, float]
    """Communication that computation does not hide, by axis; `host` is offloaded activations."""
    launch_s: float
    """Waiting for the host to start kernels that are shorter than their start."""
    bubble_s: float
    """Waiting for the pipeline to fill and drain."""
    fixed_s: float

    @property
    def total_s(self) -> float:
        """One optimizer step."""
        spent = self.matmul_s + self.attention_s + self.memory_s + self.update_s
        return spent + self.launch_s + self.bubble_s + self.fixed_s + sum(self.exposed_s.values())


@dataclass(frozen=True)
class SpeedPlan:
    """A step's time and what follows from it."""

    step: StepTime
    flops_per_token: int
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    traffic_s: dict[str, float]
    """Communication by axis whether hidden or not."""


@dataclass(frozen=True)
class _MicroBatch:
    """Seconds of one micro batch on one stage."""

    matmul_s: float
    attention_s: float
    memory_s: float
    forward_share: float

    @property
    def total_s(self) -> float:
        return self.matmul_s + self.attention_s + self.memory_s


def plan_speed(work: Workload, cluster: Cluster, factors: Factors = UNCALIBRATED) -> SpeedPlan:
    """Predict one step on this cluster; blocks that recompute differently each count with their own time."""
    if len(set(work.modes)) > 1:
        return _mixed_speed(work, cluster, factors)
    work = replace(work, recompute=work.modes[0], recompute_by_block=())
    slowest = max(
        ((stage, _micro_batch(work, cluster, stage, factors)) for stage in {0, work.degrees.pipeline - 1}),
        key=lambda pair: pair[1].total_s,
    )
    counts = stage_parameters(work, slowest[0])
    step = _step_time(work, cluster, counts, slowest[1], factors)
    traffic = Network(work, cluster).traffic_s(counts)
    if work.offload_activations:
        traffic["host"] = 2 * _offload_s(work, cluster) * work.microbatches
    return _speed_plan(work, cluster, step, traffic)


def _speed_plan(work: Workload, cluster: Cluster, step: StepTime, traffic_s: dict[str, float]) -> SpeedPlan:
    tokens_per_s = work.tokens_per_step / step.total_s
    gpus = work.degrees.world_size
    flops = flops_per_token(work.model, work.model.seq_len, frozen=work.lora_rank > 0)
    # Utilisation is relative to bf16 in every precision, so that numbers can be compared.
    peak = cluster.gpu.flops("fp32" if work.precision == "fp32" else "bf16") * gpus
    return SpeedPlan(step, flops, tokens_per_s, tokens_per_s / gpus, tokens_per_s * flops / peak, traffic_s)


def _mixed_speed(work: Workload, cluster: Cluster, factors: Factors) -> SpeedPlan:
    """All times are linear in the number of blocks, so the mean over blocks is the time of the mixture."""
    counts = Counter(work.modes)
    plans = [plan_speed(replace(work, recompute=mode, recompute_by_block=()), cluster, factors) for mode in counts]
    steps = [plan.step for plan in plans]

    def mean(values: Iterable[float]) -> float:
        return sum(value * count for value, count in zip(values, counts.values(), strict=True)) / counts.total()

    step = StepTime(
        matmul_s=mean(each.matmul_s for each in steps),
        attention_s=mean(each.attention_s for each in steps),
        memory_s=mean(each.memory_s for each in steps),
        update_s=steps[0].update_s,
        exposed_s={axis: mean(each.exposed_s[axis] for each in steps) for axis in steps[0].exposed_s},
        launch_s=mean(each.launch_s for each in steps),
        bubble_s=mean(each.bubble_s for each in steps),
        fixed_s=steps[0].fixed_s,
    )
    return _speed_plan(
        work, cluster, step, {axis: mean(plan.traffic_s[axis] for plan in plans) for axis in plans[0].traffic_s}
    )


def _micro_batch(work: Workload, cluster: Cluster, stage: int, factors: Factors) -> _MicroBatch:
    model, gpu, degrees = work.model, cluster.gpu, work.degrees
    tokens = work.tokens_per_microbatch
    counts = stage_parameters(work, stage)
    head = model.padded_vocab * model.hidden if stage == degrees.pipeline - 1 else 0
    block = (matmul_parameters(model) - model.padded_vocab * model.hidden) / model.layers
    blocks = counts.blocks
    # Forward costs 2 operations per parameter; backward 2 for gradients of inputs and 2 for those of weights, which
    # frozen weights do not have. Full recomputation repeats the blocks' forward.
    learned = 4 if work.lora_rank else 6
    repeated = _repeated_parameters(work, block)
    wide = gpu.flops("fp32" if work.precision == "fp32" else "bf16")
    rate, head_rate = gpu.flops(work.matmul_precision) * gpu.matmul_share, wide * gpu.matmul_share
    block_flops = learned * block + 2 * repeated
    routed = 3 * token_copies(model) * model.expert_size * model.hidden
    slowed = 1 + routed / block * (1 / _EXPERT_MATMULS - 1)
    block_s = block_flops * slowed / rate
    head_s = 2 * head / head_rate + (learned - 2) * head / (rate if work.fp8_head else head_rate)
    narrow = 1 + (_NARROW / max(model.hidden, _NARROWEST)) ** 2
    matmul_s = tokens * narrow * (block_s * blocks + head_s) / degrees.tensor
    passes = learned + (2 if work.recompute == "full" else 0)
    # `adapters` counts one tensor-parallel process already; they are never in fp8.
    matmul_s += tokens * (passes + 2) * counts.adapters * blocks / head_rate

    spans = [min(model.seq_len, model.sliding_window or model.seq_len), model.seq_len]
    span = sum(spans[0 if model.is_sliding(layer) else 1] for layer in range(model.layers)) / model.layers
    # Forward 4, backward 10 (it recomputes the scores) per channel and token; a causal mask leaves half of them.
    attention_passes = 18 if work.recompute == "full" and not work.saves_attention else 14
    scores = tokens * model.heads * model.head_size * span / 2 / degrees.tensor
    attention_s = attention_passes * scores * blocks / (wide * gpu.attention_share)

    moved = tokens * (block_traffic(work, gpu) * blocks + (head_traffic(work) if head else 0.0))
    moved += weight_traffic(work, counts)
    memory_s = moved / (gpu.memory_gb_s * 1e9 * gpu.memory_share)
    return _MicroBatch(
        matmul_s * factors.matmul,
        attention_s * factors.attention,
        memory_s * factors.memory,
        forward_share=2 * block / block_flops,
    )


def _repeated_parameters(work: Workload, block: float) -> float:
    """Parameters of a block whose matmuls recomputation repeats."""
    feed_forward = (3 if work.model.gated else 2) * active_width(work.model) * work.model.hidden
    if work.recompute != "full":
        return feed_forward if work.chunks_mlp else 0
    # Recomputation stops at the last tensor that backward needs. The last matmul produces none, except in fp8, which
    # casts its input, with adapters, which follow it, and in chunks, which are computed like forward.
    repeats_last = work.precision == "fp8" or work.lora_rank or work.chunks_mlp
    return block if repeats_last else block - active_width(work.model) * work.model.hidden


def _step_time(
    work: Workload, cluster: Cluster, counts: StageParameters, micro: _MicroBatch, factors: Factors
) -> StepTime:
    network = Network(work, cluster)
    launch_s = max(0.0, _host_s(work, counts.blocks, factors) - micro.total_s)
    # Communication hides behind the waits for kernels as well.
    busy_s = micro.total_s + launch_s
    forward_s = busy_s * micro.forward_share
    exposed = network.exposed_s(counts, forward_s, busy_s - forward_s, micro.attention_s)
    each = work.microbatches
    used = {axis: seconds for axis, seconds in exposed.items() if getattr(work.degrees, axis) > 1}
    if work.offload_activations:
        # Each direction is hidden by its own half of the micro batch.
        copy_s = _offload_s(work, cluster)
        used["host"] = each * sum(max(0.0, copy_s - hidden) for hidden in (forward_s, busy_s - forward_s))
    along = sum(used.get(axis, 0.0) for axis in ("tensor", "context", "pipeline", "host")) / each
    bubble_s = bubble_share(work) * (busy_s + along)
    gpu = cluster.gpu
    update_s = update_traffic(work, counts.trained) / (gpu.memory_gb_s * 1e9 * gpu.memory_share) * factors.memory
    return StepTime(
        matmul_s=micro.matmul_s * each,
        attention_s=micro.attention_s * each,
        memory_s=micro.memory_s * each,
        update_s=update_s,
        exposed_s=used,
        launch_s=launch_s * each,
        bubble_s=bubble_s,
        fixed_s=factors.step_s,
    )


def _host_s(work: Workload, blocks: float, factors: Factors) -> float:
    """Seconds in which the host starts a micro batch's kernels. Of compiled blocks it has not been measured."""
    if work.compiled:
        return 0.0
    # Full recomputation repeats forward, about a third of the kernels.
    return factors.host_s * blocks * (4 / 3 if work.recompute == "full" else 1)


def _offload_s(work: Workload, cluster: Cluster) -> float:
    """Seconds in which a micro batch's offloaded activations pass the link to host memory, one way."""
    moved = max(offloaded_per_pass(work, stage) for stage in {0, work.degrees.pipeline - 1})
    return moved / work.stages_per_process / (cluster.gpu.host_gb_s * 1e9)


def bubble_share(work: Workload) -> float:
    """Waiting in one step of the pipeline, in micro batches."""
    waits = work.degrees.pipeline - 1
    # Zero bubble: weight gradients, a third of the work, fill most of the waits.
    shorter = {"interleaved": waits / work.stages_per_process, "zero_bubble": waits / 3}
    return shorter.get(work.schedule, float(waits))
