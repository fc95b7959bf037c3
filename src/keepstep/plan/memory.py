"""Peak memory of one process, by part, at the instant of a step where it is highest.

The instants are those at which something large is allocated that is freed soon after: the loss (all activations and one
chunk of logits), the backward of the last block (all activations and a block's working set), the backward of the first
block (all gradients), the reduction of the root unit, and the update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep.plan.tensors import (
    FP32,
    StageParameters,
    block_activations,
    chunk_sums,
    feed_forward_gradient,
    mask_bytes,
    process_layers,
    quantised_bytes,
    stage_parameters,
)
from keepstep.plan.workload import Workload

CHUNK_SHARE = 16
"""Logits of one chunk of the loss take one part in so many of the GPU's memory, as models/head.py chooses."""
CONTEXT_BYTES = int(0.55 * 2**30)
"""CUDA context, cuBLAS workspaces and kernels."""
GROUP_BYTES = int(0.25 * 2**30)
"""NCCL buffers of one process group."""
SLACK_SHARE = 0.03
"""Fragmentation of the caching allocator, as a share of the tensors that are allocated and freed within a step."""


@dataclass(frozen=True)
class Parts:
    """Bytes by part."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    """Gathered weights of a block or of the ends, and gradients that are being reduced."""

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryPlan:
    """Peak of the fullest process."""

    parts: Parts
    """Tensors at the peak: what torch.cuda.max_memory_allocated reports."""
    instant: str
    stage: int
    slack: int
    """What the device needs on top: context, communication buffers, fragmentation."""
    instants: dict[str, int]
    """Bytes at every instant, for the fullest stage."""

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak."""
        return self.parts.total

    @property
    def needed(self) -> int:
        """Bytes the device must have."""
        return self.allocated + self.slack


def plan_memory(work: Workload) -> MemoryPlan:
    """The fullest process over all pipeline stages."""
    last = work.degrees.pipeline - 1
    plans = [stage_memory(work, stage) for stage in sorted({0, min(1, last), last})]
    return max(plans, key=lambda plan: plan.allocated)


def moment_bytes(work: Workload, counts: StageParameters) -> int:
    """The optimizer's moments of one process: two per parameter; Muon has one for the blocks' matrices."""
    shard = work.degrees.weight_shards
    if work.optimizer == "adamw" or counts.adapters:
        return 2 * FP32 * counts.trained // shard
    return (FP32 * counts.block * counts.blocks + 2 * FP32 * counts.ends) // shard


def in_flight(work: Workload, stage: int) -> int:
    """Micro batches in flight: passes through a process's stages whose activations it holds at the same time.

    Interleaved schedules start with a round of each stage but the last, and wait for the others in both directions.
    Zero-bubble schedules hold what weight gradients need until the bubble, later stages longer.
    """
    pipeline, rounds = work.degrees.pipeline, work.stages_per_process - 1
    if pipeline == 1:
        return 1
    passes = {
        "1f1b": pipeline - stage,
        "interleaved": rounds * pipeline + 2 * (pipeline - 1 - stage) + 1,
        "zero_bubble": rounds * pipeline + pipeline,
    }
    return min(passes[work.schedule], work.microbatches * work.stages_per_process)


def offloaded_bytes(work: Workload) -> int:
    """Host memory that one process needs for offloaded activations, at most over all stages."""
    if not work.offload_activations:
        return 0
    last = work.degrees.pipeline - 1
    return max(
        offloaded_per_pass(work, stage) * (in_flight(work, stage) if last else 1) // work.stages_per_process
        for stage in {0, min(1, last), last}
    )


def offloaded_per_pass(work: Workload, stage: int) -> int:
    """Bytes that a micro batch moves to host memory, and back, in all blocks of a process."""
    saved = [block_activations(work, work.modes[layer]).saved for held in process_layers(work, stage) for layer in held]
    # The last block's backward pass comes next, unless a pipeline runs other micro batches before.
    return sum(saved if work.degrees.pipeline > 1 else saved[:-1])


def loss_chunks(work: Workload) -> int:
    """Chunks in which head and loss are computed, as models/head.py chooses them on a GPU."""
    tokens = work.tokens_per_microbatch
    logits = tokens * (work.model.padded_vocab // work.degrees.tensor) * work.compute_bytes
    return max(1, min(tokens, work.loss_chunks or -(-logits // (work.device_bytes // CHUNK_SHARE))))


def stage_memory(work: Workload, stage: int) -> MemoryPlan:
    """Peak of the first process of one pipeline stage."""
    instants = _StageMemory(work, stage, earlier=False).instants()
    if work.microbatches > 1:
        later = _StageMemory(work, stage, earlier=True).instants()
        instants = {name: max(parts, later[name], key=lambda each: each.total) for name, parts in instants.items()}
    name = max(instants, key=lambda each: instants[each].total)
    parts = instants[name]
    moving = parts.activations + parts.logits + parts.buffers
    slack = CONTEXT_BYTES + len(work.degrees.used_axes) * GROUP_BYTES + int(SLACK_SHARE * moving)
    return MemoryPlan(parts, name, stage, slack, {each: value.total for each, value in instants.items()})


class _StageMemory:
    """The terms of one stage, and the instants computed from them.

    `earlier` means that an earlier micro batch of the step has left its gradients; a pipeline may then have fewer
    micro batches in flight.
    """

    def __init__(self, work: Workload, stage: int, earlier: bool) -> None:
        degrees = work.degrees
        self.work, self.stage = work, stage
        self.size, self.shard = work.compute_bytes, degrees.weight_shards
        self.counts = stage_parameters(work, stage)
        self.reduced_block = self.counts.adapters or self.counts.gathered_block
        """Parameters of a block whose gradients a process has before they are reduced."""
        blocks = {mode: block_activations(work, mode) for mode in set(work.modes)}
        # What backward needs and allocates does not depend on the mode, but for weights that fp8 quantises again.
        self.block = max(blocks.values(), key=lambda each: each.needed + each.working)
        self.stream = self.size * work.stream_width * work.tokens_per_microbatch
        self.row = self.size * work.model.hidden * work.tokens_per_microbatch
        """The residual stream of a micro batch, split along the tensor axis and whole."""
        self.first, self.last = stage == 0, stage == degrees.pipeline - 1
        self.stages = work.stages_per_process if degrees.pipeline > 1 else 1
        self.stage_blocks = -(-self.counts.blocks // self.stages)
        """Blocks that a micro batch passes before it is sent to the next stage."""
        self.saved = [[blocks[work.modes[layer]].saved for layer in layers] for layers in process_layers(work, stage)]
        """Bytes that each block of each of the process's stages saves from forward to backward."""
        passes = work.microbatches * self.stages
        self.waiting = min(in_flight(work, stage) - 1, passes - (2 if earlier else 1))
        """Other micro batches in flight."""
        # The first stage computes no gradient of its input, so it postpones nothing.
        self.splits = degrees.pipeline > 1 and work.schedule == "zero_bubble" and (stage > 0 or self.stages > 1)
        """Whether gradients of weights are computed later than those of inputs; activations are held until then."""
        self.unweighted = min(stage, passes - 1) if self.splits else 0
        """Micro batches whose weight gradients are not computed yet."""
        self.accumulates = earlier
        self.local_gradients = work.stays_gathered and work.microbatches > 1
        """Whether gradients are summed unsharded on each process and reduced once."""
        # With a shard axis, the gathered flat buffer exists next to the weights copied out of it.
        self.gather_copies = 2 if self.shard > 1 else 1

    @property
    def fixed(self) -> Parts:
        """Allocated for the whole run."""
        if self.work.offload:
            return Parts()
        weights, whole = FP32 * self.counts.trained, quantised_bytes(self.work, self.counts)
        if self.counts.adapters or self.work.reference:
            weights += self.size * (self.counts.total - self.counts.quantised_total)
        return Parts(parameters=weights // self.shard + whole, optimizer=moment_bytes(self.work, self.counts))

    def instants(self) -> dict[str, Parts]:
        """Bytes at each instant that can be the peak."""
        chosen = {
            "backward of the last block": self._backward(blocks_left=self.stage_blocks),
            "backward of the first block": self._backward(blocks_left=1),
            "update": replace(self.fixed, gradients=self._gradients(self.counts.trained)),
        }
        if self.last:
            chosen["loss"] = self._loss()
        if not self.work.unsharded:
            chosen["reduction of the last block"] = self._reduction(blocks_left=self.stage_blocks)
            chosen["reduction of the first block"] = self._reduction(blocks_left=1)
        if self.counts.table:
            chosen["gradient of the embedding"] = self._embedding()
        if self.counts.table and not self.work.unsharded:
            chosen["reduction of embedding and head"] = self._root_reduction()
        return chosen

    def _gradients(self, done: int) -> int:
        """Gradients of `done` parameters; of all where an earlier micro batch has left its sums."""
        if self.work.integer_sums:
            # Sums in 64 bits; each gradient is added and freed.
            return 2 * FP32 * self.counts.trained // self.shard
        if self.work.unsharded:
            # In compute precision; sums of several micro batches are fp32.
            return self.size * done + (FP32 * self.counts.trained if self.accumulates else 0)
        if self.work.offload and not self.local_gradients:
            # Each shard is copied to host memory and freed.
            return 0
        counted = self.counts.trained if self.accumulates else done
        if self.local_gradients:
            return FP32 * counted * (self.counts.gathered + self.counts.quantised_total) // self.counts.total
        return FP32 * counted // self.shard

    def _gathered(self) -> int:
        """Gathered weights of the ends, and of all blocks where they stay gathered."""
        if self.work.unsharded:
            return 0
        blocks = self.counts.gathered_block * self.counts.blocks if self.work.stays_gathered else 0
        return self.size * (self.counts.ends + blocks)

    def _activations(self, blocks: int) -> int:
        """Saved by `blocks` blocks of this micro batch and by all blocks of the others in flight.

        With offloading the last of these blocks alone is on the device, just saved or brought back ahead of time, and
        of the other micro batches the one block that no other has followed.
        """
        if self.work.offload_activations:
            own = max(stage[blocks - 1] if blocks else 0 for stage in self.saved)
            last = max(stage[-1] for stage in self.saved) if self.waiting else 0
            return own + last + self.waiting * self.stream + mask_bytes(self.work) + self._received()
        in_flight = self.waiting * (sum(map(sum, self.saved)) // self.stages + self.stream)
        own = max(sum(stage[:blocks]) for stage in self.saved)
        return own + in_flight + mask_bytes(self.work) + self._received()

    def _split_backward(self, passes: int) -> int:
        """Held between the gradients of inputs and those of weights: the gradient of each operation's output.

        On the last stage also the head's gradient, which the loss computes.
        """
        model = self.work.model
        qkv = (model.heads + 2 * model.key_value_heads) * model.head_size
        wide = model.ffn_size * (2 if model.gated else 1)
        width = (7 * model.hidden + qkv + wide + model.ffn_size) // self.work.degrees.tensor
        gradients = self.size * width * self.work.tokens_per_microbatch * self.stage_blocks
        return passes * (gradients + (FP32 * self.counts.table if self.last else 0))

    def _received(self) -> int:
        """Receive buffers of a pipeline stage: one per micro batch of a step and direction."""
        return self.work.microbatches * self.stream * self.work.received_streams(self.stage)

    def _head_gradient(self) -> int:
        """The head's gradient, held in compute precision until the root unit is reduced."""
        return self.size * self.counts.table if self.last else 0

    def _loss(self) -> Parts:
        # The last gathered buffer is freed by the next gather.
        last_gather = 0 if self.shard == 1 else self.size * self.counts.gathered_block
        activations = self._activations(self.stage_blocks) + self._split_backward(self.unweighted)
        return replace(
            self.fixed,
            gradients=self._gradients(0),
            activations=activations + self.stream + self.row,
            logits=self._chunk_bytes() + self.row,
            buffers=self._gathered() + last_gather,
        )

    def _chunk_bytes(self) -> int:
        """Peak of one chunk of head and loss, with the head's gradient."""
        work, tensor, chunks = self.work, self.work.degrees.tensor, loss_chunks(self.work)
        logits = -(-work.tokens_per_microbatch // chunks) * (work.model.padded_vocab // tensor)
        if tensor == 1 and not self.splits:
            # The kernel overwrites logits with their gradient; with one chunk the head's gradient needs no fp32 sum.
            # The slope of soft-capped logits is computed from a quotient of the same size. In fp8 the gradient
            # and the weights are tensors of their own.
            held = self.size * (3 if work.model.final_logit_softcapping else 1) + work.fp8_head
            return held * logits + ((self.size if chunks == 1 else FP32) + work.fp8_head) * self.counts.table
        # fp32 logits, overwritten by their gradient, and a copy in compute precision; the head's gradient is summed.
        held = logits * (FP32 + (self.size if self.size < FP32 else 0))
        return held * (2 if chunks > 1 else 1) + (FP32 + (self.size if chunks == 1 else 0)) * self.counts.table

    def _backward(self, blocks_left: int) -> Parts:
        counts = self.counts
        done = (counts.blocks - blocks_left) * counts.trained_block
        inner = 0 if counts.adapters else feed_forward_gradient(self.work)
        unsharded = self.work.unsharded
        nothing_yet = unsharded or self.local_gradients or blocks_left == self.stage_blocks
        reducing = 0 if nothing_yet else FP32 * self.reduced_block
        gathered = (
            0 if unsharded or self.work.stays_gathered else self.gather_copies * self.size * counts.gathered_block
        )
        activations = self._activations((self.stage_blocks if self.splits else blocks_left) - 1)
        if self.splits:
            activations += self._split_backward(self.unweighted + 1)
        return replace(
            self.fixed,
            gradients=self._gradients(done) + self._head_gradient() + self.size * inner + chunk_sums(self.work),
            activations=activations + self.block.needed + self.block.working,
            buffers=self._gathered() + gathered + reducing,
        )

    def _reduction(self, blocks_left: int) -> Parts:
        """Reduction of a block's gradients: in compute precision and in fp32, unsharded and sharded."""
        counts = self.counts
        done = (counts.blocks - blocks_left) * counts.trained_block
        prefetched = 0 if self.shard == 1 or self.work.stays_gathered else self.size * counts.gathered_block
        # Gradients summed on this process are copied into the buffer; else it is the last micro batch's gradients.
        incoming = 0 if self.local_gradients else self.size * self.reduced_block
        outgoing = 0 if self.local_gradients else FP32 * counts.trained_block // self.shard
        # The block's own weights are freed just before.
        freed = self.size * counts.gathered_block if self.work.stays_gathered else 0
        return replace(
            self.fixed,
            gradients=self._gradients(done) + self._head_gradient(),
            activations=self._activations(blocks_left - 1) + self.stream,
            buffers=self._gathered() - freed + prefetched + FP32 * self.reduced_block + max(incoming, outgoing),
        )

    def _embedding(self) -> Parts:
        counts = self.counts
        blocks = counts.block * counts.blocks
        both = self.first and self.last
        tables = (1 if self.first else 0) + (1 if self.last else 0) + (1 if both and self.work.model.tied else 0)
        return replace(
            self.fixed,
            gradients=self._gradients(blocks) + tables * self.size * counts.table,
            activations=self._activations(0) + self.stream,
            buffers=self._gathered()
            + (0 if self.local_gradients or self.work.unsharded else FP32 * self.reduced_block),
        )

    def _root_reduction(self) -> Parts:
        counts = self.counts
        arriving = max(self.size * counts.ends, FP32 * counts.ends // self.shard)
        # A pipeline frees gathered weights at the end of the step.
        gathered = self.size * counts.gathered_block * counts.blocks if self.work.degrees.pipeline > 1 else 0
        return replace(
            self.fixed,
            gradients=self._gradients(counts.block * counts.blocks),
            activations=self._activations(0),
            buffers=gathered + FP32 * counts.ends + arriving,
        )
