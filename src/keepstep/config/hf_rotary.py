"""`config.json` of the families with RMSNorm, rotary positions and a gated feed-forward block ↔ `ModelConfig`.

Llama came first; the others differ from it by the few fields that this module names. Never imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError

Family = Literal["gpt2", "mpt", "llama", "mistral", "qwen2", "qwen3", "phi3"]
FAMILIES: tuple[Family, ...] = get_args(Family)

HfConfig = Mapping[str, Any]

_FIELDS = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
"""Our field → their key, where both sides mean the same number and every file has it."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "phi3": {"rms_norm_eps": 1e-5, "sliding_window": None},
}
"""What a file without the key means, where the family differs from Llama."""
_BIASED: tuple[Family, ...] = ("llama",)
"""Families that may have biases in all their linears."""
_ONLY: Mapping[str, tuple[Family, ...]] = {
    "qkv_bias": ("gpt2", "llama", "qwen2"),
    "qk_norm": ("qwen3",),
    "sliding_window": ("mistral", "qwen2", "qwen3", "phi3"),
    "rotary_scaling": ("llama", "mistral", "qwen2", "qwen3"),
    "partial_rotary_factor": ("phi3",),
}
"""Fields that only these families compute."""


def rotary_family(config: ModelConfig) -> Family:
    """The family that computes what a model with RMSNorm, rotary positions and a gated feed-forward computes."""
    if config.family != "auto" or config.partial_rotary_factor != 1.0:
        family: Family = "phi3"
    elif config.qk_norm:
        family = "qwen3"
    elif config.qkv_bias and not config.bias:
        family = "qwen2"
    elif config.sliding_window:
        family = "mistral"
    else:
        family = "llama"
    if config.bias and family not in _BIASED:
        raise ConfigError(f"model.bias is on, which {family} has not", "train such a model without biases")
    return family


def check_rotary(config: ModelConfig, family: Family) -> None:
    """Raise for what our decoder computes and transformers does not in this family: the export would be misread."""
    defaults = ModelConfig()
    for name, families in _ONLY.items():
        value = getattr(config, name)
        if value != getattr(defaults, name) and family not in families:
            raise ConfigError(
                f"model.{name} is {value}, which transformers does not compute for the family {family}",
                "keepstep itself trains, evaluates and serves it: eval, chat",
            )


def demand(config: HfConfig, key: str, *allowed: Any) -> None:
    """Raise unless the key is absent or has one of the values our decoder computes."""
    if key in config and config[key] not in allowed:
        listed = " or ".join(repr(value) for value in allowed)
        raise ConfigError(f"config.json has {key} = {config[key]!r}", f"this decoder computes {listed} only")


def same_fields(config: HfConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Our fields by their keys."""
    return {ours: config[theirs] for ours, theirs in names.items()}


def their_fields(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Their keys by our fields."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


def from_rotary(config: HfConfig, family: Family) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    config = {**_DEFAULTS.get(family, {}), **config}
    demand(config, "hidden_act", "silu")
    return {
        **same_fields(config, _FIELDS),
        "kv_heads": config.get("num_key_value_heads") or 0,
        "head_dim": config.get("head_dim") or (128 if family == "qwen3" else 0),
        "ffn_hidden": config["intermediate_size"],
        "seq_len": config["max_position_embeddings"],
        "positions": "rotary",
        **_rope_parameters(config, family),
        "norm": "rmsnorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "bias": _has_biases(config),
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "tied": config.get("tie_word_embeddings", False),
        "sliding_window": _sliding_window(config, family),
        "init_std": config.get("initializer_range", 0.02),
        "family": "phi3" if family == "phi3" else "auto",
    }


def to_rotary(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Keys of config.json."""
    scaling = _rope_scaling(config)
    fields: dict[str, Any] = {
        **their_fields(config, _FIELDS),
        "intermediate_size": config.ffn_size,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": max(config.max_positions, config.seq_len),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        # transformers before and after version 5 read different keys.
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rotary_base},
    }
    match family:
        case "llama":
            fields.update(attention_bias=config.bias, mlp_bias=config.bias)
        case "mistral":
            fields.update(sliding_window=config.sliding_window)
        case "phi3":
            partial = {"partial_rotary_factor": config.partial_rotary_factor}
            fields.update(sliding_window=config.sliding_window or None, **partial)
            fields.update(original_max_position_embeddings=fields["max_position_embeddings"])
            fields["rope_parameters"].update(partial)
        case _:
            windowed = config.sliding_window > 0
            window = {"sliding_window": config.sliding_window, "max_window_layers": 0} if windowed else {}
            kind = "sliding_attention" if windowed else "full_attention"
            fields.update(use_sliding_window=windowed, layer_types=[kind] * config.layers, **window)
            if family == "qwen3":
                fields.update(attention_bias=False)
    return fields


def _has_biases(config: HfConfig) -> bool:
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if attention != mlp:
        raise ConfigError(
            f"config.json has attention_bias = {attention} and mlp_bias = {mlp}",
            "this decoder has biases in both or in neither",
        )
    return bool(attention)


def _rope_parameters(config: HfConfig, family: Family) -> dict[str, Any]:
    """Fields of RoPE. transformers 5 keeps them in rope_parameters; older files have keys of their own."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(values.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    partial = values.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and family not in _ONLY["partial_rotary_factor"]:
        raise ConfigError(f"config.json has partial_rotary_factor = {partial!r}", f"{family} rotates whole heads here")
    kind = values.get("rope_type", values.get("type", "default"))
    # Phi-3 files name the same scaling su, yarn or longrope.
    if kind == "longrope" or (family == "phi3" and kind != "default"):
        raise ConfigError(
            f"config.json scales rotary positions by {kind!r} (LongRoPE), whose frequencies change with the length of "
            "each text: this decoder computes a position alike in short and long texts",
            "use a model without it, for example phi-4 or Phi-3-mini-4k",
        )
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"config.json scales rotary positions by {kind!r}", "known: default, linear, llama3, yarn")
    if kind == "yarn":
        values.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    scaling = None if kind == "default" else {**values, "rope_type": kind}
    return {"rotary_base": base, "rotary_scaling": scaling, "partial_rotary_factor": float(partial)}


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    given = dict(config.rotary_scaling or {})
    # `type` is the older name of the key; where a file has both, the newer one counts.
    kind = given.pop("type", None)
    kind = given.pop("rope_type", kind) or "default"
    return None if kind == "default" else {"rope_type": kind, **given}


def _sliding_window(config: HfConfig, family: Family) -> int:
    # A file without the key means the family's default window; null means none.
    window = config.get("sliding_window", 4096) or 0
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return 0
    if family == "llama" or not window:
        return 0
    kinds = set(config.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return 0
    first = config.get("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
    if kinds != {"sliding_attention"} or (first and not config.get("layer_types")):
        raise ConfigError("config.json mixes layers with and without a sliding window", "all layers must be alike")
    return int(window)
