"""What a sound configuration obeys: a range for every number, and rules across fields. Pure functions only.

A new number needs a line in one of the tables (a test holds that); a new rule is a function and a line in `_RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from keepstep.config.fields import value_at
from keepstep.config.layout import Layout, check_microbatches, resolve_layout
from keepstep.config.schema import RunConfig
from keepstep.config.values import listed
from keepstep.core.errors import ConfigError
from keepstep.core.units import Duration


@dataclass(frozen=True)
class Broken:
    """One broken rule: the first of `fields` is the one at fault, `rule` is read after "but it"."""

    fields: tuple[str, ...]
    rule: str
    hint: str | None = None


ABOVE_ZERO = frozenset({
    "max_duration", "global_batch", "microbatch",
    "model.layers", "model.hidden", "model.heads", "model.vocab", "model.vocab_multiple", "model.seq_len",
    "model.rotary_base", "model.norm_eps", "model.alibi_bias_max", "model.init_std",
    "optimizer.lr", "optimizer.eps", "optimizer.muon_lr",
    "parallel.tensor", "parallel.pipeline", "parallel.context", "evaluate.batches", "observe.log_interval",
    "chat.generated_rows", "lora.alpha", "resilience.hang_s", "resilience.start_timeout_s",
    "guard.spike_factor", "guard.window", "guard.keep_interval", "evaluate.prompt_tokens",
})  # fmt: skip

ZERO_OR_MORE = frozenset({
    "model.kv_heads", "model.head_dim", "model.ffn_hidden", "model.max_positions",
    "model.clip_qkv", "model.sliding_window",
    "data.prefetch", "data.shuffle_window", "data.gpt_samples", "data.stride",
    "optimizer.weight_decay", "optimizer.clip", "schedule.warmup",
    "parallel.stages", "compute.loss_chunks", "compute.threads",
    "evaluate.interval", "evaluate.patience", "chat.read_first", "lora.rank", "finetune.neftune",
    "checkpoint.interval", "checkpoint.keep", "checkpoint.keep_every", "checkpoint.keep_best",
    "observe.rank_interval", "resilience.max_restarts", "resilience.grace_s",
    "guard.outlier_factor", "guard.limit", "guard.recheck_interval",
    "profile.active", "profile.skip_first", "profile.wait", "profile.warmup", "profile.repeat",
})  # fmt: skip

_SHARE = (lambda number: 0 <= number <= 1, "must be from 0 to 1")
_LEFT = (lambda number: number == -1 or number > 0, "must be above 0, or -1 for what is left")
_BELOW_ONE = (lambda number: 0 <= number < 1, "must be at least 0 and below 1")

RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    # Generators take 64 bits, and a process's own seed is a million times this.
    "seed": (lambda number: 0 <= number <= 10**13, "must be 0 or more, and at most 10000000000000"),
    "model.dropout": _BELOW_ONE,
    "data.valid_share": _BELOW_ONE,
    "lora.dropout": _BELOW_ONE,
    "data.test_share": _BELOW_ONE,
    "data.cache_limit": (lambda size: size.bytes >= 1 << 20, "must be at least 1MiB"),
    "optimizer.betas": (
        lambda betas: all(0 <= beta < 1 for beta in betas),
        "must be two numbers, each at least 0 and below 1",
    ),
    "optimizer.muon_momentum": _BELOW_ONE,
    "schedule.final": _SHARE,
    "schedule.stage_at": (lambda number: 0 < number < 1, "must be between 0 and 1"),
    "schedule.stage_lr": _SHARE,
    "schedule.decay_share": (lambda number: 0 < number <= 1, "must be above 0 and at most 1"),
    "observe.metrics_port": (lambda number: 0 <= number <= 65535, "must be a port, 1 to 65535, or 0 for none"),
    "resilience.snapshot_interval": (
        lambda number: number >= -1,
        "must be a number of steps, 0 for none, -1 to choose",
    ),
    "parallel.replicate": _LEFT,
    "parallel.shard": _LEFT,
}


def broken_rules(config: RunConfig) -> Iterator[Broken]:
    """Every rule the config breaks; a rule across fields is not asked where one of them is out of its own range."""
    out_of_range = {broken.fields[0]: broken for broken in _broken_ranges(config)}
    yield from out_of_range.values()
    for fields, rule in _RULES:
        if not out_of_range.keys() & set(fields):
            found = rule(config)
            if found is not None:
                yield Broken(fields, *found)


def _broken_ranges(config: RunConfig) -> Iterator[Broken]:
    for path in sorted(ABOVE_ZERO):
        if not _number(config, path) > 0:
            yield Broken((path,), "must be above 0")
    for path in sorted(ZERO_OR_MORE):
        if not _number(config, path) >= 0:
            yield Broken((path,), "must be 0 or more")
    for path, (holds, rule) in RANGES.items():
        if not holds(value_at(config, path)):
            yield Broken((path,), rule)


def _number(config: RunConfig, path: str) -> float:
    value = value_at(config, path)
    number: float = value.value if isinstance(value, Duration) else value
    return number


Found = tuple[str, str | None] | None


def _name_is_a_folder(config: RunConfig) -> Found:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        return None
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip("-._")[:100] or "run"
    return "must be one safe folder name: letters, digits, dot, dash and underscore, at most 100", f"name={safe}"


def _heads_divide_hidden(config: RunConfig) -> Found:
    model = config.model
    if model.head_dim or model.hidden % model.heads == 0:
        return None
    heads = _around(_divisors(model.hidden), model.heads)
    return f"must be a multiple of model.heads ({model.heads})", f"model.heads={listed(heads)}, or give model.head_dim"


def _kv_heads_divide_heads(config: RunConfig) -> Found:
    model = config.model
    if model.heads % model.key_value_heads == 0:
        return None
    return f"must divide model.heads ({model.heads})", f"model.kv_heads={listed(_divisors(model.heads))}"


def _rotary_halves_heads(config: RunConfig) -> Found:
    model = config.model
    if model.positions != "rotary" or (not model.head_dim and model.hidden % model.heads) or model.head_size % 2 == 0:
        return None
    rule = f"turns pairs of numbers, so the head size ({model.head_size}) must be even"
    return rule, "set model.head_dim to an even number, or choose other model.heads"


def _rows_for_every_position(config: RunConfig) -> Found:
    model = config.model
    if model.positions != "learned" or model.seq_len <= model.position_rows:
        return None
    return f"must be at most model.max_positions ({model.max_positions})", f"model.max_positions={model.seq_len}, or 0"


def _scaling_needs_rotary(config: RunConfig) -> Found:
    if config.model.rotary_scaling is None or config.model.positions == "rotary":
        return None
    return f"only means something with rotary positions, not {config.model.positions}", "model.positions=rotary"


_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _scaling_is_computed(config: RunConfig) -> Found:
    scaling = config.model.rotary_scaling
    if not scaling or config.model.positions != "rotary":
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in _SCALINGS:
        rule = "names no rope_type" if kind is None else f"has the rope_type {kind!r}, which is not computed"
        return f"{rule}: it must be {listed(list(_SCALINGS))}", "model.rotary_scaling={rope_type: linear, factor: 8.0}"
    unsound = [key for key in _SCALINGS[kind] if not _is_above_zero(scaling.get(key))]
    return (f"needs {', '.join(unsound)} for rope_type {kind}, above 0", None) if unsound else None


def _blend_has_weights(config: RunConfig) -> Found:
    unsound = [path for path, weight in config.data.blend.items() if not _is_above_zero(weight)]
    if not unsound:
        return None
    return (
        f"must have a weight above 0 for {', '.join(unsound)}",
        f"data.blend={{{unsound[0]}: 0.5, …}}, or leave it out",
    )


def _megatron_order_is_all_of_it(config: RunConfig) -> Found:
    """GPTDataset lays documents end to end, shuffles always, and seeds a generator of 32 bits."""
    data = config.data
    if data.order != "gpt":
        return None
    if data.strategy != "pack":
        return f"lays documents end to end, and data.strategy is {data.strategy}", "data.strategy=pack"
    if not data.shuffle or data.shuffle_window:
        return (
            "has a shuffle of its own, which data.shuffle and data.shuffle_window do not change",
            "leave both out, or data.order=keepstep",
        )
    if config.seed >= 1 << 32:
        return f"takes seeds below {1 << 32}, and seed is {config.seed}", "seed=1234, or what the Megatron run had"
    return None


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _microbatches_fill_the_batch(config: RunConfig) -> Found:
    if config.global_batch % config.microbatch == 0:
        return None
    batches = _multiples_around(config.microbatch, config.global_batch)
    micro = _around(_divisors(config.global_batch), config.microbatch)
    rule = f"must be a multiple of microbatch ({config.microbatch})"
    return rule, f"global_batch={listed(batches)}, or microbatch={listed(micro)}"


def _tensor_splits_evenly(config: RunConfig) -> Found:
    model, degree = config.model, config.parallel.tensor
    kv_heads, ffn, local_tokens = model.key_value_heads, model.ffn_size, model.seq_len // config.parallel.context
    if degree > 1 and model.linear == "bitnet":
        return "must be 1 with model.linear bitnet, whose scale is taken over whole matrices", "use parallel.shard"
    if kv_heads % degree or ffn % degree:
        degrees = [each for each in _divisors(kv_heads) if ffn % each == 0]
        heads = f"must divide model.{'kv_heads' if model.kv_heads else 'heads'} ({kv_heads})"
        rule = heads if kv_heads % degree else f"must divide the feed-forward width ({ffn})"
        return rule, f"parallel.tensor={listed(degrees)}"
    if model.padded_vocab % degree:
        rule = f"must divide the rows of the embedding ({model.padded_vocab})"
        return rule, f"model.vocab_multiple={lcm(model.vocab_multiple, degree)}"
    if local_tokens % degree:
        return f"must divide the tokens of a row on one process ({local_tokens})", "change model.seq_len"
    return None


def _stages_have_blocks(config: RunConfig) -> Found:
    parallel, layers = config.parallel, config.model.layers
    if parallel.pipeline * parallel.stages_per_process <= layers or parallel.pipeline == 1:
        return None
    each = f" × {parallel.stages_per_process} stages each" if parallel.stages_per_process > 1 else ""
    rule = f"makes {parallel.pipeline}{each}, more stages than model.layers ({layers})"
    return rule, f"parallel.pipeline={listed(range(1, layers // parallel.stages_per_process + 1)[-3:] or [1])}"


def _stages_suit_the_schedule(config: RunConfig) -> Found:
    parallel = config.parallel
    if parallel.schedule == "1f1b" and parallel.stages > 1:
        return "must be 1 with parallel.schedule 1f1b", "parallel.schedule=interleaved"
    if parallel.schedule == "interleaved" and parallel.stages == 1:
        return "must be 2 or more with parallel.schedule interleaved", "parallel.schedule=1f1b"
    return None


def _zero_bubble_runs_uncompiled(config: RunConfig) -> Found:
    if config.parallel.pipeline == 1 or config.parallel.schedule != "zero_bubble" or not config.compute.compile:
        return None
    return "splits the backward pass, which compiled blocks cannot", "compute.compile=false, or schedule=interleaved"


def _zero_bubble_recomputes_whole_blocks(config: RunConfig) -> Found:
    if config.parallel.pipeline == 1 or config.parallel.schedule != "zero_bubble":
        return None
    if config.compute.recompute != "selective":
        return None
    rule = "keeps products for one backward pass, and parallel.schedule zero_bubble makes two"
    return rule, "compute.recompute=full or none, or parallel.schedule=interleaved"


def _context_splits_rows(config: RunConfig) -> Found:
    degree, seq_len = config.parallel.context, config.model.seq_len
    if degree == 1 or seq_len % (2 * degree) == 0:
        return None
    degrees = [each for each in _divisors(seq_len // 2) if each <= 2 * degree] if seq_len % 2 == 0 else [1]
    rule = f"cuts a row into {2 * degree} equal pieces, and model.seq_len is {seq_len}"
    return rule, f"parallel.context={listed(_around(degrees, degree))}"


def _async_tensor_needs_kernels(config: RunConfig) -> Found:
    if not config.parallel.async_tensor:
        return None
    if config.parallel.tensor == 1:
        return "only means something with parallel.tensor above 1", "parallel.async_tensor=false"
    if config.compute.device == "cpu":
        return "needs GPUs joined by NVLink, and compute.device is cpu", "parallel.async_tensor=false"
    if not config.compute.compile:
        return "is found in compiled blocks only", "compute.compile=true"
    return None


def _attention_kernel_can(config: RunConfig) -> Found:
    kernel, model = config.compute.attention, config.model
    if kernel not in ("flash", "cudnn"):
        return None
    if config.compute.device == "cpu":
        return "needs a GPU, and compute.device is cpu", "compute.attention=auto"
    if config.precision == "fp32":
        return "computes in bf16 and fp16 only, and precision is fp32", "compute.attention=auto, or precision=bf16"
    if kernel == "flash" and model.positions == "alibi":
        return "takes no bias, and model.positions is alibi", "compute.attention=auto"
    what = _not_plainly_causal(config)
    return _flash_needs_bounds(config, what) if what else None


def _not_plainly_causal(config: RunConfig) -> str:
    """What attention must be told beside the order of tokens; empty where that says it all."""
    model, data = config.model, config.data
    if 0 < model.sliding_window < model.seq_len:
        return "a model.sliding_window shorter than a row"
    if data.separate_documents:
        return "data.separate_documents"
    return f"data.strategy {data.strategy}" if data.strategy != "pack" else ""


def _flash_needs_bounds(config: RunConfig, what: str) -> Found:
    """Flash is told of windows and documents by bounds, and has none where blocks or rows are split."""
    split = [axis for axis in ("pipeline", "context") if getattr(config.parallel, axis) > 1]
    if config.compute.attention != "flash" or not split:
        return None
    axes = " and ".join(f"parallel.{axis}" for axis in split)
    return f"takes no mask, which {what} needs where {axes} is not 1", "compute.attention=auto"


def check_conversations(config: RunConfig) -> None:
    """What holds for configured documents, for data that turned out to be conversations: rows are packed with them."""
    found = _flash_needs_bounds(config, "a row of conversations")
    if found is not None:
        raise ConfigError(f"compute.attention is 'flash', but it {found[0]}", found[1])


def _weights_only_from_somewhere(config: RunConfig) -> Found:
    if not config.checkpoint.skip_optimizer or config.checkpoint.resume_from:
        return None
    return "only means something with checkpoint.resume_from, which is empty", "name a step folder to start from"


def _prompts_need_whole_rows(config: RunConfig) -> Found:
    if not config.evaluate.prompts:
        return None
    split = [axis for axis in ("tensor", "context", "pipeline") if getattr(config.parallel, axis) > 1]
    if not split and config.precision != "fp8":
        return None
    why = f"parallel.{split[0]} is {getattr(config.parallel, split[0])}" if split else "precision is fp8"
    rule = f"must be empty where processes do not compute whole rows, or compute them in fp8, and {why}"
    return rule, "evaluate.prompts=[], and keepstep chat asks the run's checkpoints"


def _elastic_runs_hold_whole_weights(config: RunConfig) -> Found:
    if config.reproducible != "elastic":
        return None
    parallel = config.parallel
    split = [axis for axis in ("tensor", "pipeline", "context") if getattr(parallel, axis) > 1]
    if split:
        axes = " and ".join(f"parallel.{axis}" for axis in split)
        return f"is for data parallel runs only, and {axes} is not 1", ", ".join(f"parallel.{axis}=1" for axis in split)
    if parallel.offload:
        return "keeps weights where they compute, and parallel.offload is on", "parallel.offload=false"
    if config.precision == "fp16":
        return "has no scaled losses, which fp16 needs", "precision=bf16 or precision=fp32"
    return None


_LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


def _adapters_have_a_place(config: RunConfig) -> Found:
    unknown = [name for name in config.lora.targets if name not in _LORA_TARGETS]
    if config.lora.targets and not unknown:
        return None
    return f"must name some of {', '.join(_LORA_TARGETS)}", "lora.targets=[q, v] is the smallest usual choice"


def _adapters_sit_on_plain_products(config: RunConfig) -> Found:
    if not config.lora.rank:
        return None
    if config.precision == "fp8":
        return "puts adapters on plain products, and precision is fp8", "precision=bf16, or lora.rank=0"
    if config.model.linear != "dense":
        return f"puts adapters on plain linears, and model.linear is {config.model.linear}", "model.linear=dense"
    return None


def _reading_is_counted_in_rows(config: RunConfig) -> Found:
    if config.chat.read_first.unit in ("ba", "sp", "tok"):
        return None
    return "must be in steps, samples or tokens", "chat.read_first=200ba"


def _decay_knows_its_end(config: RunConfig) -> Found:
    if config.max_duration.unit != "s" or config.schedule.name == "constant":
        return None
    rule = f"is a time, and nobody knows its steps beforehand: schedule.name {config.schedule.name} needs to know them"
    return rule, "schedule.name=constant, or max_duration in steps (100ba), samples, tokens or epochs"


def _warmup_is_counted_in_steps(config: RunConfig) -> Found:
    if config.schedule.warmup.unit != "s":
        return None
    return "must be in steps, samples, tokens or epochs", "schedule.warmup=100ba"


_RULES: tuple[tuple[tuple[str, ...], Callable[[RunConfig], Found]], ...] = (
    (("name",), _name_is_a_folder),
    (("lora.targets",), _adapters_have_a_place),
    (("lora.rank", "precision", "model.linear"), _adapters_sit_on_plain_products),
    (("chat.read_first",), _reading_is_counted_in_rows),
    (("max_duration", "schedule.name"), _decay_knows_its_end),
    (("schedule.warmup",), _warmup_is_counted_in_steps),
    (("model.hidden", "model.heads", "model.head_dim"), _heads_divide_hidden),
    (("model.kv_heads", "model.heads"), _kv_heads_divide_heads),
    (("model.positions", "model.hidden", "model.heads", "model.head_dim"), _rotary_halves_heads),
    (("model.seq_len", "model.max_positions", "model.positions"), _rows_for_every_position),
    (("model.rotary_scaling", "model.positions"), _scaling_needs_rotary),
    (("model.rotary_scaling", "model.positions"), _scaling_is_computed),
    (("data.blend",), _blend_has_weights),
    (
        ("data.order", "data.strategy", "data.shuffle", "data.shuffle_window", "seed"),
        _megatron_order_is_all_of_it,
    ),
    (("global_batch", "microbatch"), _microbatches_fill_the_batch),
    (
        (
            "parallel.tensor",
            "parallel.context",
            "model.kv_heads",
            "model.heads",
            "model.ffn_hidden",
            "model.hidden",
            "model.vocab",
            "model.vocab_multiple",
            "model.seq_len",
        ),
        _tensor_splits_evenly,
    ),
    (("parallel.pipeline", "parallel.stages", "model.layers"), _stages_have_blocks),
    (("parallel.stages", "parallel.schedule"), _stages_suit_the_schedule),
    (("parallel.schedule", "parallel.pipeline", "compute.compile"), _zero_bubble_runs_uncompiled),
    (("compute.recompute", "parallel.schedule", "parallel.pipeline"), _zero_bubble_recomputes_whole_blocks),
    (("parallel.context", "model.seq_len"), _context_splits_rows),
    (("parallel.async_tensor", "parallel.tensor", "compute.device", "compute.compile"), _async_tensor_needs_kernels),
    (
        (
            "compute.attention",
            "compute.device",
            "precision",
            "model.positions",
            "model.sliding_window",
            "model.seq_len",
            "parallel.pipeline",
            "parallel.context",
        ),
        _attention_kernel_can,
    ),
    (("checkpoint.skip_optimizer", "checkpoint.resume_from"), _weights_only_from_somewhere),
    (
        ("evaluate.prompts", "parallel.tensor", "parallel.context", "parallel.pipeline", "precision"),
        _prompts_need_whole_rows,
    ),
    (
        ("reproducible", "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.offload", "precision"),
        _elastic_runs_hold_whole_weights,
    ),
)


def check_layout(config: RunConfig, world_size: int) -> Layout:
    """How this many processes share the run; a ConfigError where they cannot."""
    layout = resolve_layout(config.parallel, world_size)
    if config.reproducible == "elastic":
        # Micro batches are dealt out as they come: any number of processes will do, and each has whole weights.
        return Layout(replicate=layout.data_ranks, shard=1)
    check_microbatches(config.parallel, accumulation_steps(config.global_batch, config.microbatch, layout.data_ranks))
    return layout


def accumulation_steps(global_batch: int, microbatch: int, data_ranks: int) -> int:
    """Micro batches each process runs in one optimizer step; a ConfigError names values nearby that divide."""
    rows = microbatch * data_ranks
    if global_batch > 0 and global_batch % rows == 0:
        return global_batch // rows
    remedies = [f"global_batch={listed(_multiples_around(rows, global_batch))}"]
    if global_batch % data_ranks == 0:
        micro = _around(_divisors(global_batch // data_ranks), microbatch)
        remedies.append(f"microbatch={listed(micro)}")
    if global_batch % microbatch == 0:
        ranks = _around(_divisors(global_batch // microbatch), data_ranks)
        remedies.append(f"{listed(ranks)} data-parallel processes")
    raise ConfigError(
        f"global_batch is {global_batch}, but it must be a multiple of microbatch × data-parallel processes "
        f"({microbatch} × {data_ranks} = {rows})",
        ", or ".join(remedies),
    )


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _around(choices: list[int], wanted: int) -> list[int]:
    """The nearest choice on each side of `wanted`."""
    below = [each for each in choices if each <= wanted][-1:]
    above = [each for each in choices if each > wanted][:1]
    return below + above


def _multiples_around(step: int, wanted: int) -> list[int]:
    below = wanted // step * step
    return [below, below + step] if below > 0 else [step]
