"""Hugging Face `config.json` ↔ `ModelConfig`, in both directions. Never imports transformers.

What one side does not compute (images, parallel attention ...) is an error: a model that loads
and computes something else is worse than one that does not load.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.config.fields import all_fields
from keepstep.config.hf_rotary import (
    FAMILIES,
    Family,
    HfConfig,
    check_rotary,
    demand,
    from_rotary,
    rotary_family,
    same_fields,
    their_fields,
    to_rotary,
)
from keepstep.config.schema import ExpertsConfig, ModelConfig
from keepstep.config.values import Misfit, convert
from keepstep.core.errors import ConfigError, UsageError
from keepstep.core.messages import invalid_value

_CLASSES: Mapping[Family, str] = {
    "gpt2": "GPT2LMHeadModel", "mpt": "MptForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM", "smollm3": "SmolLM3ForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
_GPT2_FIELDS = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head"}
_MPT_FIELDS = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads"}
"""Our field → their key, where both sides mean the same number and every file has it."""
_MPT_BIAS_MAX = 8
"""The only value that transformers computes, whatever config.json says."""
_NOT_COMPUTED: Mapping[str, str] = {
    "deepseek_v32": "sparse attention with an indexer",
    "gemma3": "images (export its text model, gemma3_text)",
    "phi": "parallel attention and feed-forward",
    **dict.fromkeys(("falcon", "gpt_neox", "cohere", "cohere2"), "parallel attention and feed-forward"),
}
"""Families that people ask for, and what is missing to compute them."""
DEFAULT_SEQ_LEN = 2048
"""Longest rows of a model from a config.json unless the user sets model.seq_len: long contexts cost memory."""


def find_model_file(name: str, yaml_folder: Path) -> str | None:
    """The config.json that `model: NAME` means, from here or from the YAML's folder; None if it is no path."""
    for path in (Path(name), yaml_folder / name):
        for file in (path / "config.json", path):
            # Unlike Path.is_file, this does not raise for a name that no file can have.
            if file.suffix == ".json" and os.path.isfile(file):  # noqa: PTH113
                return str(file)
    return name if is_model_file(name) else None


def is_model_file(preset: str) -> bool:
    """Whether a model's `preset` is the path of a config.json, which need not exist any more."""
    return "/" in preset or preset.endswith(".json")


def read_model_file(path: Path) -> dict[str, Any]:
    """Fields of `ModelConfig` to train the model of a config.json from scratch."""
    fields = model_config_from_hf(read_hf_config(path))
    return fields | {"max_positions": fields["seq_len"], "seq_len": min(fields["seq_len"], DEFAULT_SEQ_LEN)}


def read_hf_config(path: Path) -> dict[str, Any]:
    """The content of a config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
        raise ValueError(f"it is {type(config).__name__}, not an object")
    except OSError as error:
        hint = "give a preset or the path of a config.json; a run that was started continues from its own config.yaml"
        raise UsageError(f"cannot read {path}: {error.strerror}", hint) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "download the file again") from None


def hf_family(config: HfConfig) -> Family:
    """The family a `config.json` names, or an error that lists those we know."""
    family: Family = config.get("model_type")  # type: ignore[assignment]
    if family in FAMILIES:
        return family
    lacks = _NOT_COMPUTED.get(str(family))
    needs = f": this decoder has no {lacks}" if lacks else ""
    raise ConfigError(f"model_type is {family!r}, which is not supported{needs}", f"known: {', '.join(FAMILIES)}")


def model_config_from_hf(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig` for a Hugging Face config; an absent key means the family's own default."""
    try:
        match hf_family(config):
            case "gpt2":
                fields = _from_gpt2(config)
            case "mpt":
                fields = _from_mpt(config)
            case family:
                fields = from_rotary(config, family)
        fields["vocab"] = config["vocab_size"]
        given = fields.pop("experts", {})
    except KeyError as missing:
        raise ConfigError(f"config.json does not say {missing}", "download the file again, or add it") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json holds a value of a wrong kind: {error}", "download the file again") from None
    experts = {name: checked_field(f"experts.{name}", value, "config.json") for name, value in given.items()}
    checked = {name: checked_field(name, value, "config.json") for name, value in fields.items()}
    return checked | ({"experts": ExpertsConfig(**experts)} if experts else {})


def checked_field(name: str, value: Any, source: str) -> Any:
    """A value as the field's type, within its bounds: the file may be damaged, or hostile."""
    field = all_fields()[f"model.{name}"]
    try:
        converted = convert(field.type, value)
        if field.range is not None and not field.range.holds(converted):
            raise Misfit(field.range.rule(converted))
    except Misfit as misfit:
        wrong = invalid_value(f"model.{name}", value, misfit.rule)
        raise ConfigError(f"{source}: {wrong}", "download the file again") from None
    return converted


def export_family(config: ModelConfig) -> Family:
    """The family that computes what this model computes, or an error that says what none of them has."""
    if config.linear != "dense":
        raise ConfigError(f"model.linear is {config.linear}, which no Hugging Face family has", "model.linear=dense")
    if config.norm != "layernorm" and config.gated and config.positions == "rotary" and not config.clip_qkv:
        return rotary_family(config)
    if config.norm == "layernorm" and not config.gated and not (config.qk_norm or config.sliding_window):
        grouped = config.kv_heads not in (0, config.heads)
        if config.positions == "learned" and config.bias and not config.clip_qkv and not grouped:
            return "gpt2"
        if config.positions == "alibi" and config.activation == "gelu" and not config.bias and not config.qkv_bias:
            return "mpt"
    shape = f"{config.norm}, {config.activation}, {config.positions} positions, bias {str(config.bias).lower()}"
    raise ConfigError(f"no Hugging Face family computes this model ({shape})", f"known: {', '.join(FAMILIES)}")


def hf_config_of(config: ModelConfig, dtype: str, tokens: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json for the family that fits; `tokens` are special ids such as eos_token_id."""
    family = export_family(config)
    check_rotary(config, family)
    _check_computed(config, family)
    match family:
        case "gpt2":
            fields = _to_gpt2(config)
        case "mpt":
            fields = _to_mpt(config)
        case _:
            fields = to_rotary(config, family)
    head = {"architectures": [_CLASSES[family]], "model_type": family}
    shared = {"vocab_size": config.vocab, "tie_word_embeddings": config.tied, "use_cache": True}
    # A family's own default ids may be outside this vocabulary.
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **(tokens or {})}
    return {**head, **fields, **shared, "dtype": dtype, "torch_dtype": dtype, **ids}


def _check_computed(config: ModelConfig, family: Family) -> None:
    """Raise for what our decoder computes in this family and transformers does not: the export would be misread."""
    own_heads = config.heads * config.head_size != config.hidden
    refused = {
        "gpt2": {"head_dim": own_heads},
        "mpt": {
            "head_dim": own_heads,
            "kv_heads": config.key_value_heads != config.heads,
            "ffn_hidden": config.ffn_size != 4 * config.hidden,
            "alibi_bias_max": config.alibi_bias_max != _MPT_BIAS_MAX,
        },
    }
    for name, differs in refused.get(family, {}).items():
        if differs:
            value = getattr(config, name)
            raise ConfigError(
                f"model.{name} is {value}, which transformers does not compute for the family {family}",
                "keepstep itself trains, evaluates and serves it: eval, chat",
            )


def _from_gpt2(config: HfConfig) -> dict[str, Any]:
    demand(config, "scale_attn_weights", True)
    demand(config, "scale_attn_by_inverse_layer_idx", False)
    demand(config, "add_cross_attention", False)
    demand(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    return {
        **same_fields(config, _GPT2_FIELDS),
        "ffn_hidden": config.get("n_inner") or 0,
        "seq_len": config["n_positions"],
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu" if config.get("activation_function") == "gelu" else "gelu_tanh",
        "bias": True,
        "tied": config.get("tie_word_embeddings", True),
        "init_std": config.get("initializer_range", 0.02),
    }


def _to_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        **their_fields(config, _GPT2_FIELDS),
        "n_inner": config.ffn_size,
        "n_positions": config.position_rows,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "initializer_range": config.init_std,
    }


def _from_mpt(config: HfConfig) -> dict[str, Any]:
    attention: HfConfig = config.get("attn_config") or {}
    demand(config, "logit_scale", None)
    demand(config, "norm_type", "low_precision_layernorm", "layernorm")
    for key, value in (("softmax_scale", None), ("qk_ln", False), ("prefix_lm", False), ("rope", False)):
        demand(attention, key, value)
    demand(attention, "attn_type", "multihead_attention", "grouped_query_attention")
    learned = "learned" if config.get("learned_pos_emb", True) else "none"
    return {
        **same_fields(config, _MPT_FIELDS),
        "kv_heads": attention.get("kv_n_heads") or 0,
        "ffn_hidden": int(config.get("expansion_ratio", 4) * config["d_model"]),
        "seq_len": config["max_seq_len"],
        # Where a file asks for both, MPT leaves the learned table out.
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


def _to_mpt(config: ModelConfig) -> dict[str, Any]:
    attention: dict[str, Any] = {"alibi": True, "alibi_bias_max": _MPT_BIAS_MAX}
    if config.clip_qkv:
        attention["clip_qkv"] = config.clip_qkv
    return {
        **their_fields(config, _MPT_FIELDS),
        "expansion_ratio": config.ffn_size // config.hidden,
        "max_seq_len": max(config.max_positions, config.seq_len),
        "layer_norm_epsilon": config.norm_eps,
        "no_bias": True,
        "learned_pos_emb": False,
        "attn_config": attention,
    }
