"""What is planned: a model, its layout over processes, and how one step is computed. Plain values, no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, get_args

from keepstep.config.check import RULES
from keepstep.config.layout import Layout, check_layout, may_compile, microbatch_choices
from keepstep.config.schema import ComputeConfig, LoraConfig, ModelConfig, ParallelConfig, RunConfig
from keepstep.core.errors import ConfigError

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
Precision = Literal["bf16", "fp16", "fp32", "fp8"]

_DEFAULTS = RunConfig()
_LAYOUT_RULES = tuple(
    rule for rule in RULES if any(name.startswith(("parallel.", "microbatch")) for name in rule.fields)
)


@dataclass(frozen=True)
class Workload:
    """One step of one run: everything that memory and time depend on."""

    model: ModelConfig
    degrees: Layout
    global_batch: int
    microbatch: int
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    """What every block recomputes, unless `recompute_by_block` says otherwise."""
    recompute_by_block: tuple[Recompute, ...] = ()
    full_saves_attention: bool = True
    """False for runs measured before full recomputation saved the output of attention."""
    keep_gathered: bool = False
    compile: bool | None = False
    """Whether blocks are compiled; None where that follows from the layout."""
    fused_matmuls: bool = True
    loss_chunks: int = 0
    mlp_chunk_tokens: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    stages_per_process: int = 1
    device_bytes: int = 80 * 2**30
    """Memory of the device; it also decides into how many chunks the loss is split."""
    offload: bool = False
    offload_activations: bool = False
    explicit_shard: bool = False
    """Whether the run sets `parallel.shard`: then even a single process uses FSDP."""
    elastic: bool = False
    """`reproducible: elastic`: whole weights on every process, gradients summed as integers."""
    survives: bool = False
    """`resilience.survive`: gradients are summed as integers over replicas, which may shard their weights."""
    lora_rank: int = 0
    """Rank of the adapters. Above 0 only they are trained; the weights are frozen in compute precision."""
    lora_targets: tuple[str, ...] = ()
    lora_base: Literal["bf16", "fp8", "nf4"] = "bf16"
    """Format of the frozen matrices; `bf16` means compute precision."""
    reference: bool = False
    """Preference learning without adapters: a frozen copy of the weights, in compute precision."""

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled, by `auto` where the layout is one that it compiles."""
        return self.degrees.data_only if self.compile is None else self.compile

    @property
    def microbatches(self) -> int:
        """Micro batches each process runs in one step."""
        # Rounded up: in an elastic run some processes may have one more than others.
        return max(1, -(-self.global_batch // (self.microbatch * self.degrees.data_ranks)))

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of one micro batch that one process holds; context ranks share a row."""
        return self.microbatch * self.model.seq_len // self.degrees.context

    @property
    def mlp_tokens(self) -> int:
        """Tokens whose feed-forward is computed at a time."""
        return min(self.mlp_chunk_tokens or self.tokens_per_microbatch, self.tokens_per_microbatch)

    @property
    def chunks_mlp(self) -> bool:
        """Whether the feed-forward of a micro batch has more than one chunk."""
        return self.mlp_tokens < self.tokens_per_microbatch

    @property
    def stream_width(self) -> int:
        """Elements per token of the residual stream, which tensor parallelism splits along the row."""
        return self.model.hidden // self.degrees.tensor

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step consumes over all processes."""
        return self.global_batch * self.model.seq_len

    @property
    def modes(self) -> tuple[Recompute, ...]:
        """What each block recomputes."""
        return self.recompute_by_block or (self.recompute,) * self.model.layers

    @property
    def recompute_text(self) -> str:
        """What the blocks recompute, for people: `full`, or `none for 10 blocks, full for 6`."""
        counts = Counter(self.modes)
        if len(counts) == 1:
            return self.modes[0]
        (first, count), *others = counts.items()
        return ", ".join([f"{first} for {count} blocks", *(f"{mode} for {number}" for mode, number in others)])

    @property
    def saves_attention(self) -> bool:
        """Whether full recomputation saves the output of attention, as parallel/apply.py decides."""
        whole = self.degrees.context == self.degrees.expert == 1
        return self.full_saves_attention and whole and not self.splits_backward

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed later than those of inputs."""
        return self.degrees.pipeline > 1 and self.schedule == "zero_bubble"

    @property
    def fp8_head(self) -> bool:
        """Whether the head computes its gradients by fp8 matmuls, as models/ and parallel/ decide."""
        plain = not (self.model.final_logit_softcapping or self.splits_backward)
        return self.precision == "fp8" and self.degrees.tensor == 1 and plain

    @property
    def stays_gathered(self) -> bool:
        """Whether the blocks' weights stay gathered between forward and backward; gradients are then reduced once."""
        return self.keep_gathered or self.degrees.pipeline > 1

    @property
    def integer_sums(self) -> bool:
        """Whether sums of gradients have 64 bits."""
        return self.elastic or self.survives

    @property
    def unsharded(self) -> bool:
        """Whether FSDP is not used: a single process in half precision, and elastic runs."""
        alone = self.degrees.world_size == 1 and not self.explicit_shard and not self.offload
        return (alone and self.precision in ("bf16", "fp8")) or self.elastic

    @property
    def matmul_precision(self) -> Precision:
        """The precision of the matmuls inside blocks."""
        return "fp8" if self.lora_base == "fp8" else self.precision

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in matmuls and activations."""
        return 4 if self.precision == "fp32" else 2

    def received_streams(self, stage: int) -> int:
        """How often a process of the pipeline receives a micro batch: forward and backward, for each of its stages.

        The first stage receives no activations, and the last no gradients.
        """
        if self.degrees.pipeline == 1:
            return 0
        return 2 * self.stages_per_process - int(stage == 0) - int(stage == self.degrees.pipeline - 1)


def workload_of(
    config: RunConfig, world_size: int, precision: Precision = "bf16", device_bytes: int = 80 * 2**30
) -> Workload:
    """The step of `config` on `world_size` processes; `precision` is used where the config has `auto`.

    Where the config leaves recomputation or the rows of a micro batch to the device's memory, the least is assumed.
    """
    if config.precision != "auto":
        # Under adapters fp8 is the format of frozen weights; all else is as in bf16.
        precision = "bf16" if config.precision == "fp8" and config.lora.rank else config.precision
    compiled = config.compute.compile
    return Workload(
        model=config.model,
        degrees=check_layout(config, world_size),
        global_batch=config.global_batch,
        microbatch=config.microbatch or microbatch_choices(config, world_size)[0],
        precision=precision,
        recompute="none" if config.compute.recompute == "auto" else config.compute.recompute,
        keep_gathered=config.parallel.keep_gathered,
        compile=False if compiled is None and not may_compile(config, Layout()) else compiled,
        fused_matmuls=config.compute.fused_matmuls,
        loss_chunks=config.compute.loss_chunks,
        mlp_chunk_tokens=config.compute.mlp_chunk_tokens,
        optimizer=config.optimizer.name,
        schedule=config.parallel.schedule,
        stages_per_process=config.parallel.stages_per_process,
        device_bytes=device_bytes,
        offload=config.parallel.offload,
        offload_activations=config.compute.offload_activations,
        explicit_shard=config.parallel.shard != -1,
        elastic=config.whole_weights,
        survives=config.resilience.survive,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets_in(config.model) if config.lora.rank else (),
        lora_base=config.adapters.base if config.lora.rank else "bf16",
        reference=config.has_reference and not config.lora.rank,
    )


def is_valid(work: Workload) -> bool:
    """Whether training would accept this layout: asks the configuration's own rules."""
    stages = work.stages_per_process
    parallel = ParallelConfig(**vars(work.degrees), schedule=work.schedule, stages=stages, offload=work.offload)
    config = replace(
        _DEFAULTS,
        model=work.model,
        global_batch=work.global_batch,
        microbatch=work.microbatch,
        precision=work.precision,
        reproducible="elastic" if work.elastic else "resume",
        parallel=parallel,
        lora=LoraConfig(rank=work.lora_rank, base=work.lora_base),
        compute=ComputeConfig(
            recompute=work.recompute,
            compile=work.compile,
            offload_activations=work.offload_activations,
            mlp_chunk_tokens=work.mlp_chunk_tokens,
        ),
    )
    if any(rule.find(config) for rule in _LAYOUT_RULES):
        return False
    try:
        # An elastic run holds whole weights, so a layout that shards them is not the one it would get.
        return check_layout(config, work.degrees.world_size) == work.degrees
    except ConfigError:
        return False
