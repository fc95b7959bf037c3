"""Rules of the model's shape, its linear layers and its adapters."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.config.rules import Found, around, divisors, is_positive, rule
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.core.messages import listed
from keepstep.core.plugins import plugin_problem


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


_LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@rule("lora.targets")
def lora_targets_exist(config: RunConfig) -> Found:
    """At least one projection gets an adapter, and each name is known."""
    unknown = [name for name in config.lora.targets if name not in (*_LORA_TARGETS, "all")]
    if config.lora.targets and not unknown:
        return None
    hint = "lora.targets=[all], and [q, v] is the smallest usual choice"
    return f"must be all or name some of {', '.join(_LORA_TARGETS)}", hint


@rule("lora.targets", "lora.rank", "model.experts.count", "model.kv_lora_rank", "model.activation")
def lora_targets_are_in_the_model(config: RunConfig) -> Found:
    """Experts take no adapters, latent attention takes them on queries and outputs, and some models have no gate."""
    model = config.model
    targets = config.lora.targets_in(model)
    refused = [name for name in targets if name in _LORA_TARGETS and name not in model.adapter_targets]
    if not config.lora.rank or not refused:
        return None
    name, hint = refused[0], f"lora.targets=[{', '.join(model.adapter_targets)}]"
    if name in "kv":
        return f"has {name}, and latent attention takes no such adapter", hint
    if model.experts.count:
        return f"has {name}, and experts take no such adapter", hint
    return f"has {name}, and model.activation {model.activation} has no gate", hint


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
