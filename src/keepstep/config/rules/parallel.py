"""Rules of parallelism and of how a step is computed."""

from __future__ import annotations

from math import lcm

from keepstep.config.rules import Found, around, divisors, multiples_around, rule
from keepstep.config.schema import RunConfig
from keepstep.core.messages import listed


@rule(
    "parallel.tensor", "parallel.context", "model.kv_heads", "model.heads", "model.ffn_hidden", "model.hidden",
    "model.vocab", "model.vocab_multiple", "model.seq_len",
)  # fmt: skip
def tensor_parallel_splits_evenly(config: RunConfig) -> Found:
    """Heads, feed-forward width, vocabulary and tokens divide by the degree."""
    model, degree = config.model, config.parallel.tensor
    kv_heads, ffn, local_tokens = model.key_value_heads, model.ffn_size, model.seq_len // config.parallel.context
    if degree > 1 and model.linear == "bitnet":
        return "must be 1 with model.linear bitnet, whose scale is computed over whole matrices", "use parallel.shard"
    if degree > 1 and model.linear not in ("dense", "fp8"):
        return f"must be 1 with model.linear {model.linear}, which computes with whole matrices", "use parallel.shard"
    if kv_heads % degree or ffn % degree:
        degrees = [each for each in divisors(kv_heads) if ffn % each == 0]
        heads = f"must divide model.{'kv_heads' if model.kv_heads else 'heads'} ({kv_heads})"
        needs = heads if kv_heads % degree else f"must divide the feed-forward width ({ffn})"
        return needs, f"parallel.tensor={listed(degrees)}"
    if model.padded_vocab % degree:
        needs = f"must divide the rows of the embedding ({model.padded_vocab})"
        return needs, f"model.vocab_multiple={lcm(model.vocab_multiple, degree)}"
    if local_tokens % degree:
        return f"must divide the tokens of a row on one process ({local_tokens})", "change model.seq_len"
    return None


@rule("parallel.pipeline", "parallel.stages", "model.layers")
def stages_have_blocks(config: RunConfig) -> Found:
    """Every pipeline stage holds at least one block."""
    parallel, layers = config.parallel, config.model.layers
    if parallel.pipeline * parallel.stages_per_process <= layers or parallel.pipeline == 1:
        return None
    each = f" × {parallel.stages_per_process} stages each" if parallel.stages_per_process > 1 else ""
    needs = f"makes {parallel.pipeline}{each}, more stages than model.layers ({layers})"
    return needs, f"parallel.pipeline={listed(range(1, layers // parallel.stages_per_process + 1)[-3:] or [1])}"


@rule("parallel.stages", "parallel.schedule")
def stages_suit_the_schedule(config: RunConfig) -> Found:
    """1f1b has one stage per process, interleaved has several."""
    parallel = config.parallel
    if parallel.schedule == "1f1b" and parallel.stages > 1:
        return "must be 1 with parallel.schedule 1f1b", "parallel.schedule=interleaved"
    if parallel.schedule == "interleaved" and parallel.stages == 1:
        return "must be 2 or more with parallel.schedule interleaved", "parallel.schedule=1f1b"
    return None


@rule("parallel.schedule", "parallel.pipeline", "compute.compile")
def zero_bubble_needs_eager_blocks(config: RunConfig) -> Found:
    """Compiled blocks have one backward pass that cannot be split."""
    if config.parallel.pipeline == 1 or config.parallel.schedule != "zero_bubble" or not config.compute.compile:
        return None
    return "splits the backward pass, which compiled blocks cannot", "compute.compile=false, or schedule=interleaved"


@rule("compute.recompute", "parallel.schedule", "parallel.pipeline")
def zero_bubble_recomputes_whole_blocks(config: RunConfig) -> Found:
    """Selective recomputation frees its saved tensors after the first of the two backward passes."""
    if config.parallel.pipeline == 1 or config.parallel.schedule != "zero_bubble":
        return None
    if config.compute.recompute != "selective":
        return None
    needs = "saves matmul outputs for one backward pass, and parallel.schedule zero_bubble runs two"
    return needs, "compute.recompute=full or none, or parallel.schedule=interleaved"


@rule("compute.offload_activations", "parallel.schedule", "parallel.pipeline")
def zero_bubble_keeps_activations(config: RunConfig) -> Found:
    """What has been brought back for the first of two backward passes would stay on the GPU until the second."""
    if config.parallel.pipeline == 1 or config.parallel.schedule != "zero_bubble":
        return None
    if not config.compute.offload_activations:
        return None
    needs = "brings tensors back for one backward pass, and parallel.schedule zero_bubble runs two"
    return needs, "compute.offload_activations=false, or parallel.schedule=interleaved"


@rule("compute.mlp_chunk_tokens", "parallel.schedule", "parallel.pipeline")
def zero_bubble_computes_whole_mlps(config: RunConfig) -> Found:
    """A chunk's gradients are computed together, right after the chunk itself."""
    if config.parallel.pipeline == 1 or config.parallel.schedule != "zero_bubble":
        return None
    if not config.compute.mlp_chunk_tokens:
        return None
    needs = "computes all gradients of a chunk in one backward pass, and parallel.schedule zero_bubble runs two"
    return needs, "compute.mlp_chunk_tokens=0, or parallel.schedule=interleaved"


@rule(
    "compute.mlp_chunk_tokens", "model.experts.count", "precision", "model.linear", "lora.base", "lora.rank",
    "lora.dropout", "compute.compile",
)  # fmt: skip
def chunked_mlps_are_able(config: RunConfig) -> Found:
    """The feed-forward can be computed over chunks of this size."""
    tokens, lora = config.compute.mlp_chunk_tokens, config.lora
    if not tokens:
        return None
    if config.model.experts.count:
        needs = "needs dense blocks: a token's experts take most of the memory, and no chunk of tokens has them all"
        return needs, "compute.mlp_chunk_tokens=0"
    is_fp8 = "fp8" in (config.precision, config.model.linear, config.adapters.base if lora.rank else "")
    if is_fp8 and tokens % 16:
        choices = listed(multiples_around(16, tokens))
        return "must be a multiple of 16 with fp8", f"compute.mlp_chunk_tokens={choices}"
    if lora.rank and lora.dropout and config.compute.compile:
        needs = "does not support lora.dropout in compiled blocks, which could not repeat its noise"
        return needs, "compute.compile=false, or lora.dropout=0"
    return None


@rule("parallel.context", "model.seq_len", "model.rotary_scaling")
def context_parallel_splits_rows(config: RunConfig) -> Found:
    """Each process takes two pieces of a row, so that the causal work is even."""
    degree, seq_len = config.parallel.context, config.model.seq_len
    if degree > 1 and config.model.scales_rope_by_length:
        needs = "must be 1 with model.rotary_scaling dynamic or longrope, which depend on the length of a whole row"
        return needs, "use parallel.shard"
    if degree == 1 or seq_len % (2 * degree) == 0:
        return None
    degrees = [each for each in divisors(seq_len // 2) if each <= 2 * degree] if seq_len % 2 == 0 else [1]
    needs = f"cuts a row into {2 * degree} equal pieces, and model.seq_len is {seq_len}"
    return needs, f"parallel.context={listed(around(degrees, degree))}"


@rule("parallel.async_tensor", "parallel.tensor", "compute.device", "compute.compile")
def async_tensor_is_available(config: RunConfig) -> Found:
    """torch.compile fuses the overlap into compiled blocks on GPUs."""
    if not config.parallel.async_tensor:
        return None
    if config.parallel.tensor == 1:
        return "needs parallel.tensor above 1", "parallel.async_tensor=false"
    if config.compute.device == "cpu":
        return "needs GPUs with NVLink, and compute.device is cpu", "parallel.async_tensor=false"
    if not config.compute.compile:
        return "needs compiled blocks", "compute.compile=true"
    return None


@rule(
    "compute.attention", "compute.device", "precision", "model.positions", "model.sliding_window", "model.seq_len",
    "model.attn_logit_softcapping", "model.attention_sinks", "parallel.pipeline", "parallel.context",
)  # fmt: skip
def attention_kernel_is_able(config: RunConfig) -> Found:
    """The kernel that was asked for computes this attention."""
    kernel, model = config.compute.attention, config.model
    if kernel not in ("flash", "cudnn"):
        return None
    if config.compute.device == "cpu":
        return "needs a GPU, and compute.device is cpu", "compute.attention=auto"
    if config.precision == "fp32":
        return "computes in bf16 and fp16 only, and precision is fp32", "compute.attention=auto, or precision=bf16"
    if model.attn_logit_softcapping:
        return "computes no soft-capped scores (model.attn_logit_softcapping)", "compute.attention=auto"
    if model.attention_sinks:
        return "computes no model.attention_sinks", "compute.attention=auto"
    if kernel == "flash" and model.positions == "alibi":
        return "takes no bias, and model.positions is alibi", "compute.attention=auto"
    mask = _mask_reason(config)
    return flash_needs_bounds(config, mask) if mask else None


def _mask_reason(config: RunConfig) -> str:
    """What makes attention more than plainly causal; empty where nothing does."""
    model, data = config.model, config.data
    if 0 < model.sliding_window < model.seq_len:
        return "a model.sliding_window shorter than a row"
    if data.separate_documents:
        return "data.separate_documents"
    return f"data.strategy {data.strategy}" if data.strategy != "pack" else ""


def flash_needs_bounds(config: RunConfig, reason: str) -> Found:
    """Flash gets windows and documents as bounds, which do not exist where blocks or rows are split."""
    split = [axis for axis in ("pipeline", "context") if getattr(config.parallel, axis) > 1]
    if config.compute.attention != "flash" or not split:
        return None
    axes = " and ".join(f"parallel.{axis}" for axis in split)
    return f"takes no mask, which {reason} needs where {axes} is not 1", "compute.attention=auto"


@rule("resilience.survive", "rl.method")
def survivors_hold_whole_states(config: RunConfig) -> Found:
    """What the steps of a replica depend on is in the replica."""
    if config.resilience.survive and config.rl.method != "none":
        return (
            f"does not support rl.method {config.rl.method}, whose answers belong to a step",
            "resilience.survive=false",
        )
    return None


@rule("resilience.exchange", "resilience.survive", "compute.device")
def nccl_sums_over_gpus(config: RunConfig) -> Found:
    """NCCL has nothing to do with host memory."""
    sums = config.resilience.survive and config.resilience.exchange == "nccl"
    if sums and config.compute.device == "cpu":
        return "needs GPUs, and compute.device is cpu", "resilience.exchange=host"
    return None


@rule("resilience.spares", "resilience.survive")
def spares_replace_lost_replicas(config: RunConfig) -> Found:
    """Without survivors there is no state in memory that a spare could copy."""
    if config.resilience.spares and not config.resilience.survive:
        return "needs replicas that outlive each other", "resilience.survive=true"
    return None


@rule(
    "reproducible", "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert", "parallel.offload",
    "precision",
)  # fmt: skip
def elastic_runs_hold_whole_weights(config: RunConfig) -> Found:
    """A result that does not depend on the number of processes needs whole weights on each."""
    return _unfit_for_whole_weights(config) if config.reproducible == "elastic" else None


@rule(
    "resilience.survive", "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert",
    "parallel.offload", "precision",
)  # fmt: skip
def survivors_hold_whole_weights(config: RunConfig) -> Found:
    """Whatever the sums promise, a replica takes the micro batches of another one."""
    survives = config.resilience.survive and config.reproducible != "elastic"
    return _unfit_for_whole_weights(config) if survives else None


def _unfit_for_whole_weights(config: RunConfig) -> Found:
    parallel = config.parallel
    split = [axis for axis in ("tensor", "pipeline", "context", "expert") if getattr(parallel, axis) > 1]
    if split:
        axes = " and ".join(f"parallel.{axis}" for axis in split)
        hint = ", ".join(f"parallel.{axis}=1" for axis in split)
        return f"supports data parallelism only, and {axes} is not 1", hint
    if parallel.offload:
        return "does not support parallel.offload", "parallel.offload=false"
    if config.precision == "fp16":
        return "does not support loss scaling, which fp16 needs", "precision=bf16 or precision=fp32"
    return None
