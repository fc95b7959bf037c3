"""Peak memory of one process, part by part, at the instant of a step where it is highest.

The instants are those where something large is alive that is not alive a moment later: the loss (all activations and
one piece of logits), the backward of the last block (all activations and a block's working set), the backward of the
first block (all gradients), the reduction of the root unit, and the update.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from keepstep.plan.activations import FP32, BlockActivations, block_activations, mask_bytes, stream_width
from keepstep.plan.parameters import StageParameters, received_streams, stage_parameters
from keepstep.plan.workload import Workload

PIECE_SHARE = 16
"""Logits of one piece of the loss take this part of a GPU's memory, as models/head.py chooses."""
CONTEXT_BYTES = int(0.55 * 2**30)
"""CUDA context, cuBLAS workspaces and kernels, before the first tensor."""
GROUP_BYTES = int(0.25 * 2**30)
"""NCCL buffers of one group of processes."""
SLACK_SHARE = 0.03
"""Free blocks between tensors that the caching allocator cannot hand out, as a share of what comes and goes."""


@dataclass(frozen=True)
class Parts:
    """Bytes by part; they add up."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    """Weights gathered for a block or for the ends, and gradients on their way to their shards."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class MemoryPlan:
    """Peak of the fullest process."""

    parts: Parts
    """Tensors alive at the peak: what torch.cuda.max_memory_allocated will say."""
    instant: str
    stage: int
    slack: int
    """What the device needs beside tensors: context, communication buffers, the allocator's gaps."""
    instants: dict[str, int] = field(default_factory=dict)
    """Bytes at every instant looked at, for the fullest stage."""

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


def offloaded_bytes(work: Workload) -> int:
    """Host memory that the fullest process takes for its weights, gradients and moments; 0 where they stay."""
    if not work.offload:
        return 0
    last = work.degrees.pipeline - 1
    accounts = [_Account(replace(work, offload=False), stage, earlier=False) for stage in {0, min(1, last), last}]
    return max(each.fixed.total + FP32 * each.counts.trained // each.shard for each in accounts)


def in_flight(work: Workload, stage: int) -> int:
    """Passes of micro batches through one of a process's stages whose activations it holds at once.

    Interleaved schedules begin with a round of each stage but the last, and wait there and back for the others.
    Zero-bubble ones hold what weight gradients need until the bubble, the later the stage the longer.
    """
    pipeline, rounds = work.degrees.pipeline, work.stages_per_process - 1
    if pipeline == 1:
        return 1
    match work.schedule:
        case "1f1b":
            passes = pipeline - stage
        case "interleaved":
            passes = rounds * pipeline + 2 * (pipeline - 1 - stage) + 1
        case "zero_bubble":
            passes = rounds * pipeline + pipeline
    return min(passes, work.microbatches * work.stages_per_process)


def loss_pieces(work: Workload) -> int:
    """Pieces in which head and loss are computed, as models/head.py chooses them on a GPU."""
    tokens = work.tokens_per_microbatch
    logits = tokens * (work.model.padded_vocab // work.degrees.tensor) * work.compute_bytes
    return max(1, min(tokens, work.loss_chunks or -(-logits // (work.device_bytes // PIECE_SHARE))))


def stage_memory(work: Workload, stage: int) -> MemoryPlan:
    """Peak of the first process of one pipeline stage."""
    instants = _Account(work, stage, earlier=False).instants()
    if work.microbatches > 1:
        later = _Account(work, stage, earlier=True).instants()
        instants = {name: max(parts, later[name], key=lambda each: each.total) for name, parts in instants.items()}
    name = max(instants, key=lambda each: instants[each].total)
    parts = instants[name]
    moving = parts.activations + parts.logits + parts.buffers
    groups = sum(
        1 for axis in ("replicate", "shard", "tensor", "pipeline", "context") if getattr(work.degrees, axis) > 1
    )
    slack = CONTEXT_BYTES + groups * GROUP_BYTES + int(SLACK_SHARE * moving)
    return MemoryPlan(parts, name, stage, slack, {each: value.total for each, value in instants.items()})


class _Account:
    """One stage's terms, and the instants made from them.

    `earlier` says that a micro batch of the same step has left its gradients already; a pipeline may then hold fewer
    others in flight.
    """

    def __init__(self, work: Workload, stage: int, earlier: bool) -> None:
        degrees = work.degrees
        self.work, self.stage = work, stage
        self.size, self.shard = work.compute_bytes, degrees.weight_shards
        self.counts: StageParameters = stage_parameters(work, stage)
        self.block: BlockActivations = block_activations(work)
        self.stream = self.size * stream_width(work) * work.tokens_per_microbatch
        self.row = self.size * work.model.hidden * work.tokens_per_microbatch
        """The residual stream of a micro batch, split along the tensor axis and whole."""
        self.first, self.last = stage == 0, stage == degrees.pipeline - 1
        self.stages = work.stages_per_process if degrees.pipeline > 1 else 1
        self.stage_blocks = -(-self.counts.blocks // self.stages)
        """Blocks that a micro batch goes through before it is handed on."""
        passes = work.microbatches * self.stages
        self.waiting = min(in_flight(work, stage) - 1, passes - (2 if earlier else 1))
        """Other passes of micro batches through a stage whose activations are held."""
        # The first stage has no inputs to give gradients to, and nothing to put off.
        self.splits = degrees.pipeline > 1 and work.schedule == "zero_bubble" and (stage > 0 or self.stages > 1)
        """Gradients of weights are computed later than those of inputs, for which everything is kept."""
        self.unweighted = min(stage, passes - 1) if self.splits else 0
        """Passes whose weights have no gradients yet."""
        self.accumulates = earlier
        self.local_gradients = work.stays_gathered and work.microbatches > 1
        """Gradients are summed whole on each process and reduced once."""
        # With a shard axis the gathered flat buffer lives beside the weights copied out of it.
        self.gather_copies = 2 if self.shard > 1 else 1

    @property
    def fixed(self) -> Parts:
        """Alive from the first step to the last, and between steps."""
        if self.work.offload:
            return Parts()
        weights = FP32 * self.counts.trained
        if self.counts.adapters:
            weights += self.size * self.counts.total
        return Parts(parameters=weights // self.shard, optimizer=self._optimizer_bytes())

    def instants(self) -> dict[str, Parts]:
        """Bytes at each instant that can be the highest."""
        chosen = {
            "backward of the last block": self._backward(blocks_left=self.stage_blocks),
            "backward of the first block": self._backward(blocks_left=1),
            "update": replace(self.fixed, gradients=self._gradients(self.counts.trained)),
        }
        if self.last:
            chosen["loss"] = self._loss()
        if not self.work.whole:
            chosen["reduction of the last block"] = self._reduction(blocks_left=self.stage_blocks)
            chosen["reduction of the first block"] = self._reduction(blocks_left=1)
        if self.counts.table:
            chosen["gradient of the embedding"] = self._embedding()
        if self.counts.table and self.work.exact:
            chosen["sum of the embedding's gradients"] = self._exact_sum()
        if self.counts.table and not self.work.whole:
            chosen["reduction of embedding and head"] = self._root_reduction()
        return chosen

    def _optimizer_bytes(self) -> int:
        if self.work.optimizer == "adamw" or self.counts.adapters:
            return 2 * FP32 * self.counts.trained // self.shard
        matrices = self.counts.block * self.counts.blocks
        return (FP32 * matrices + 2 * FP32 * self.counts.ends) // self.shard

    def _gradients(self, done: int) -> int:
        """Gradients of `done` parameters; all of them where an earlier micro batch has left its sum."""
        if self.work.exact:
            # Sums in 64 bits; gradients are freed as they come.
            return 2 * FP32 * self.counts.trained
        if self.work.whole:
            # In compute precision as they come; sums of several micro batches are fp32.
            return self.size * done + (FP32 * self.counts.trained if self.accumulates else 0)
        if self.work.offload and not self.local_gradients:
            # Shards go to host memory as they come.
            return 0
        counted = self.counts.trained if self.accumulates else done
        return FP32 * counted // (1 if self.local_gradients else self.shard)

    def _gathered(self) -> int:
        """Weights of the ends, and of all blocks where they are kept."""
        if self.work.whole:
            return 0
        kept = self.counts.block * self.counts.blocks if self.work.stays_gathered else 0
        return self.size * (self.counts.ends + kept)

    def _activations(self, blocks: int) -> int:
        """Kept by `blocks` blocks of this pass through a stage and by all blocks of the others in flight."""
        waiting = self.waiting * (self.counts.blocks * self.block.kept // self.stages + self.stream)
        return blocks * self.block.kept + waiting + mask_bytes(self.work) + self._received()

    def _split_backward(self, passes: int) -> int:
        """What passes hold between gradients of inputs and of weights: gradients of what each operation gave.

        On the last stage also the head's own, which its loss computes on the way.
        """
        model = self.work.model
        qkv = (model.heads + 2 * model.key_value_heads) * model.head_size
        wide = model.ffn_size * (2 if model.activation == "swiglu" else 1)
        width = (7 * model.hidden + qkv + wide + model.ffn_size) // self.work.degrees.tensor
        gradients = self.size * width * self.work.tokens_per_microbatch * self.stage_blocks
        return passes * (gradients + (FP32 * self.counts.table if self.last else 0))

    def _received(self) -> int:
        """A pipeline's stage has a buffer for every micro batch of a step that it receives, each way."""
        if self.work.degrees.pipeline == 1:
            return 0
        return self.work.microbatches * self.stream * received_streams(self.work, self.stage)

    def _head_gradient(self) -> int:
        """The head's gradient waits in compute precision for the root unit's reduction."""
        return self.size * self.counts.table if self.last else 0

    def _loss(self) -> Parts:
        # The last gathered buffer waits for a next gather to be freed.
        last_gather = 0 if self.shard == 1 else self.size * self.counts.block
        activations = self._activations(self.stage_blocks) + self._split_backward(self.unweighted)
        return replace(
            self.fixed,
            gradients=self._gradients(0),
            activations=activations + self.stream + self.row,
            logits=self._pieces_bytes() + self.row,
            buffers=self._gathered() + last_gather,
        )

    def _pieces_bytes(self) -> int:
        """What one piece of head and loss holds at its worst, with the head's gradient."""
        work, tensor, pieces = self.work, self.work.degrees.tensor, loss_pieces(self.work)
        piece = -(-work.tokens_per_microbatch // pieces) * (work.model.padded_vocab // tensor)
        if tensor == 1 and not self.splits:
            # The kernel overwrites logits with their gradient; one piece's product needs no wider sum.
            return self.size * piece + (self.size if pieces == 1 else FP32) * self.counts.table
        # fp32 logits, overwritten by their gradient, and that in compute precision; the head's gradient is added up.
        held = piece * (FP32 + (self.size if self.size < FP32 else 0))
        return held * (2 if pieces > 1 else 1) + (FP32 + (self.size if pieces == 1 else 0)) * self.counts.table

    def _backward(self, blocks_left: int) -> Parts:
        counts, model = self.counts, self.work.model
        done = (counts.blocks - blocks_left) * counts.trained_block
        weight_gradient = self.size * model.hidden * model.ffn_size // self.work.degrees.tensor
        if counts.adapters:
            weight_gradient = 0
        whole = self.work.whole
        nothing_yet = whole or self.local_gradients or blocks_left == self.stage_blocks
        reducing = 0 if nothing_yet else FP32 * counts.trained_block
        gathered = 0 if whole or self.work.stays_gathered else self.gather_copies * self.size * counts.block
        activations = self._activations((self.stage_blocks if self.splits else blocks_left) - 1)
        if self.splits:
            activations += self._split_backward(self.unweighted + 1)
        return replace(
            self.fixed,
            gradients=self._gradients(done) + self._head_gradient() + weight_gradient,
            activations=activations + self.block.whole + self.block.working,
            buffers=self._gathered() + gathered + reducing,
        )

    def _reduction(self, blocks_left: int) -> Parts:
        """A block's gradients in compute precision and in fp32, before and after they reach their shards."""
        counts = self.counts
        done = (counts.blocks - blocks_left) * counts.trained_block
        prefetched = 0 if self.shard == 1 or self.work.stays_gathered else self.size * counts.block
        # Sums kept on this process are what is copied into the buffer; else it is the last micro batch's gradients.
        incoming = 0 if self.local_gradients else self.size * counts.trained_block
        outgoing = 0 if self.local_gradients else FP32 * counts.trained_block // self.shard
        # The block's own weights are let go just before.
        let_go = self.size * counts.block if self.work.stays_gathered else 0
        return replace(
            self.fixed,
            gradients=self._gradients(done) + self._head_gradient(),
            activations=self._activations(blocks_left - 1) + self.stream,
            buffers=self._gathered() - let_go + prefetched + FP32 * counts.trained_block + max(incoming, outgoing),
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
            buffers=self._gathered() + (0 if self.local_gradients or self.work.whole else FP32 * counts.block),
        )

    def _exact_sum(self) -> Parts:
        """The largest gradient as it came, in fp32 and as whole numbers in 64 bits, on its way into the sums."""
        widened = FP32 if self.size < FP32 else 0
        gradient = (self.size + widened + 2 * FP32) * self.counts.table
        return replace(
            self.fixed,
            gradients=self._gradients(0) + gradient,
            activations=self._activations(0) + self.stream,
        )

    def _root_reduction(self) -> Parts:
        counts = self.counts
        arriving = max(self.size * counts.ends, FP32 * counts.ends // self.shard)
        # A pipeline lets go of weights at the very end.
        gathered = self.size * counts.block * counts.blocks if self.work.degrees.pipeline > 1 else 0
        return replace(
            self.fixed,
            gradients=self._gradients(counts.block * counts.blocks),
            activations=self._activations(0),
            buffers=gathered + FP32 * counts.ends + arriving,
        )
