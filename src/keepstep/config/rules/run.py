"""Rules of the run itself (its name, batch, data, schedule and checkpoints), of the model's shape and its adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from keepstep.config.rules import Found, around, divisors, multiples_around, rule
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.core.messages import listed
from keepstep.core.plugins import is_plugin, plugin_problem


@rule("name")
def name_is_a_folder(config: RunConfig) -> Found:
    """The name becomes a folder and part of job names."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        return None
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip("-._")[:100] or "run"
    return "must be one safe folder name: letters, digits, dot, dash and underscore, at most 100", f"name={safe}"


@rule("global_batch", "microbatch")
def microbatches_fill_the_batch(config: RunConfig) -> Found:
    """A step is a whole number of micro batches."""
    if config.global_batch % config.microbatch == 0:
        return None
    batches = multiples_around(config.microbatch, config.global_batch)
    micro = around(divisors(config.global_batch), config.microbatch)
    needs = f"must be a multiple of microbatch ({config.microbatch})"
    return needs, f"global_batch={listed(batches)}, or microbatch={listed(micro)}"


@rule("data.blend")
def blend_has_weights(config: RunConfig) -> Found:
    """Every data set of a blend has a usable weight."""
    wrong = [path for path, weight in config.data.blend.items() if not is_positive(weight)]
    if not wrong:
        return None
    return f"must have a weight above 0 for {', '.join(wrong)}", f"data.blend={{{wrong[0]}: 0.5, …}}, or leave it out"


@rule("data.order", "data.strategy", "data.shuffle", "data.shuffle_window", "seed")
def megatron_order_decides_alone(config: RunConfig) -> Found:
    """GPTDataset concatenates documents, always shuffles, and seeds a generator of 32 bits."""
    data = config.data
    if data.order != "gpt":
        return None
    if data.strategy != "pack":
        return f"concatenates documents, and data.strategy is {data.strategy}", "data.strategy=pack"
    if not data.shuffle or data.shuffle_window:
        return (
            "has its own shuffle, which data.shuffle and data.shuffle_window do not change",
            "leave both out, or data.order=keepstep",
        )
    if config.seed >= 1 << 32:
        return f"takes seeds below {1 << 32}, and seed is {config.seed}", "seed=1234, or the Megatron run's seed"
    return None


@rule("chat.read_first")
def read_first_is_counted_in_rows(config: RunConfig) -> Found:
    """Epochs and seconds cannot be turned into rows before the run."""
    if config.chat.read_first.unit in ("ba", "sp", "tok"):
        return None
    return "must be in steps, samples or tokens", "chat.read_first=200ba"


@rule(
    "preference.method", "parallel.tensor", "parallel.context", "parallel.pipeline", "precision", "chat.loss_on",
    "chat.read_first",
)  # fmt: skip
def preference_needs_whole_answers(config: RunConfig) -> Found:
    """The log-probability of an answer is summed on one process; only answers are compared."""
    return None if config.preference.method == "none" else _whole_answers(config)


@rule(
    "rl.method", "preference.method", "parallel.tensor", "parallel.context", "parallel.pipeline", "precision",
    "chat.loss_on", "chat.read_first",
)  # fmt: skip
def rl_needs_whole_answers(config: RunConfig) -> Found:
    """A run learns from given answers or from its own."""
    if config.rl.method == "none":
        return None
    if config.preference.method != "none":
        needs = f"cannot be combined with preference.method {config.preference.method}"
        return needs, "rl.method=none, or preference.method=none"
    return _whole_answers(config)


def _whole_answers(config: RunConfig) -> Found:
    split = [axis for axis in ("tensor", "context", "pipeline") if getattr(config.parallel, axis) > 1]
    if split:
        return f"needs parallel.{split[0]}=1", "use parallel.shard and parallel.replicate"
    if config.precision == "fp8":
        return "needs matmuls in bf16, and precision is fp8", "precision=bf16"
    if config.chat.loss_on == "all" or config.chat.read_first.value:
        return "compares what the assistant says alone", "leave chat.loss_on and chat.read_first out"
    return None


@rule("microbatch", "rl.num_generations", "rl.method")
def groups_are_whole(config: RunConfig) -> Found:
    """A micro batch holds all answers to a prompt, which are compared with each other."""
    group = config.rl.num_generations
    if config.rl.method == "none" or config.microbatch % group == 0:
        return None
    sizes = multiples_around(group, config.microbatch)
    return f"must be a multiple of rl.num_generations ({group})", f"microbatch={listed(sizes)}"


@rule("rl.max_new_tokens", "rl.method", "model.seq_len")
def answers_fit_a_row(config: RunConfig) -> Found:
    """Prompt and answer share a row."""
    if config.rl.method == "none" or config.rl.max_new_tokens < config.model.seq_len:
        return None
    return f"must be below model.seq_len ({config.model.seq_len})", "leave room for the prompt in model.seq_len"


_REWARDS = ("tool_calls", "schema", "format")


@rule("rl.rewards", "rl.method")
def rewards_are_known(config: RunConfig) -> Found:
    """Each is built in or a plug-in, with a weight."""
    if config.rl.method == "none":
        return None
    if not config.rl.rewards:
        return "must name a reward", "rl.rewards={tool_calls: 1.0}"
    for name, weight in config.rl.rewards.items():
        if not (is_positive(weight) or is_positive(-weight)):
            return f"must have a weight other than 0 for {name}", f"rl.rewards={{{name}: 1.0}}"
        problem = None if name in _REWARDS else plugin_problem("rewards", name, _REWARDS)
        if problem is not None:
            return f"has {name}, which {problem[0]}", problem[1]
    return None


@rule("preference.label_smoothing", "preference.method")
def label_smoothing_needs_dpo(config: RunConfig) -> Found:
    """The other losses have no term for it."""
    if not config.preference.label_smoothing or config.preference.method == "dpo":
        return None
    return f"has no effect with preference.method {config.preference.method}", "preference.method=dpo, or leave it out"


@rule("max_duration", "schedule.name")
def decay_needs_a_known_end(config: RunConfig) -> Found:
    """A decaying learning rate needs the number of steps in advance."""
    if config.max_duration.unit != "s" or config.schedule.name == "constant":
        return None
    needs = f"is a time, and schedule.name {config.schedule.name} needs the number of steps in advance"
    return needs, "schedule.name=constant, or max_duration in steps (100ba), samples, tokens or epochs"


@rule("schedule.warmup")
def warmup_is_counted_in_steps(config: RunConfig) -> Found:
    """Warmup ends at a step that is known in advance."""
    if config.schedule.warmup.unit != "s":
        return None
    return "must be in steps, samples, tokens or epochs", "schedule.warmup=100ba"


@rule("checkpoint.skip_optimizer", "checkpoint.resume_from")
def skip_optimizer_needs_a_source(config: RunConfig) -> Found:
    """Only a start from another step can leave the optimizer out."""
    if not config.checkpoint.skip_optimizer or config.checkpoint.resume_from:
        return None
    return "needs checkpoint.resume_from, which is empty", "set checkpoint.resume_from to a step folder"


@rule("evaluate.prompts", "parallel.tensor", "parallel.context", "parallel.pipeline", "precision")
def prompts_need_whole_rows(config: RunConfig) -> Found:
    """Generation during a run needs a process that computes a row alone."""
    if not config.evaluate.prompts:
        return None
    split = [axis for axis in ("tensor", "context", "pipeline") if getattr(config.parallel, axis) > 1]
    if not split and config.precision != "fp8":
        return None
    why = f"parallel.{split[0]} is {getattr(config.parallel, split[0])}" if split else "precision is fp8"
    needs = f"needs each process to compute whole rows, and not in fp8, but {why}"
    return needs, "evaluate.prompts=[]; keepstep chat answers from the run's checkpoints"


@rule("model.hidden", "model.heads", "model.head_dim")
def heads_divide_hidden(config: RunConfig) -> Found:
    """Heads of equal width fill the hidden size, unless their width is given."""
    model = config.model
    if model.head_dim or model.hidden % model.heads == 0:
        return None
    heads = around(divisors(model.hidden), model.heads)
    return f"must be a multiple of model.heads ({model.heads})", f"model.heads={listed(heads)}, or set model.head_dim"


@rule("model.kv_heads", "model.heads")
def kv_heads_divide_heads(config: RunConfig) -> Found:
    """Every key-value head serves the same number of attention heads."""
    model = config.model
    if model.heads % model.key_value_heads == 0:
        return None
    return f"must divide model.heads ({model.heads})", f"model.kv_heads={listed(divisors(model.heads))}"


@rule("model.positions", "model.hidden", "model.heads", "model.head_dim")
def rope_needs_even_heads(config: RunConfig) -> Found:
    """RoPE rotates pairs of numbers."""
    model = config.model
    if model.positions != "rotary" or (not model.head_dim and model.hidden % model.heads) or model.head_size % 2 == 0:
        return None
    needs = f"needs an even head size: RoPE rotates pairs of numbers, and the head size is {model.head_size}"
    return needs, "set model.head_dim to an even number, or choose other model.heads"


@rule("model.partial_rotary_factor", "model.positions", "model.hidden", "model.heads", "model.head_dim")
def partial_rope_rotates_pairs(config: RunConfig) -> Found:
    """A part of a head is rotated in pairs too; without RoPE nothing is."""
    model = config.model
    if model.partial_rotary_factor == 1.0:
        return None
    if model.positions != "rotary":
        return f"needs model.positions rotary, not {model.positions}", "model.partial_rotary_factor=1"
    if model.rotary_size and model.rotary_size % 2 == 0:
        return None
    needs = f"makes {model.rotary_size} of {model.head_size} channels, which must be an even number above 0"
    return needs, f"model.partial_rotary_factor={2 / max(model.head_size, 2):g}, or a multiple of it"


@rule(
    "model.kv_lora_rank", "model.q_lora_rank", "model.qk_rope_head_dim", "model.v_head_dim", "model.positions",
    "model.hidden", "model.heads", "model.kv_heads", "model.head_dim", "model.bias", "model.qkv_bias", "model.out_bias",
    "model.qk_norm", "model.clip_qkv", "model.attention_sinks", "model.partial_rotary_factor",
    "model.no_rope_layer_interval", "model.layer_types",
)  # fmt: skip
def latent_attention_has_its_sizes(config: RunConfig) -> Found:
    """Latent attention rotates a part of each head, and has none of the variants of ordinary attention."""
    model = config.model
    if not model.kv_lora_rank:
        set_alone = [name for name in ("q_lora_rank", "qk_rope_head_dim", "v_head_dim") if getattr(model, name)]
        return (f"is needed by model.{set_alone[0]}", "model.kv_lora_rank=512") if set_alone else None
    if model.positions != "rotary":
        return f"needs model.positions rotary, not {model.positions}", "model.positions=rotary"
    if model.qk_rope_head_dim % 2 or not 0 < model.qk_rope_head_dim < model.head_size:
        needs = f"needs an even model.qk_rope_head_dim between 0 and the head's {model.head_size} channels"
        return needs, "model.head_dim=192 model.qk_rope_head_dim=64"
    if model.value_size > model.head_size:
        return f"needs model.v_head_dim of at most the head's {model.head_size} channels", "model.v_head_dim=0"
    if model.key_value_heads != model.heads:
        return "has a key and a value for each head, so model.kv_heads must be 0", "model.kv_heads=0"
    plain = ModelConfig()
    others = ("qkv_bias", "out_bias", "qk_norm", "clip_qkv", "attention_sinks", "partial_rotary_factor")
    for name in (*others, "no_rope_layer_interval", "layer_types"):
        if getattr(model, name) != getattr(plain, name):
            return f"does not support model.{name}", f"leave model.{name} out"
    return ("does not support model.bias", "model.bias=false") if model.bias else None


@rule("model.layer_types", "model.sliding_window")
def sliding_layers_have_a_window(config: RunConfig) -> Found:
    """Layers of two kinds need the window of one of them."""
    model = config.model
    if model.sliding_window or "sliding_attention" not in model.layer_types:
        return None
    return "needs a model.sliding_window for its sliding layers", "model.sliding_window=4096, or model.layer_types=[]"


@rule("model.rotary_local_base", "model.positions", "model.layer_types")
def local_rope_needs_sliding_layers(config: RunConfig) -> Found:
    """The second RoPE base is that of layers which layer_types names."""
    model = config.model
    if not model.rotary_local_base or (model.positions == "rotary" and "sliding_attention" in model.layer_types):
        return None
    return "needs model.positions rotary and sliding layers in model.layer_types", "model.rotary_local_base=0"


@rule("model.no_rope_layer_interval", "model.positions")
def layers_without_rope_need_rope(config: RunConfig) -> Found:
    """Only rotary positions can be left out in single layers."""
    if not config.model.no_rope_layer_interval or config.model.positions == "rotary":
        return None
    return f"needs model.positions rotary, not {config.model.positions}", "model.no_rope_layer_interval=0"


@rule("model.head_qk_norm", "model.qk_norm")
def whole_qk_norm_needs_qk_norm(config: RunConfig) -> Found:
    """It says over what queries and keys are normalized."""
    if config.model.head_qk_norm or config.model.qk_norm:
        return None
    return "needs model.qk_norm", "model.qk_norm=true"


@rule("model.seq_len", "model.max_positions", "model.positions")
def learned_positions_cover_a_row(config: RunConfig) -> Found:
    """A learned position table has an entry for every token of a row."""
    model = config.model
    if model.positions != "learned" or model.seq_len <= model.position_rows:
        return None
    return f"must be at most model.max_positions ({model.max_positions})", f"model.max_positions={model.seq_len}, or 0"


@rule("model.rotary_scaling", "model.positions")
def rope_scaling_needs_rope(config: RunConfig) -> Found:
    """Scaled frequencies exist with rotary positions only."""
    if config.model.rotary_scaling is None or config.model.positions == "rotary":
        return None
    return f"needs model.positions rotary, not {config.model.positions}", "model.positions=rotary"


_ROPE_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""May be left out."""


@rule(
    "model.rotary_scaling", "model.positions", "model.hidden", "model.heads", "model.head_dim",
    "model.partial_rotary_factor",
)  # fmt: skip
def rope_scaling_is_supported(config: RunConfig) -> Found:
    """The scaling has a type that is implemented, with all its numbers."""
    scaling = config.model.rotary_scaling
    if not scaling or config.model.positions != "rotary":
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in _ROPE_SCALINGS:
        given = "has no rope_type" if kind is None else f"has the rope_type {kind!r}, which is not supported"
        hint = "model.rotary_scaling={rope_type: linear, factor: 8.0}"
        return f"{given}: it must be {listed(list(_ROPE_SCALINGS))}", hint
    missing = [key for key in _ROPE_SCALINGS[kind] if not is_positive(scaling.get(key))]
    if kind in ("yarn", "longrope"):
        missing += [key for key in _YARN_OPTIONS if not is_positive(scaling.get(key) or 1)]
    pairs = config.model.rotary_size // 2
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors = scaling.get(key)
        if not isinstance(factors, list | tuple) or len(factors) != pairs or not all(map(is_positive, factors)):
            return f"needs {key} for rope_type longrope, {pairs} numbers above 0", None
    return (f"needs {', '.join(missing)} for rope_type {kind}, above 0", None) if missing else None


def is_positive(value: Any) -> bool:
    """Whether a value from a free mapping is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


_LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@rule("lora.targets")
def lora_targets_exist(config: RunConfig) -> Found:
    """At least one projection gets an adapter, and each name is known."""
    unknown = [name for name in config.lora.targets if name not in _LORA_TARGETS]
    if config.lora.targets and not unknown:
        return None
    return f"must name some of {', '.join(_LORA_TARGETS)}", "lora.targets=[q, v] is the smallest usual choice"


@rule("model.linear", "precision")
def linear_is_known(config: RunConfig) -> Found:
    """A kind of ours, or a plug-in; fp8 matmuls replace plain ones only."""
    kind = config.model.linear
    if config.precision == "fp8" and kind not in ("dense", "fp8"):
        return "does not compute in fp8, and precision is fp8", "precision=bf16, or model.linear=dense"
    return None if kind in _LINEAR_KINDS else plugin_problem("linear", kind, _LINEAR_KINDS)


_LINEAR_KINDS = ("dense", "bitnet", "fp8", "sparse")
_LINEAR_LAYERS = ("qkv", "out", "up", "down")


@rule("model.linear_layers")
def linear_layers_exist(config: RunConfig) -> Found:
    """At least one projection, and each name is known."""
    layers = config.model.linear_layers
    if layers and set(layers) <= set(_LINEAR_LAYERS):
        return None
    return f"must name some of {', '.join(_LINEAR_LAYERS)}", "model.linear_layers=[up, down]"


@rule("model.linear_options", "model.linear")
def linear_options_are_used(config: RunConfig) -> Found:
    """Only sparse layers and plug-ins take options."""
    if not config.model.linear_options or config.model.linear not in _LINEAR_KINDS[:3]:
        return None
    return f"has no effect with model.linear {config.model.linear}", "model.linear=sparse, or leave the options out"


@rule("observe.callbacks")
def callbacks_are_known(config: RunConfig) -> Found:
    """Each is a plug-in with a mapping of options, or none."""
    for name, options in config.observe.callbacks.items():
        if not isinstance(options, Mapping | None):
            return f"must have a mapping of options for {name}", f"observe.callbacks={{{name}: {{}}}}"
        problem = plugin_problem("callbacks", name)
        if problem is not None:
            return f"has {name}, which {problem[0]}", problem[1]
    return None


@rule("data.options", "data.path", "data.blend")
def data_options_need_a_plugin(config: RunConfig) -> Found:
    """Data that is no plug-in takes no options."""
    data = config.data
    if not data.options or any(is_plugin("data", path) for path in (data.blend or (data.path,))):
        return None
    return f"is for plug-ins, and data.path {data.path} is none", "install the plug-in's package, or leave it out"


@rule("lora.rank", "model.linear")
def lora_needs_plain_linears(config: RunConfig) -> Found:
    """Adapters are added to plain linear layers, which `lora.base` may quantise."""
    if config.lora.rank and config.model.linear != "dense":
        return f"needs model.linear dense, and it is {config.model.linear}", "model.linear=dense"
    return None


@rule(
    "lora.base", "lora.rank", "precision", "model.experts.count", "model.kv_lora_rank",
    "parallel.tensor", "parallel.pipeline", "parallel.offload",
)  # fmt: skip
def quantized_base_is_whole(config: RunConfig) -> Found:
    """Frozen weights are quantised under adapters only, and every process holds all of them."""
    base = config.adapters.base
    if base == "bf16" or (not config.lora.rank and config.lora.base == "bf16"):
        return None
    if not config.lora.rank:
        return "is for the frozen weights under adapters, and lora.rank is 0", "lora.rank=16, or leave lora.base out"
    if config.precision == "fp8" and base == "nf4":
        return "computes in bf16, and precision is fp8", "precision=bf16, or lora.base=fp8"
    if config.model.experts.count or config.model.kv_lora_rank:
        which = "experts" if config.model.experts.count else "latent attention"
        return f"does not quantise {which}", "lora.base=bf16 with precision=bf16"
    for name, alone in (("tensor", 1), ("pipeline", 1), ("offload", False)):
        if getattr(config.parallel, name) != alone:
            return f"keeps quantised weights whole on each GPU: needs parallel.{name}={alone}", "lora.base=bf16"
    return None
