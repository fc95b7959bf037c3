"""The tensors of one tensor-parallel process: parameters of blocks and ends, and what a block saves for backward.

Activations follow models/transformer.py, attention.py and mlp.py line by line: a tensor is counted when autograd saves
it, or when it is the storage behind a saved view. tests/plan compares the sums with a trace of the real model.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.config.layout import stage_layers
from keepstep.config.schema import ModelConfig
from keepstep.models.size import (
    active_width,
    attention_matrices,
    block_norm_parameters,
    block_parameters,
    latent_matrices,
    norm_parameters,
    token_copies,
)
from keepstep.plan.workload import Recompute, Workload

FP32 = 4


@dataclass(frozen=True)
class StageParameters:
    """Counts for one process of one pipeline stage, before FSDP shards them."""

    block: int
    """Parameters of one block."""
    blocks: int
    """Blocks of the stage."""
    tables: tuple[int, ...]
    """Matrices of the embedding and the head, as far as the stage has them."""
    ends: int
    """Embedding, positions, last norm and head, as far as the stage has them: FSDP's root unit."""
    table: int
    """The matrix of the head or the embedding, where the stage computes a gradient for it."""
    adapters: int = 0
    """Adapters of one block; above 0, nothing else is trained."""
    experts: int = 0
    """Parameters of one block's experts; the mean where some blocks have none."""
    expert_parallel: int = 1
    """Processes that divide the experts before FSDP shards them."""
    quantised: int = 0
    """Parameters of one block that are frozen in fp8 or NF4, whole on every process."""

    @property
    def gathered_block(self) -> int:
        """Parameters of one block that a process gathers and computes with."""
        return self.block - self.quantised - self.experts + self.experts // self.expert_parallel

    @property
    def quantised_total(self) -> int:
        """Quantised parameters of the stage."""
        return self.quantised * self.blocks

    @property
    def gathered(self) -> int:
        """What a process gathers of the whole stage."""
        return self.gathered_block * self.blocks + self.ends

    @property
    def trained_block(self) -> int:
        """Parameters of one block that have gradients."""
        return self.adapters or self.block

    @property
    def trained(self) -> int:
        """Parameters of the stage that have gradients and moments."""
        return self.adapters * self.blocks if self.adapters else self.total

    @property
    def total(self) -> int:
        """All parameters of the stage."""
        return self.block * self.blocks + self.ends


def split_block_parameters(model: ModelConfig, tensor: int) -> int:
    """Parameters of one block on one tensor-parallel process: norms, matrices of latents and experts are not split."""
    biases = model.hidden * (2 if model.bias else int(model.out_bias))
    whole = block_norm_parameters(model) + biases + latent_matrices(model) + expert_parameters(model)
    return (block_parameters(model) - whole) // tensor + whole


def block_matrices(work: Workload) -> list[int]:
    """Parameters of each matrix of a block on one tensor-parallel process."""
    model = work.model
    layers = model.expert_layers
    widths = (model.layers - layers) * model.ffn_size + layers * model.experts.shared_ffn_hidden
    dense = model.hidden * widths // model.layers // work.degrees.tensor
    # The weights of all experts are one matrix for the optimizer.
    ffn = dense + expert_parameters(model) // 3
    attention = (parameters // work.degrees.tensor for parameters in attention_matrices(model))
    return [*attention, ffn * (2 if model.gated else 1), ffn]


def stage_parameters(work: Workload, stage: int) -> StageParameters:
    """Parameters of pipeline stage number `stage`."""
    model, tensor, stages = work.model, work.degrees.tensor, work.degrees.pipeline
    table = model.padded_vocab * model.hidden // tensor
    first, last = stage == 0, stage == stages - 1
    positions = model.position_rows * model.hidden if model.positions == "learned" else 0
    # A tied table exists once where one stage has both ends, and twice where two stages have them.
    tables = (table,) * (int(first) + int(last and (not model.tied or not first)))
    ends = sum(tables) + (positions if first else 0) + (norm_parameters(model) if last else 0)
    block = split_block_parameters(model, tensor)
    blocks = sum(map(len, process_layers(work, stage)))
    learned_table = table if (first or last) and not work.lora_rank else 0
    quantised = sum(block_matrices(work)) if work.lora_base != "bf16" else 0
    ours = expert_parameters(model), work.degrees.expert, quantised
    return StageParameters(block, blocks, tables, ends, learned_table, block_adapters(work), *ours)


def quantised_bytes(work: Workload, counts: StageParameters) -> int:
    """Codes and scales of a stage's frozen matrices."""
    # fp8 has a scale per output, which is too little to count; NF4 one in fp32 for 64 weights.
    each = 1.0 if work.lora_base == "fp8" else 0.5 + FP32 / 64
    return int(each * counts.quantised_total)


def _quantised_workspace(work: Workload) -> int:
    """What backward allocates for a matmul with the largest frozen matrix, the feed-forward's first."""
    if work.lora_base == "bf16":
        return 0
    largest, wide = max(block_matrices(work)), work.model.ffn_size * (2 if work.model.gated else 1)
    gradient = wide * work.mlp_tokens
    allocated = work.compute_bytes * largest if work.lora_base == "nf4" else largest + gradient
    # The input of the activation, of the gradient's size, has just been freed.
    return max(0, allocated - work.compute_bytes * gradient)


def expert_parameters(model: ModelConfig) -> int:
    """Parameters of one block's experts, without router and shared expert; the mean where some blocks have none."""
    return model.expert_layers * model.experts.count * 3 * model.hidden * model.expert_size // model.layers


def process_layers(work: Workload, stage: int) -> list[range]:
    """The blocks of each pipeline stage that a process of stage `stage` holds: with several rounds, several."""
    held = stage_layers(work.model.layers, work.degrees.pipeline * work.stages_per_process)
    return held[stage :: work.degrees.pipeline]


def adapted_linears(work: Workload) -> list[tuple[int, int, int]]:
    """A block's linears that have adapters: the number of their projections with one, their inputs and outputs.

    Each projection has its own first factor of the adapter, and they share the second.
    """
    model, targets = work.model, set(work.lora_targets)
    query, key = model.heads * model.head_size, model.key_value_heads * model.head_size
    gated = model.gated
    linears: dict[tuple[str, ...], tuple[int, int]] = {
        **({} if model.kv_lora_rank else {("q", "k", "v"): (model.hidden, query + 2 * key)}),
        ("o",): (model.heads * model.value_size, model.hidden),
        ("gate", "up") if gated else ("up",): (model.hidden, (2 if gated else 1) * model.ffn_size),
        ("down",): (model.ffn_size, model.hidden),
    }
    counted = ((len(targets & set(names)), sizes) for names, sizes in linears.items())
    return [(projections, *sizes) for projections, sizes in counted if projections]


def block_adapters(work: Workload) -> int:
    """Parameters of one block's adapters."""
    numbers = sum(projections * inputs + outputs for projections, inputs, outputs in adapted_linears(work))
    return work.lora_rank * numbers // work.degrees.tensor


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block for one micro batch on one process."""

    saved: int
    """From forward to backward."""
    needed: int
    """Everything backward needs, after recomputation."""
    working: int
    """What backward allocates on top at its peak: gradients of the feed-forward's inner tensors."""


@dataclass(frozen=True)
class _Widths:
    """Elements per token in each tensor of a block; tensor parallelism splits heads and feed-forward."""

    hidden: int
    query: int
    key: int
    qkv: int
    ffn: int
    heads: int

    @classmethod
    def of(cls, model: ModelConfig, tensor: int) -> _Widths:
        query, key = model.heads * model.head_size // tensor, model.key_value_heads * model.head_size // tensor
        heads, qkv = model.heads // tensor, query + 2 * key
        if model.kv_lora_rank:
            # Latents before and after their norms; values are padded, or a view of all that keys and they are cut from.
            qkv += 2 * (model.kv_lora_rank + model.q_lora_rank) + model.qk_rope_head_dim
            qkv += heads * (model.head_size - model.qk_rope_head_dim) if model.value_size == model.head_size else 0
        return cls(model.hidden, query, key, qkv, active_width(model) // tensor, heads)


def block_activations(work: Workload, mode: Recompute) -> BlockActivations:
    """Bytes saved, needed and temporarily used by one block that recomputes by `mode`."""
    model, size, tokens = work.model, work.compute_bytes, work.tokens_per_microbatch
    widths = _Widths.of(model, work.degrees.tensor)
    gates = 2 if model.gated else 1
    needed = _saved_bytes(model, widths, work) + _saved_statistics(model, widths) + _routing_bytes(work)
    # The feed-forward's inner tensors, of which a chunk's exist at a time.
    inner = _inner_bytes(widths, work) if work.chunks_mlp else 0
    match mode:
        case "none":
            saved = needed - inner
        case "selective":
            last = max(widths.hidden, int(token_copies(model) * widths.hidden))
            # The first matmul of experts that have no biases gives their activation too.
            plain = not (model.experts.bias or model.experts.swiglu_limit)
            activated = int(token_copies(model) * model.expert_size) if plain else 0
            feed_forward = 0 if inner else gates * widths.ffn + activated + last
            matmuls = widths.qkv + widths.hidden + feed_forward
            # Matmuls with quantised weights are repeated; the output of attention is saved.
            repeated = work.precision == "fp8" or work.lora_base != "bf16"
            outputs = widths.query + (0 if repeated else matmuls)
            saved = size * (work.stream_width + outputs) + FP32 * widths.heads
        case "full":
            # The block's input and, so that attention is not repeated, its output and softmax sums.
            attention = size * widths.query + FP32 * widths.heads if work.saves_attention else 0
            saved = size * work.stream_width + attention
    # Gradients of the inner tensors; the forward's output has just been freed. Those of experts, and of their inputs.
    travelling = model.hidden if work.degrees.expert > 1 else 0
    copied = int(token_copies(model) * (model.hidden + 2 * model.expert_size + travelling)) // work.degrees.tensor
    working = size * (max(copied, gates * widths.ffn) + work.stream_width)
    working = max(working, _ring_working(widths, work) - size * ((1 + gates) * widths.ffn + widths.hidden))
    quantised = _quantised_weights(model, widths, work.degrees.tensor) if work.precision == "fp8" else 0
    saved_weights = quantised if mode == "none" else 0
    workspace = _quantised_workspace(work)
    if inner:
        saved_weights = widths.hidden * (widths.qkv + widths.query) if saved_weights else 0
        needed_bytes = (needed - inner) * tokens + inner * work.mlp_tokens + quantised
        working_bytes = _chunked_working(widths, work, inner) + workspace
        return BlockActivations(saved * tokens + saved_weights, needed_bytes, working_bytes)
    return BlockActivations(saved * tokens + saved_weights, needed * tokens + quantised, working * tokens + workspace)


def _chunked_working(widths: _Widths, work: Workload, inner: int) -> int:
    """What backward allocates at its peak where the feed-forward, with `inner` bytes per token, is chunked."""
    size, tokens, chunk = work.compute_bytes, work.tokens_per_microbatch, work.mlp_tokens
    wide = (2 if work.model.gated else 1) * widths.ffn
    # The row's gradients before and after; of a chunk its output, and the gradients of its inner tensors.
    working = size * (2 * widths.hidden * tokens + (wide + widths.hidden) * chunk)
    return max(working, (_ring_working(widths, work) - size * widths.hidden) * tokens - inner * chunk)


def _inner_bytes(widths: _Widths, work: Workload) -> int:
    """Bytes per token that the feed-forward saves between its input and its output."""
    model, size = work.model, work.compute_bytes
    gates = 2 if model.gated else 1
    wide = gates + (1 if model.activation == "geglu_tanh" else 0)
    # fp8 saves the input of both matmuls in one byte; chunks have the first one whole.
    if work.precision == "fp8":
        return size * wide * widths.ffn + widths.ffn - (size - 1) * widths.hidden
    return size * (wide + 1) * widths.ffn


def _ring_working(widths: _Widths, work: Workload) -> int:
    """Bytes per token at the peak of ring attention's backward, when what the feed-forward saved is free again."""
    if work.degrees.context == 1:
        return 0
    # Gradients of a block of keys as the kernel gives them and in fp32, with keys and values for each query head.
    query = widths.query * (3 * work.compute_bytes + 4 * FP32)
    # Keys and values, and the sums of their gradients, one to compute with and one on its way.
    return query + 2 * widths.key * (2 * work.compute_bytes + 2 * FP32)


def _saved_bytes(model: ModelConfig, widths: _Widths, work: Workload) -> int:
    """Bytes per token saved when nothing is recomputed, without statistics."""
    rotary = model.positions == "rotary"
    gated = model.gated
    # A ring computes caps and sinks in passing.
    rings = work.degrees.context > 1
    whole_heads = work.degrees.tensor == 1
    saved = [
        work.stream_width,  # the block's input, saved by its norm
        widths.qkv,  # queries, keys and values: three tensors after a fused split and rope, else views of one
        0 if model.plain_rope or model.kv_lora_rank else widths.query + widths.key,
        # A norm over all heads needs them side by side; over those of other processes, in fp32 before and after.
        0
        if model.head_qk_norm
        else (widths.query + widths.key) * (1 if whole_heads else 2 * FP32 // work.compute_bytes),
        2 * work.stream_width if model.norm_placement == "both" else 0,  # inputs of the norms after the sub-blocks
        # Soft-capped scores, their tanh and the probabilities are whole matrices, one of them in fp32.
        4 * widths.heads * model.seq_len + 2 * widths.query if model.attn_logit_softcapping and not rings else 0,
        _sink_width(model, widths) if model.attention_sinks and not rings else 0,
        # Queries are grouped by key-value head: where a group has several, attention needs a copy in head order.
        widths.query if not (rotary or model.qk_norm) and model.heads > model.key_value_heads else 0,
        widths.qkv if model.clip_qkv else 0,
        widths.query,  # the output of attention, saved by attention and by the output projection
        # Without the padding of values it is a copy.
        widths.heads * model.value_size if model.value_size != model.head_size else 0,
        work.stream_width,  # the input of the feed-forward's norm
        (2 if gated else 1) * widths.ffn,  # the input of the activation
        # Adapters save the same inputs as the weights' gradients would, and their low-rank intermediate.
        work.lora_rank * len(work.lora_targets),
        widths.ffn if model.activation == "geglu_tanh" else 0,  # the activated gate, which no kernel fuses
    ]
    # The inputs of matmuls: both norms' outputs and the activation's.
    inputs = 2 * widths.hidden + widths.ffn
    if work.precision == "fp8":
        # Each matmul saves its input in fp8, one byte per element, including the output of attention.
        return work.compute_bytes * sum(saved) + inputs + widths.query + _fp32_norm_inputs(model, widths, work)
    return work.compute_bytes * (sum(saved) + inputs) + _fp32_norm_inputs(model, widths, work)


def _sink_width(model: ModelConfig, widths: _Widths) -> int:
    """Elements per token that sinks add: wider heads, a copy of the output, and keys and values of each query head in
    sliding layers."""
    sliding = sum(map(model.is_sliding, range(model.layers))) / model.layers
    wider = (model.head_size + 8) / model.head_size
    repeated = 2 * (widths.query - widths.key) * sliding if model.sliding_window < model.seq_len else 0.0
    return int(wider * (widths.qkv + widths.query + repeated) - widths.qkv)


def _routing_bytes(work: Workload) -> int:
    """Bytes per token of a row that a block with experts saves on top; the tensor axis divides the rows."""
    model, size = work.model, work.compute_bytes
    # Rows that came from other processes, and where they go.
    arrived = 3 * 8 + FP32 + size * model.hidden if work.degrees.expert > 1 else 0
    own = _own_routing_bytes(model, size, fp8=work.precision == "fp8")
    return (own + int(token_copies(model) * arrived)) // work.degrees.tensor


def _own_routing_bytes(model: ModelConfig, size: int, fp8: bool) -> int:
    """Bytes per token that a block with experts saves on top of its inner tensors."""
    copies = token_copies(model)
    if not copies:
        return 0
    experts = model.experts
    # The router's scores in fp32.
    scores = FP32 * experts.count * model.expert_layers / model.layers
    # Where each copy of a token went and came from, in 64 bits, and its weights.
    each = 3 * 8 + 3 * FP32
    if fp8:
        # They save their input and the gates and ups in bf16; the input counts as one byte so far.
        scores += model.hidden * model.expert_layers / model.layers
        return int(scores + copies * (each - model.expert_size))
    if not (experts.bias or experts.swiglu_limit):
        # Activations are computed again.
        return int(scores + copies * (each - size * model.expert_size))
    # Without our kernels also the sorted tokens and the outputs of experts; biases save the expert of each row in full,
    # twice, and clipped SwiGLU saves four tensors.
    each += size * (2 * model.hidden + (2 * experts.count if experts.bias else 0))
    each += 4 * size * model.expert_size if experts.swiglu_limit else 0
    return int(scores + copies * each)


def feed_forward_gradient(work: Workload) -> int:
    """Parameters whose gradient exists when backward has passed the last matmul of a block's feed-forward.

    Of experts these are all: their backward pass is one step.
    """
    model, layers = work.model, work.model.expert_layers
    widths = (model.layers - layers) * model.ffn_size + layers * model.experts.shared_ffn_hidden
    dense = model.hidden * widths // model.layers // work.degrees.tensor
    return dense + expert_parameters(model) // work.degrees.expert


def chunk_sums(work: Workload) -> int:
    """Bytes in which a chunked feed-forward adds up the gradients of its weights."""
    if not work.chunks_mlp or work.lora_rank:
        return 0
    return FP32 * (3 if work.model.gated else 2) * feed_forward_gradient(work)


def _fp32_norm_inputs(model: ModelConfig, widths: _Widths, work: Workload) -> int:
    """Bytes per token that norms with 1 + weight save on top, because they compute in fp32."""
    if model.norm != "rmsnorm_1p" or work.compute_bytes == FP32:
        return 0
    norms = (4 if model.norm_placement == "both" else 2) * work.stream_width * (FP32 - work.compute_bytes)
    return norms + (FP32 * (widths.query + widths.key) if model.qk_norm else 0)


def _quantised_weights(model: ModelConfig, widths: _Widths, tensor: int) -> int:
    """Bytes of a block's weights in fp8, which each matmul saves for its backward; those of experts save none."""
    inner = 3 if model.gated else 2
    routed = int(token_copies(model) * model.expert_size) // tensor
    return widths.hidden * (widths.qkv + widths.query + inner * (widths.ffn - routed))


def _saved_statistics(model: ModelConfig, widths: _Widths) -> int:
    """Bytes per token saved in fp32 or as booleans: norms' statistics, softmax sums, dropout masks."""
    norm = FP32 * (2 if model.norm == "layernorm" else 1)
    heads = FP32 * (widths.heads + widths.key // model.head_size) if model.qk_norm else 0
    dropout = 2 * model.hidden if model.dropout else 0
    return (4 if model.norm_placement == "both" else 2) * norm + FP32 * widths.heads + heads + dropout


def mask_bytes(work: Workload) -> int:
    """A mask that is made once per forward and shared by all blocks; plain causal attention needs none."""
    model, rows = work.model, work.model.seq_len // work.degrees.context
    if model.positions == "alibi":
        return work.compute_bytes * model.heads * rows * model.seq_len
    return rows * model.seq_len if 0 < model.sliding_window < model.seq_len else 0
