"""From `ModelConfig` to a Hugging Face `config.json`: the inverse of `hf_config`. Never imports transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.hf_config import Family

_CLASSES: Mapping[Family, str] = {
    "gpt2": "GPT2LMHeadModel", "mpt": "MptForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip


_MPT_BIAS_MAX = 8
"""The only one that transformers computes, whatever config.json says."""


def export_family(config: ModelConfig) -> Family:
    """The family that computes what this model computes, or an error that says what none of them has."""
    if config.linear != "dense":
        raise ConfigError(f"model.linear is {config.linear}, which no Hugging Face family has", "model.linear=dense")
    if (config.norm, config.activation, config.positions) == ("rmsnorm", "swiglu", "rotary") and not config.clip_qkv:
        return _rotary_family(config)
    if config.norm == "layernorm" and config.activation != "swiglu" and not (config.qk_norm or config.sliding_window):
        if (
            config.positions == "learned"
            and config.bias
            and not config.clip_qkv
            and config.kv_heads in (0, config.heads)
        ):
            return "gpt2"
        if config.positions == "alibi" and config.activation == "gelu" and not config.bias and not config.qkv_bias:
            return "mpt"
    shape = f"{config.norm}, {config.activation}, {config.positions} positions, bias {str(config.bias).lower()}"
    raise ConfigError(
        f"no Hugging Face family computes this model ({shape})", "gpt2, mpt (alibi), llama, mistral, qwen2 and qwen3 do"
    )


def _rotary_family(config: ModelConfig) -> Family:
    if config.qk_norm:
        family: Family = "qwen3"
    elif config.qkv_bias and not config.bias:
        family = "qwen2"
    elif config.sliding_window:
        family = "mistral"
    else:
        family = "llama"
    if config.bias and family != "llama":
        raise ConfigError(f"model.bias is on, which {family} has not", "train such a model without biases")
    return family


def describe_hf(config: ModelConfig, dtype: str, tokens: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json for the family that fits; `tokens` are special ids such as eos_token_id."""
    family = export_family(config)
    _check_computed(config, family)
    match family:
        case "gpt2":
            fields = _gpt2(config)
        case "mpt":
            fields = _mpt(config)
        case _:
            fields = _llama_like(config, family)
    head = {"architectures": [_CLASSES[family]], "model_type": family}
    shared = {"vocab_size": config.vocab, "tie_word_embeddings": config.tied, "use_cache": True}
    ids = {"bos_token_id": None, "eos_token_id": None, **(tokens or {})}
    return {**head, **fields, **shared, "dtype": dtype, "torch_dtype": dtype, **ids}


def _check_computed(config: ModelConfig, family: Family) -> None:
    """Raise for what our decoder computes in this family and transformers' does not: it would be read wrongly."""
    own_heads = config.heads * config.head_size != config.hidden
    refused = {
        "gpt2": {"head_dim": own_heads},
        "mpt": {
            "head_dim": own_heads,
            "kv_heads": config.key_value_heads != config.heads,
            "ffn_hidden": config.ffn_size != 4 * config.hidden,
            "alibi_bias_max": config.alibi_bias_max != _MPT_BIAS_MAX,
        },
        "qwen3": {"qkv_bias": config.qkv_bias},
    }
    for name, differs in refused.get(family, {}).items():
        if differs:
            value = getattr(config, name)
            raise ConfigError(
                f"model.{name} is {value}, which transformers does not compute for the family {family}",
                "keepstep itself trains, evaluates and talks to it: eval, chat",
            )


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": config.ffn_size,
        "n_positions": config.position_rows,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "initializer_range": config.init_std,
    }


def _mpt(config: ModelConfig) -> dict[str, Any]:
    attention: dict[str, Any] = {"alibi": True, "alibi_bias_max": _MPT_BIAS_MAX}
    if config.clip_qkv:
        attention["clip_qkv"] = config.clip_qkv
    return {
        "n_layers": config.layers,
        "d_model": config.hidden,
        "n_heads": config.heads,
        "expansion_ratio": config.ffn_size // config.hidden,
        "max_seq_len": _most_positions(config),
        "layer_norm_epsilon": config.norm_eps,
        "no_bias": True,
        "learned_pos_emb": False,
        "attn_config": attention,
    }


def _llama_like(config: ModelConfig, family: Family) -> dict[str, Any]:
    scaling = _scaling(config)
    fields: dict[str, Any] = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": _most_positions(config),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        # Readers before and after transformers 5 look in different places.
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rotary_base},
    }
    match family:
        case "llama":
            fields.update(attention_bias=config.bias, mlp_bias=config.bias)
        case "mistral":
            fields.update(sliding_window=config.sliding_window)
        case _:
            windowed = config.sliding_window > 0
            window = {"sliding_window": config.sliding_window, "max_window_layers": 0} if windowed else {}
            kind = "sliding_attention" if windowed else "full_attention"
            fields.update(use_sliding_window=windowed, layer_types=[kind] * config.layers, **window)
            if family == "qwen3":
                fields.update(attention_bias=False)
    return fields


def _scaling(config: ModelConfig) -> dict[str, Any] | None:
    given = dict(config.rotary_scaling or {})
    # The older name of the key; with both, readers follow the newer.
    kind = given.pop("type", None)
    kind = given.pop("rope_type", kind) or "default"
    return None if kind == "default" else {"rope_type": kind, **given}


def _most_positions(config: ModelConfig) -> int:
    return max(config.max_positions, config.seq_len)
