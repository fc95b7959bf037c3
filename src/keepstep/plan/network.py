"""Communication by axis: bytes, seconds, and how much of the time computation hides."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.config.schema import ModelConfig
from keepstep.models.size import token_copies
from keepstep.plan.cluster import Cluster
from keepstep.plan.tensors import FP32, StageParameters
from keepstep.plan.workload import Workload

LINK_SHARE = 0.85
"""Share of a link's rate that collectives of megabytes reach."""
LATENCY_S = 12e-6
"""Latency of one collective, and of one hop between machines."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one process's collectives in one step, counted as whole tensors (before the ring's (n-1)/n)."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    send: int = 0
    all_to_all: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.send + self.all_to_all


class Network:
    """One cluster's network as one workload uses it."""

    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self._work, self._cluster = work, cluster

    def ring_s(self, axis: str, size_bytes: float, degree: int | None = None) -> float:
        """Seconds of an all-gather or a reduce-scatter of `size_bytes` in total along an axis."""
        ranks = degree or int(getattr(self._work.degrees, axis))
        if ranks == 1 or not size_bytes:
            return 0.0
        seconds = size_bytes * (ranks - 1) / ranks / (self.rate_gb_s(axis, ranks) * 1e9)
        return seconds + LATENCY_S * -(-ranks // self._near(axis, ranks))

    def rate_gb_s(self, axis: str, ranks: int) -> float:
        """Rate of each process of a group along the axis: its link inside a machine, else its share of the network.

        Processes of one machine use all their network cards together, as rings and trees over all cards do.
        """
        cluster = self._cluster
        near = self._near(axis, ranks)
        if near == ranks:
            return cluster.link_gb_s * LINK_SHARE
        return min(cluster.link_gb_s, cluster.network_gb_s * near) * LINK_SHARE

    def _near(self, axis: str, ranks: int) -> int:
        """Processes of one group that share a machine."""
        stride = self._work.degrees.stride(axis)
        return max(1, min(ranks, self._cluster.gpus_per_node // stride))

    def traffic_s(self, counts: StageParameters) -> dict[str, float]:
        """Seconds of communication in a step by axis, hidden or not."""
        work = self._work
        gathers, reductions = weight_passes(work)
        shards = work.degrees.weight_shards
        weights = self.ring_s("shard", work.compute_bytes * counts.gathered, shards) * gathers
        gradients = self.ring_s("shard", FP32 * reduced_parameters(counts), shards) * reductions
        return {
            "expert": self._expert_s(counts) * work.microbatches,
            "replicate": 2 * self.ring_s("replicate", gradient_bytes(work) * counts.trained / shards),
            "shard": weights + gradients,
            "tensor": self._tensor_s(counts) * work.microbatches,
            "context": self._context_s(counts) * work.microbatches,
            "pipeline": self._pipeline_s() * work.microbatches,
        }

    def exposed_s(
        self, counts: StageParameters, forward_s: float, backward_s: float, attention_s: float
    ) -> dict[str, float]:
        """Seconds of a step spent waiting for each axis; the arguments are one micro batch's computing time."""
        work = self._work
        total = self.traffic_s(counts)
        gathers, reductions = weight_passes(work)
        shards = work.degrees.weight_shards
        gather_s = self.ring_s("shard", work.compute_bytes * counts.gathered, shards)
        reduce_s = self.ring_s("shard", FP32 * reduced_parameters(counts), shards)
        # Nothing hides the first gather and the last reduction: one block each, and the ends.
        ends = (counts.block + counts.ends) / counts.total
        unhidden = (gather_s + reduce_s) * ends
        forward_gathers = gathers / 2 if not work.stays_gathered else gathers
        late_forward = max(0.0, gather_s - forward_s) * forward_gathers
        backward_load = reduce_s + (0.0 if work.stays_gathered else gather_s)
        late_backward = max(0.0, backward_load - backward_s) * reductions
        slack_s = max(0.0, backward_s - backward_load)
        return {
            "replicate": max(0.0, total["replicate"] - slack_s) + total["replicate"] * ends,
            "shard": late_forward + late_backward + unhidden,
            "expert": total["expert"],
            "tensor": total["tensor"],
            "context": max(0.0, total["context"] - 0.8 * attention_s * work.microbatches),
            "pipeline": total["pipeline"],
        }

    def _tensor_s(self, counts: StageParameters) -> float:
        """Rows are gathered before and scattered after attention and feed-forward, in forward and backward."""
        work = self._work
        # The mean of four exchanges.
        row = work.compute_bytes * work.tokens_per_microbatch * sum(exchanged_widths(work.model)) / 4
        passes = 3 if work.recompute == "full" else 2
        experts = 2 * self.ring_s("tensor", work.compute_bytes * counts.experts / counts.expert_parallel)
        return (self.ring_s("tensor", row) * 4 * passes + experts) * counts.blocks

    def _expert_s(self, counts: StageParameters) -> float:
        """Rows travel to their experts and back. The busiest expert is taken to have no more than the others."""
        return self.ring_s("expert", dispatched_bytes(self._work)) * passes_to_experts(self._work) * counts.blocks

    def _context_s(self, counts: StageParameters) -> float:
        degree = self._work.degrees.context
        if degree == 1:
            return 0.0
        seconds = ring_bytes(self._work) / (self.rate_gb_s("context", degree) * 1e9)
        return (seconds + 3 * degree * LATENCY_S) * counts.blocks

    def _pipeline_s(self) -> float:
        work = self._work
        if work.degrees.pipeline == 1:
            return 0.0
        row = work.compute_bytes * work.model.hidden * work.tokens_per_microbatch / work.degrees.tensor
        rate = self.rate_gb_s("pipeline", work.degrees.pipeline) * 1e9
        return 2 * work.stages_per_process * (row / rate + LATENCY_S)


def step_bytes(work: Workload, counts: StageParameters, stage: int) -> StepBytes:
    """Bytes of one process's collectives in one step, as whole tensors, to compare with a trace."""
    degrees, each = work.degrees, work.microbatches
    gathers, reductions = weight_passes(work)
    whole = counts.gathered_block if degrees.weight_shards > degrees.expert else counts.block - counts.experts
    blocks = (whole + counts.adapters) * counts.blocks
    sharded = degrees.weight_shards > 1
    # The ends stay gathered from forward to backward.
    ends_gathers = min(gathers, each)
    gathered = work.compute_bytes * (gathers * blocks + ends_gathers * counts.ends) if sharded else 0
    trained = counts.trained if counts.adapters else whole * counts.blocks + counts.ends
    reduced = FP32 * reductions * trained if sharded else 0
    row = work.compute_bytes * work.model.hidden * work.tokens_per_microbatch
    first, last = stage == 0, stage == degrees.pipeline - 1
    if degrees.tensor > 1:
        # Backward scatters what forward gathers, and the reverse; recomputation ends before the last scatter.
        again = 0 if work.recompute == "none" else 1
        numbers, ends = work.compute_bytes * work.tokens_per_microbatch, int(last) + int(first)
        by_gathers, by_scatters = exchanged_widths(work.model)
        gathered += int(each * (numbers * counts.blocks * (by_gathers * (1 + again) + by_scatters) + row * ends))
        reduced += int(
            each * (numbers * counts.blocks * (by_gathers + by_scatters) + row * (counts.blocks * again + ends))
        )
    sends = each * row // degrees.tensor * work.received_streams(stage) + each * counts.blocks * ring_bytes(work)
    if degrees.pipeline > 1 and work.model.tied and (first or last):
        sends += FP32 * counts.table // degrees.weight_shards
    replicas = gradient_bytes(work) * counts.trained // degrees.weight_shards if degrees.replicate > 1 else 0
    dispatched = each * counts.blocks * passes_to_experts(work) * dispatched_bytes(work)
    if degrees.tensor > 1:
        # Each process along the tensor axis has computed its own tokens with the same experts.
        replicas += each * work.compute_bytes * counts.blocks * counts.experts // degrees.expert
    return StepBytes(gathered, reduced, replicas, sends, int(dispatched))


def exchanged_widths(model: ModelConfig) -> tuple[float, float]:
    """Numbers per token that a block gathers and scatters over the tensor axis in forward; the mean over blocks.

    Experts compute the tokens that a process has; where they are alone, only attention needs whole rows.
    """
    experts_alone = 0 if model.experts.shared_ffn_hidden else model.expert_layers
    feed_forward = model.hidden * (1 - experts_alone / model.layers)
    latent = (model.q_lora_rank or model.hidden) + model.kv_lora_rank + model.qk_rope_head_dim
    return (latent if model.kv_lora_rank else model.hidden) + feed_forward, model.hidden + feed_forward


def reduced_parameters(counts: StageParameters) -> int:
    """Parameters of the stage whose gradients each process has before they are reduced."""
    return counts.trained if counts.adapters else counts.gathered


def dispatched_bytes(work: Workload) -> float:
    """Bytes of the rows that one process sends to the experts of a block, one way; the mean over blocks."""
    if work.degrees.expert == 1:
        return 0.0
    rows = work.tokens_per_microbatch * token_copies(work.model) / work.degrees.tensor
    return rows * work.compute_bytes * work.model.hidden


def passes_to_experts(work: Workload) -> int:
    """How often rows travel for one micro batch: there and back in forward and backward, and again if recomputed."""
    return 4 if work.recompute == "none" else 6


def gradient_bytes(work: Workload) -> int:
    """Bytes of one element in gradient sums over processes."""
    return 2 * FP32 if work.integer_sums else FP32


def weight_passes(work: Workload) -> tuple[int, int]:
    """How often all weights are gathered and all gradients reduced in one step."""
    if not work.stays_gathered:
        return 2 * work.microbatches, work.microbatches
    # Without a pipeline, weights are freed after each backward.
    return (1 if work.degrees.pipeline > 1 else work.microbatches), 1


def ring_bytes(work: Workload) -> int:
    """Bytes a process sends around the ring per block and micro batch: keys and values twice, fp32 gradients once."""
    others = work.degrees.context - 1
    if not others:
        return 0
    key_value = 2 * work.model.key_value_heads * work.model.head_size // work.degrees.tensor
    numbers = key_value * work.tokens_per_microbatch
    again = 1 if work.recompute == "full" else 0
    return numbers * (work.compute_bytes * others * (2 + again) + FP32 * (others + 1))
