"""`config.json` of the families with RMSNorm, rotary positions and a gated feed-forward block ↔ `ModelConfig`.

Llama came first; the others differ from it by the few fields that this module names. Never imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from keepstep.config.hf_experts import (
    DEEPSEEK,
    EXPERT_DEFAULTS,
    check_experts,
    experts_family,
    from_experts,
    to_experts,
)
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.core.messages import listed

Family = Literal[
    "gpt2", "mpt", "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "olmo3", "granite", "smollm3", "gemma",
    "gemma2", "gemma3_text", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2",
    "deepseek_v3",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = get_args(Family)

HfConfig = Mapping[str, Any]

_FIELDS = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
"""Our field → their key, where both sides mean the same number and every file has it."""
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "phi3": {"rms_norm_eps": 1e-5, "sliding_window": None},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "granite": {"attention_multiplier": 1.0},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True, "sliding_window": None},
    "gemma": {**_GEMMA, "num_key_value_heads": 16},
    "gemma2": {**_GEMMA, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**_GEMMA, "num_key_value_heads": 4, "rope_theta": 1000000.0},
    **EXPERT_DEFAULTS,
}
"""What a file without the key means, where the family differs from Llama."""
ROPE_SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""Types of scaled rotary positions that our decoder computes."""
_LOCAL_BASES: Mapping[str, float] = {"gemma3_text": 10000.0, "olmo3": 500000.0}
"""Families whose sliding layers have a RoPE of their own, and its base if the file does not say."""
_FULL_EVERY: Mapping[str, int] = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4, "gpt_oss": 2}
"""Families in which every n-th layer attends to all tokens if the file does not say, and the others slide."""
_PRE_ATTN = "query_pre_attn_scalar"
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_BIASED: tuple[Family, ...] = ("llama", "granite", "smollm3")
"""Families that may have biases in all their linears."""
_GEMMAS: tuple[Family, ...] = ("gemma", "gemma2", "gemma3_text")
_OLMOS: tuple[Family, ...] = ("olmo2", "olmo3")
_EXPERTS: tuple[Family, ...] = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", *DEEPSEEK)
_MIXED: tuple[Family, ...] = ("qwen2", "qwen3", "olmo3", "smollm3", "gemma2", "gemma3_text", "gpt_oss")
_ONLY: Mapping[str, tuple[Family, ...]] = {
    "qkv_bias": ("gpt2", "qwen2", "qwen2_moe", "gpt_oss", *_BIASED),
    "out_bias": ("gpt_oss",),
    "attention_sinks": ("gpt_oss",),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"), DEEPSEEK),
    "qk_norm": ("qwen3", "gemma3_text", "olmoe", "qwen3_moe", *_OLMOS),
    "head_qk_norm": ("olmoe", *_OLMOS),
    "norm_placement": ("gemma2", "gemma3_text", *_OLMOS),
    "sliding_window": ("mistral", "phi3", "mixtral", *_MIXED),
    "layer_types": _MIXED,
    "rotary_local_base": ("gemma3_text", "olmo3"),
    "rotary_scaling": ("llama", "phi3", "mistral", "granite", *_MIXED, "olmo2", "gemma", *_EXPERTS),
    "partial_rotary_factor": ("phi3",),
    "no_rope_layer_interval": ("smollm3",),
    "embedding_multiplier": ("granite", *_GEMMAS),
    "residual_multiplier": ("granite",),
    "attention_multiplier": ("granite", "gemma2", "gemma3_text"),
    "logits_scaling": ("granite",),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3_text"),
}
"""Fields that only these families compute."""


def rotary_family(config: ModelConfig) -> Family:
    """The family that computes what a model with RMSNorm, rotary positions and a gated feed-forward computes."""
    family = _family(config)
    if config.bias and family not in _BIASED:
        raise ConfigError(f"model.bias is on, but {family} has no biases", "train such a model without biases")
    return family


def _family(config: ModelConfig) -> Family:
    if config.experts.count:
        family: Family = experts_family(config)
        return family
    if config.activation == "geglu_tanh":
        return "gemma3_text" if config.qk_norm else "gemma2" if config.norm_placement == "both" else "gemma"
    if config.family != "auto" or config.partial_rotary_factor != 1.0:
        return "phi3"
    if config.norm_placement != "before":
        return "olmo3" if config.sliding_window else "olmo2"
    defaults = ModelConfig()
    if any(getattr(config, name) != getattr(defaults, name) for name in _MULTIPLIERS):
        return "granite"
    if config.no_rope_layer_interval:
        return "smollm3"
    if config.qk_norm:
        return "qwen3"
    if (config.qkv_bias and not config.bias) or config.layer_types:
        return "qwen2"
    return "mistral" if config.sliding_window else "llama"


def check_rotary(config: ModelConfig, family: Family) -> None:
    """Raise for what our decoder computes and transformers does not in this family: the export would be misread."""
    defaults = ModelConfig()
    expected = {name: getattr(defaults, name) for name, families in _ONLY.items() if family not in families}
    if config.experts.count:
        check_experts(config, family)
    for name, value in {**expected, **_fixed(config, family)}.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"model.{name} is {getattr(config, name)}, which transformers does not compute for the family {family}",
                "keepstep itself trains, evaluates and serves it: eval, chat",
            )


def _fixed(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Fields that a family has at one value only."""
    if family in _GEMMAS:
        scale = _pre_attn_scalar(config) ** -0.5 if config.attention_multiplier else 0.0
        placement = "before" if family == "gemma" else "both"
        fixed = {"norm": "rmsnorm_1p", "norm_placement": placement, "embedding_multiplier": config.hidden**0.5}
        fixed.update(attention_multiplier=scale)
    elif family in ("gpt2", "mpt"):
        return {"norm": "layernorm"}
    else:
        fixed = {"norm": "rmsnorm"}
    if family in _OLMOS:
        fixed.update(norm_placement="after", qk_norm=True, head_qk_norm=False)
    if family == "qwen2":
        fixed.update(qkv_bias=True)
    if family == "olmoe":
        fixed.update(head_qk_norm=False)
    if family == "phi3" and (_rope_scaling(config) or {}).get("rope_type") != "longrope":
        fixed.update(rotary_scaling=None)
    if family == "gpt_oss":
        fixed.update(attention_sinks=True, out_bias=config.qkv_bias)
    if family in _LOCAL_BASES and config.sliding_window and not config.rotary_local_base:
        # Their sliding layers are never scaled.
        fixed.update(rotary_scaling=None)
    return fixed


def _pre_attn_scalar(config: ModelConfig) -> int:
    return round(config.attention_multiplier**-2) if config.attention_multiplier else config.head_size


def demand(config: HfConfig, key: str, *allowed: Any) -> None:
    """Raise unless the key is absent or has one of the values our decoder computes."""
    if key in config and config[key] not in allowed:
        listed = " or ".join(repr(value) for value in allowed)
        message = f"config.json has {key} = {config[key]!r}, which keepstep does not support"
        raise ConfigError(message, f"supported: {listed}")


def same_fields(config: HfConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Our fields by their keys."""
    return {ours: config[theirs] for ours, theirs in names.items()}


def their_fields(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Their keys by our fields."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


def from_rotary(config: HfConfig, family: Family) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    config = {**_DEFAULTS.get(family, {}), **config}
    gemma = family in _GEMMAS
    if not gemma:
        demand(config, "hidden_act", "silu")
    return {
        **same_fields(config, _FIELDS),
        "kv_heads": config.get("num_key_value_heads") or 0,
        "head_dim": config.get("head_dim") or _DEFAULTS.get(family, {}).get("head_dim", 0),
        "ffn_hidden": config["intermediate_size"],
        "seq_len": config["max_position_embeddings"],
        "positions": "rotary",
        **_rope_parameters(config, family),
        "norm": "rmsnorm_1p" if gemma else "rmsnorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": "geglu_tanh" if gemma else "swiglu",
        "bias": family != "gpt_oss" and _has_biases(config),
        "qkv_bias": family == "qwen2",
        "qk_norm": family in _ONLY["qk_norm"],
        "tied": config.get("tie_word_embeddings", False),
        **_layer_kinds(config, family),
        "init_std": config.get("initializer_range", 0.02),
        "family": "phi3" if family == "phi3" else "auto",
        **_own_fields(config, family),
        **from_experts(config, family),
    }


def _own_fields(config: HfConfig, family: Family) -> dict[str, Any]:
    """What one family has and the others have not."""
    if family in _GEMMAS:
        return _gemma_fields(config, family)
    match family:
        case "olmo2" | "olmo3":
            return {"norm_placement": "after", "head_qk_norm": False}
        case "granite":
            return {name: float(config.get(name, 1.0)) for name in _MULTIPLIERS}
        case "smollm3":
            return {"no_rope_layer_interval": _no_rope_interval(config)}
        case _:
            return {}


def _gemma_fields(config: HfConfig, family: Family) -> dict[str, Any]:
    if family == "gemma":
        # In its files `gelu` means the form by tanh.
        demand(config, "hidden_act", "gelu_pytorch_tanh", "gelu")
    else:
        demand(config, "hidden_activation", "gelu_pytorch_tanh")
    demand(config, "use_bidirectional_attention", None, False)
    fields: dict[str, Any] = {"embedding_multiplier": float(config["hidden_size"] ** 0.5)}
    if family == "gemma":
        return fields
    if family == "gemma3_text":
        demand(config, "attn_logit_softcapping", None)
    scalar = config.get(_PRE_ATTN, 256)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields[name] = float(config.get(name) or 0.0)
    scale = 0.0 if scalar == config["head_dim"] else scalar**-0.5
    return {**fields, "norm_placement": "both", "attention_multiplier": scale}


def _no_rope_interval(config: HfConfig) -> int:
    given, layers = config.get("no_rope_layers"), range(config["num_hidden_layers"])
    if given is None:
        return int(config.get("no_rope_layer_interval", 4))
    ropes = [bool(has_rope) for has_rope in given[: len(layers)]]
    interval = ropes.index(False) + 1 if False in ropes else 0
    if ropes != [not interval or (layer + 1) % interval != 0 for layer in layers]:
        raise ConfigError("config.json has no_rope_layers that are not every n-th", "such a model is not supported")
    return interval


def to_rotary(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Keys of config.json."""
    scaling = _rope_scaling(config)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rotary_base}
    fields: dict[str, Any] = {
        **their_fields(config, _FIELDS),
        "intermediate_size": config.ffn_size,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": _longest(config),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "gelu_pytorch_tanh" if family in _GEMMAS else "silu",
        "initializer_range": config.init_std,
        # transformers before and after version 5 read different keys.
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": rope,
    }
    if family in _LOCAL_BASES:
        local = config.rotary_local_base or config.rotary_base
        sliding = {"rope_type": "default", "rope_theta": local}
        fields.update(
            rope_local_base_freq=local, rope_parameters={"full_attention": rope, "sliding_attention": sliding}
        )
    fields.update(attention_bias=config.bias)
    if family in _BIASED:
        fields.update(mlp_bias=config.bias)
    return {**fields, **_own_keys(config, family), **to_experts(config, family)}


def _longest(config: ModelConfig) -> int:
    """The longest text; transformers scales dynamic rotary positions from there on."""
    scaling = config.rotary_scaling or {}
    if scaling.get("rope_type", scaling.get("type")) == "dynamic":
        return int(scaling["original_max_position_embeddings"])
    return max(config.max_positions, config.seq_len)


def _own_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    kinds = ["sliding_attention" if config.is_sliding(layer) else "full_attention" for layer in range(config.layers)]
    window = config.sliding_window
    keys: dict[str, Any]
    match family:
        case "mistral" | "mixtral":
            return {"sliding_window": window or None}
        case "phi3":
            partial = {"partial_rotary_factor": config.partial_rotary_factor}
            scaling = _rope_scaling(config)
            rope = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rotary_base, **partial}
            context = (scaling or {}).get("original_max_position_embeddings", _longest(config))
            keys = {"sliding_window": window or None, "original_max_position_embeddings": context}
            return {**keys, **partial, "rope_parameters": rope}
        case "qwen2" | "qwen3" | "smollm3":
            used = {"sliding_window": window, "max_window_layers": kinds.index("sliding_attention")} if window else {}
            keys = {"use_sliding_window": window > 0, "layer_types": kinds, **used}
            if family != "smollm3":
                return keys
            ropes = [int(config.has_rope(layer)) for layer in range(config.layers)]
            return {**keys, "no_rope_layers": ropes, "no_rope_layer_interval": config.no_rope_layer_interval}
        case "olmo3" | "gpt_oss":
            return {"sliding_window": window or 4096, "layer_types": kinds}
        case "granite":
            scale = config.attention_multiplier or config.head_size**-0.5
            return {**{name: getattr(config, name) for name in _MULTIPLIERS}, "attention_multiplier": scale}
        case "gemma2" | "gemma3_text":
            caps = ("attn_logit_softcapping", "final_logit_softcapping")
            return {
                "hidden_activation": "gelu_pytorch_tanh",
                _PRE_ATTN: _pre_attn_scalar(config),
                **{name: getattr(config, name) or None for name in caps},
                "sliding_window": window or 4096,
                "layer_types": kinds,
            }
        case _:
            return {}


def _has_biases(config: HfConfig) -> bool:
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if attention != mlp:
        raise ConfigError(
            f"config.json has attention_bias = {attention} and mlp_bias = {mlp}, which keepstep does not support",
            "supported: biases in both, or in neither",
        )
    return bool(attention)


def _rope_parameters(config: HfConfig, family: Family) -> dict[str, Any]:
    """Fields of RoPE. transformers 5 keeps them in rope_parameters; older files have keys of their own."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if family in _LOCAL_BASES and config.get("rope_parameters"):
        values = dict(values.get("full_attention") or {})
    base = float(values.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    partial = values.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and family not in _ONLY["partial_rotary_factor"]:
        raise ConfigError(f"config.json has partial_rotary_factor = {partial!r}", f"{family} rotates whole heads here")
    kind = values.get("rope_type", values.get("type", "default"))
    # Phi-3 files name the same scaling su, yarn or longrope.
    kind = "longrope" if family == "phi3" and kind in ("su", "yarn") else kind
    known = ("default", "longrope") if family == "phi3" else ("default", *ROPE_SCALINGS)
    if kind not in known:
        raise ConfigError(
            f"config.json has rope_type {kind!r}, which keepstep does not support", f"supported: {', '.join(known)}"
        )
    longest = config["max_position_embeddings"]
    if kind == "dynamic":
        values["original_max_position_embeddings"] = longest
    elif kind in ("yarn", "longrope"):
        values.setdefault("original_max_position_embeddings", longest)
    if kind == "longrope":
        values.pop("type", None)
        context = config.get("original_max_position_embeddings") or values["original_max_position_embeddings"]
        values |= {"original_max_position_embeddings": context, "factor": values.get("factor") or longest / context}
    scaling = None if kind == "default" else {**values, "rope_type": kind}
    return {"rotary_base": base, "rotary_scaling": scaling, "partial_rotary_factor": float(partial)}


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    given = dict(config.rotary_scaling or {})
    # `type` is the older name of the key; where a file has both, the newer one counts.
    kind = given.pop("type", None)
    kind = given.pop("rope_type", kind) or "default"
    return None if kind == "default" else {"rope_type": kind, **given}


def _layer_kinds(config: HfConfig, family: Family) -> dict[str, Any]:
    """Which layers have a sliding window, and the base of their RoPE where it is their own."""
    # A file without the key means the family's default window; null means none.
    window = int(config.get("sliding_window", 4096) or 0) if family in _ONLY["sliding_window"] else 0
    if family in ("qwen2", "qwen3", "smollm3") and not config.get("use_sliding_window", False):
        window = 0
    if not window:
        return {"sliding_window": 0}
    kinds = tuple(config.get("layer_types") or _default_kinds(config, family))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != config["num_hidden_layers"]:
        named = f"{listed(sorted(map(repr, unknown)))}" if unknown else f"{len(kinds)} entries"
        raise ConfigError(
            f"config.json has layer_types with {named}", "full_attention or sliding_attention for each layer"
        )
    if "sliding_attention" not in kinds:
        return {"sliding_window": 0}
    fields: dict[str, Any] = {"sliding_window": window}
    if "full_attention" in kinds or family in _LOCAL_BASES:
        periods = range(1, len(kinds) + 1)
        fields["layer_types"] = next(kinds[:n] for n in periods if (kinds[:n] * len(kinds))[: len(kinds)] == kinds)
    if family in _LOCAL_BASES:
        fields["rotary_local_base"] = _local_base(config, family)
    return fields


def _default_kinds(config: HfConfig, family: Family) -> list[str]:
    """The kinds of layers that the family has unless the file says."""
    layers = range(config["num_hidden_layers"])
    full = [False for _ in layers]
    if family in ("qwen2", "qwen3"):
        full = [layer < config.get("max_window_layers", 28) for layer in layers]
    elif family == "smollm3":
        interval = _no_rope_interval(config)
        full = [not interval or (layer + 1) % interval != 0 for layer in layers]
    elif family in _FULL_EVERY:
        every = config.get("sliding_window_pattern", 6) if family == "gemma3_text" else _FULL_EVERY[family]
        full = [(layer + 1) % every == 0 for layer in layers]
    return ["full_attention" if attends_all else "sliding_attention" for attends_all in full]


def _local_base(config: HfConfig, family: Family) -> float:
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    demand(local, "rope_type", "default")
    return float(local.get("rope_theta") or config.get("rope_local_base_freq") or _LOCAL_BASES[family])
