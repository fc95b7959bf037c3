"""How long a step takes: products, attention, memory traffic, communication that shows, and the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.models.size import flops_per_token, matmul_parameters
from keepstep.plan.cluster import Cluster
from keepstep.plan.network import Network
from keepstep.plan.parameters import StageParameters, stage_parameters
from keepstep.plan.traffic import block_traffic, head_traffic, update_traffic, weight_traffic
from keepstep.plan.workload import Workload


@dataclass(frozen=True)
class Factors:
    """What measured runs say about this machine: each part's time is multiplied by its factor."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    communication: float = 1.0
    step_s: float = 0.0
    """Fixed seconds a step beside all else."""


UNCALIBRATED = Factors()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest process, by what they are spent on; they add up to `total_s`."""

    matmul_s: float
    attention_s: float
    memory_s: float
    """Element-wise work, loss, casting and reducing of weights."""
    update_s: float
    exposed_s: dict[str, float] = field(default_factory=dict)
    """Communication that computation does not hide, by axis."""
    bubble_s: float = 0.0
    """Waiting for the pipeline to fill and drain."""
    fixed_s: float = 0.0

    @property
    def total_s(self) -> float:
        """One optimizer step."""
        spent = self.matmul_s + self.attention_s + self.memory_s + self.update_s + self.bubble_s + self.fixed_s
        return spent + sum(self.exposed_s.values())


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
    """Predict one step on this cluster."""
    slowest = max(
        ((stage, _micro_batch(work, cluster, stage, factors)) for stage in {0, work.degrees.pipeline - 1}),
        key=lambda pair: pair[1].total_s,
    )
    counts = stage_parameters(work, slowest[0])
    step = _step_time(work, cluster, counts, slowest[1], factors)
    traffic = Network(work, cluster, factors.communication).traffic_s(counts)
    tokens_per_s = work.tokens_per_step / step.total_s
    gpus = work.degrees.world_size
    flops = flops_per_token(work.model, work.model.seq_len, frozen=work.lora_rank > 0)
    # Utilisation is told against bf16 in every precision, so that numbers can be compared.
    peak = cluster.gpu.flops("fp32" if work.precision == "fp32" else "bf16") * gpus
    return SpeedPlan(step, flops, tokens_per_s, tokens_per_s / gpus, tokens_per_s * flops / peak, traffic)


def _micro_batch(work: Workload, cluster: Cluster, stage: int, factors: Factors) -> _MicroBatch:
    model, gpu, degrees = work.model, cluster.gpu, work.degrees
    tokens = work.tokens_per_microbatch
    counts = stage_parameters(work, stage)
    head = model.padded_vocab * model.hidden if stage == degrees.pipeline - 1 else 0
    block = (matmul_parameters(model) - model.padded_vocab * model.hidden) / model.layers
    blocks = counts.blocks
    # Forward costs 2 a parameter, backward 2 for gradients of inputs and 2 for those of weights, which frozen ones do
    # not have; full recomputation repeats the blocks' forward.
    learned = 4 if work.lora_rank else 6
    repeated = _repeated_parameters(work, block)
    rate = gpu.flops(work.precision) * gpu.matmul_share
    head_rate = gpu.flops("fp32" if work.precision == "fp32" else "bf16") * gpu.matmul_share
    block_flops = learned * block + 2 * repeated
    matmul_s = tokens * (block_flops * blocks / rate + learned * head / head_rate) / degrees.tensor
    passes = learned + (2 if work.recompute == "full" else 0)
    # Adapters are split over the tensor axis already, and never in fp8.
    matmul_s += tokens * (passes + 2) * counts.adapters * blocks / head_rate

    span = min(model.seq_len, model.sliding_window) if model.sliding_window else model.seq_len
    # Forward 4, backward 10 (it computes scores again) for each channel and token; a causal mask leaves half of them.
    attention_passes = 18 if work.recompute == "full" else 14
    scores = tokens * model.heads * model.head_size * span / 2 / degrees.tensor
    attention_rate = gpu.flops("fp32" if work.precision == "fp32" else "bf16") * gpu.attention_share
    attention_s = attention_passes * scores * blocks / attention_rate

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
    """Of a block's parameters, those whose products recomputation repeats."""
    if work.recompute != "full":
        return 0
    # Recomputation ends with the last tensor that was kept. The last product gives none, but in fp8, where it casts its
    # own input, and with adapters, which follow it.
    apart = work.precision == "fp8" or work.lora_rank
    return block if apart else block - work.model.ffn_size * work.model.hidden


def _step_time(
    work: Workload, cluster: Cluster, counts: StageParameters, micro: _MicroBatch, factors: Factors
) -> StepTime:
    network = Network(work, cluster, factors.communication)
    forward_s = micro.total_s * micro.forward_share
    exposed = network.exposed_s(counts, forward_s, micro.total_s - forward_s, micro.attention_s)
    each = work.microbatches
    along = sum(exposed[axis] for axis in ("tensor", "context", "pipeline")) / each
    bubble_s = bubble_share(work) * (micro.total_s + along)
    gpu = cluster.gpu
    update_s = update_traffic(work, counts.trained) / (gpu.memory_gb_s * 1e9 * gpu.memory_share) * factors.memory
    return StepTime(
        matmul_s=micro.matmul_s * each,
        attention_s=micro.attention_s * each,
        memory_s=micro.memory_s * each,
        update_s=update_s,
        exposed_s={axis: seconds for axis, seconds in exposed.items() if getattr(work.degrees, axis) > 1},
        bubble_s=bubble_s,
        fixed_s=factors.step_s,
    )


def bubble_share(work: Workload) -> float:
    """Micro batches' worth of waiting in one step of the pipeline."""
    waits = work.degrees.pipeline - 1
    match work.schedule:
        case "interleaved":
            return waits / work.stages_per_process
        case "zero_bubble":
            # Weight gradients, a third of the work, fill most of the waits.
            return waits / 3
        case _:
            return float(waits)
