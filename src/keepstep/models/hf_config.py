"""From a Hugging Face `config.json` to the fields of `ModelConfig`. Never imports transformers.

What our decoder does not do (mixture of experts, mixed layer types, soft-capped logits ...) is an error here: a model
that loads and computes something else is worse than one that does not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from keepstep.core.errors import ConfigError

Family = Literal["gpt2", "mpt", "llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("gpt2", "mpt", "llama", "mistral", "qwen2", "qwen3")

HfConfig = Mapping[str, Any]


def hf_family(config: HfConfig) -> Family:
    """The family a `config.json` names, or an error that lists those we know."""
    named = config.get("model_type")
    for family in FAMILIES:
        if named == family:
            return family
    raise ConfigError(f"model_type is {named!r}, which cannot be imported", f"known: {', '.join(FAMILIES)}")


def model_config_from_hf(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig` for a Hugging Face config; absent keys mean what the family's own defaults mean."""
    try:
        match hf_family(config):
            case "gpt2":
                fields = _gpt2(config)
            case "mpt":
                fields = _mpt(config)
            case family:
                fields = _llama_like(config, family)
    except KeyError as missing:
        raise ConfigError(f"config.json does not say {missing}", "fetch the file again, or add it") from None
    for name in _COUNTS:
        value = fields.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < (name not in _MAY_BE_ZERO):
            raise ConfigError(f"config.json makes model.{name} {value!r}, which is no size", "fetch the file again")
    return fields


_MAY_BE_ZERO = ("kv_heads", "head_dim", "ffn_hidden")
_COUNTS = ("layers", "hidden", "heads", "vocab", "seq_len", *_MAY_BE_ZERO)


def _demand(config: HfConfig, key: str, *allowed: Any) -> None:
    """Raise unless the key is absent or has one of the values our decoder computes."""
    if key in config and config[key] not in allowed:
        listed = " or ".join(repr(value) for value in allowed)
        raise ConfigError(f"config.json has {key} = {config[key]!r}", f"this decoder computes {listed} only")


def _gpt2(config: HfConfig) -> dict[str, Any]:
    _demand(config, "scale_attn_weights", True)
    _demand(config, "scale_attn_by_inverse_layer_idx", False)
    _demand(config, "add_cross_attention", False)
    _demand(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn_hidden": config.get("n_inner") or 0,
        "vocab": config["vocab_size"],
        "seq_len": config["n_positions"],
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu" if config.get("activation_function") == "gelu" else "gelu_tanh",
        "bias": True,
        "tied": config.get("tie_word_embeddings", True),
        "init_std": config.get("initializer_range", 0.02),
    }


def _mpt(config: HfConfig) -> dict[str, Any]:
    attention: HfConfig = config.get("attn_config") or {}
    _demand(config, "logit_scale", None)
    _demand(config, "norm_type", "low_precision_layernorm", "layernorm")
    for key, value in (("softmax_scale", None), ("qk_ln", False), ("prefix_lm", False), ("rope", False)):
        _demand(attention, key, value)
    _demand(attention, "attn_type", "multihead_attention", "grouped_query_attention")
    learned = "learned" if config.get("learned_pos_emb", True) else "none"
    return {
        "layers": config["n_layers"],
        "hidden": config["d_model"],
        "heads": config["n_heads"],
        "kv_heads": attention.get("kv_n_heads") or 0,
        "ffn_hidden": int(config.get("expansion_ratio", 4) * config["d_model"]),
        "vocab": config["vocab_size"],
        "seq_len": config["max_seq_len"],
        # Where both are asked for, MPT leaves the table out.
        "positions": "alibi" if attention.get("alibi", True) else learned,
        "alibi_bias_max": float(attention.get("alibi_bias_max", 8)),
        "clip_qkv": float(attention.get("clip_qkv") or 0.0),
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "bias": not config.get("no_bias", True),
        "tied": config.get("tie_word_embeddings", True),
        "init": "kaiming",
    }


def _llama_like(config: HfConfig, family: Family) -> dict[str, Any]:
    _demand(config, "hidden_act", "silu")
    base, scaling = _rotary(config)
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or 0,
        "head_dim": config.get("head_dim") or (128 if family == "qwen3" else 0),
        "ffn_hidden": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "seq_len": config["max_position_embeddings"],
        "positions": "rotary",
        "rotary_base": base,
        "rotary_scaling": scaling,
        "norm": "rmsnorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "bias": _has_biases(config),
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "tied": config.get("tie_word_embeddings", False),
        "sliding_window": _sliding_window(config, family),
        "init_std": config.get("initializer_range", 0.02),
    }


def _has_biases(config: HfConfig) -> bool:
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if attention != mlp:
        raise ConfigError(
            f"config.json has attention_bias = {attention} and mlp_bias = {mlp}",
            "this decoder has biases in both or in neither",
        )
    return bool(attention)


def _rotary(config: HfConfig) -> tuple[float, dict[str, Any] | None]:
    # transformers 5 keeps base and scaling together in rope_parameters; older files have two keys.
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(values.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    for place in (config, values):
        _demand(place, "partial_rotary_factor", 1.0, None)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"config.json scales rotary positions by {kind!r}", "known: default, linear, llama3")
    return base, None if kind == "default" else {**values, "rope_type": kind}


def _sliding_window(config: HfConfig, family: Family) -> int:
    # A file without the key means the family's own window; null means none.
    window = config.get("sliding_window", 4096) or 0
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return 0
    if family == "llama" or not window:
        return 0
    kinds = set(config.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return 0
    first = config.get("max_window_layers", 28) if family != "mistral" else 0
    if kinds != {"sliding_attention"} or (first and not config.get("layer_types")):
        raise ConfigError("config.json mixes layers with and without a sliding window", "all layers must be alike")
    return int(window)
