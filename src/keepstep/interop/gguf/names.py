"""Tensor names, layouts and metadata of llama.cpp's architectures ↔ those of Hugging Face, which we import and export.

What one side does not compute is an error: a model that loads and computes something else is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError, malformed_as
from keepstep.interop.gguf.reader import GgufFile
from keepstep.models.positions import rope_frequencies

ROPE_FACTORS = "rope_freqs.weight"
"""Frequencies are divided by these: llama.cpp's way to store the scaling of Llama 3."""
_BLOCK = "model.layers.{}."
_LLAMA = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "blk.{}.attn_norm": _BLOCK + "input_layernorm", "blk.{}.ffn_norm": _BLOCK + "post_attention_layernorm",
    "blk.{}.attn_q": _BLOCK + "self_attn.q_proj", "blk.{}.attn_k": _BLOCK + "self_attn.k_proj",
    "blk.{}.attn_v": _BLOCK + "self_attn.v_proj", "blk.{}.attn_output": _BLOCK + "self_attn.o_proj",
    "blk.{}.attn_q_norm": _BLOCK + "self_attn.q_norm", "blk.{}.attn_k_norm": _BLOCK + "self_attn.k_norm",
    "blk.{}.ffn_gate": _BLOCK + "mlp.gate_proj", "blk.{}.ffn_up": _BLOCK + "mlp.up_proj",
    "blk.{}.ffn_down": _BLOCK + "mlp.down_proj",
}  # fmt: skip
_GPT2 = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head", "blk.{}.attn_norm": "transformer.h.{}.ln_1", "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn", "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc", "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}  # fmt: skip
NAMES: Mapping[str, Mapping[str, str]] = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}
"""Architecture → their stems → Hugging Face's; `{}` is the number of a layer."""
_LLAMA_KEYS = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
}  # fmt: skip
_GPT2_KEYS = {
    "n_layer": "block_count", "n_embd": "embedding_length", "n_inner": "feed_forward_length",
    "n_head": "attention.head_count", "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}  # fmt: skip
_NOT_COMPUTED = {
    "expert_count": "experts from GGUF files",
    "attention.clamp_kqv": "clamped projections", "logit_scale": "scaled logits",
    "embedding_scale": "scaled embeddings", "residual_scale": "scaled residuals", "attention.scale": "scaled attention",
    "rope.scaling.yarn_log_multiplier": "YaRN with a multiplier", "rope.scaling.attn_factor": "YaRN with a multiplier",
    "attention.sliding_window": "sliding window that llama.cpp would ignore",
}  # fmt: skip
"""Keys that change what is computed, and what our decoder lacks for them; 0 and 1 mean that they are not used."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of all Llama 3 models; a file has only the factors that follow from them."""
_YARN_KEYS = {
    "factor": "rope.scaling.factor", "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
}  # fmt: skip


def hf_name(name: str, architecture: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one keeps its own, and the import names it."""
    return _renamed(name, NAMES[architecture])


def gguf_name(name: str, architecture: str) -> str:
    """The inverse of `hf_name`."""
    return _renamed(name, {theirs: ours for ours, theirs in NAMES[architecture].items()})


def _renamed(name: str, table: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    found = re.search(r"(?<=\.)(0|[1-9]\d*)(?=\.)", stem)
    known = table.get(stem.replace(f".{found[0]}.", ".{}.", 1) if found else stem)
    return f"{known.format(found[0] if found else '')}.{kind}" if known else name


def with_layout(name: str, tensor: Tensor, described: Mapping[str, Any], *, of_gguf: bool) -> Tensor:
    """The Hugging Face tensor `name` with the layout that GGUF has for it, or the other way round.

    In `llama`, the rows of a query or key head are ordered as the pairs of channels that are rotated together.
    """
    if described["model_type"] == "gpt2":
        return tensor.t() if ".c_" in name and name.endswith(".weight") else tensor
    key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if key is None or described["model_type"] != "llama":
        return tensor
    split = (2, -1) if of_gguf else (-1, 2)
    return tensor.reshape(int(described[key]), *split, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def described_model(file: GgufFile) -> dict[str, Any]:
    """A config.json for the model in a GGUF file."""
    with malformed_as(ConfigError, f"the metadata of {file.path} is damaged", "download the file again"):
        architecture = file.metadata["general.architecture"]
        if architecture not in NAMES:
            known = ", ".join(NAMES)
            raise ConfigError(f"{file.path} has the architecture {architecture!r}, not supported", f"known: {known}")
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): _one(value) for key, value in file.metadata.items() if key.startswith(prefix)}
        for key, lacks in _NOT_COMPUTED.items():
            if own.get(key, 0) not in (0, 1):
                raise ConfigError(f"{file.path} has {architecture}.{key} = {own[key]}", f"this decoder has no {lacks}")
        fields = _gpt2_fields(own) if architecture == "gpt2" else _llama_fields(own, architecture, file)
        shared = {"vocab_size": file.tensors["token_embd.weight"].shape[0]}
        return {
            "model_type": architecture,
            **fields,
            **shared,
            "tie_word_embeddings": "output.weight" not in file.tensors,
        }


def _one(value: Any) -> Any:
    """Some files have a list with the same number for every layer."""
    alike = isinstance(value, np.ndarray) and value.size > 0 and (value == value[0]).all()
    return value[0].item() if alike else value


def _gpt2_fields(own: Mapping[str, Any]) -> dict[str, Any]:
    return {theirs: own[key] for theirs, key in _GPT2_KEYS.items()} | {"activation_function": "gelu_new"}


def _llama_fields(own: Mapping[str, Any], architecture: str, file: GgufFile) -> dict[str, Any]:
    heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length", own["embedding_length"] // heads)
    defaults = {"attention.head_count_kv": heads, "attention.key_length": head_dim, "rope.freq_base": 10000.0}
    fields = {theirs: (defaults | dict(own))[key] for theirs, key in _LLAMA_KEYS.items()}
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ConfigError(
                f"{file.path} has {key} = {own[key]}", f"this decoder computes {head_dim} only, its head size"
            )
    fields["rope_scaling"] = _rope_scaling(own, fields, file)
    if architecture == "llama":
        biases = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
        fields |= {key: name in file.tensors for key, name in biases.items()}
    return fields


def _rope_scaling(own: Mapping[str, Any], fields: Mapping[str, Any], file: GgufFile) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, fields)
    kind, factor = (
        own.get("rope.scaling.type", "linear"),
        own.get("rope.scaling.factor", own.get("rope.scale_linear", 0)),
    )
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn"} | {ours: own[key] for ours, key in _YARN_KEYS.items() if key in own}
    raise ConfigError(f"{file.path} scales rotary positions by {kind!r}", "known: linear, yarn, and Llama 3's factors")


def _llama3_scaling(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The settings whose factors the file has."""
    factors_f = file.read(ROPE_FACTORS).float().flatten()
    scaling = {"rope_type": "llama3", "factor": round(float(factors_f.max()), 4), **_LLAMA3}
    scaling |= {key: file.metadata[f"keepstep.{key}"] for key in _LLAMA3 if f"keepstep.{key}" in file.metadata}
    shape = ModelConfig(head_dim=2 * factors_f.numel(), rotary_base=fields["rope_theta"], rotary_scaling=scaling)
    if shape.head_dim != fields["head_dim"] or not torch.allclose(rope_factors(shape), factors_f, rtol=1e-4):
        hint = "import the model from its Hugging Face folder"
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} is not the scaling of Llama 3", hint)
    return scaling


def rope_factors(config: ModelConfig) -> Tensor:
    """What each frequency is divided by, from `rotary_scaling`."""
    device = torch.device("cpu")
    return rope_frequencies(replace(config, rotary_scaling=None), device) / rope_frequencies(config, device)


def model_metadata(described: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Metadata of a model that config.json describes: the inverse of `described_model`."""
    architecture = described["model_type"]
    if architecture not in NAMES or config.sliding_window:
        what = "a sliding window" if config.sliding_window else f"the family {architecture}"
        raise ConfigError(f"{what} cannot be exported as GGUF", "keepstep export RUN --hf OUT")
    if architecture == "gpt2" and described["activation_function"] != "gelu_new":
        hint = "train with model.activation=gelu_tanh, or keepstep export RUN --hf OUT"
        raise ConfigError("model.activation is gelu, but llama.cpp computes GPT-2 with gelu_tanh", hint)
    keys = _GPT2_KEYS if architecture == "gpt2" else _LLAMA_KEYS
    own = {key: described[theirs] for theirs, key in keys.items()} | {"vocab_size": described["vocab_size"]}
    if architecture != "gpt2":
        own |= dict.fromkeys(("attention.value_length", "rope.dimension_count"), described["head_dim"])
        own |= _rope_metadata(described.get("rope_scaling") or {})
    shared = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}
    if needs_rope_factors(config):
        scaling = described["rope_scaling"]
        shared |= {f"keepstep.{key}": scaling[key] for key in _LLAMA3}
    return shared


def needs_rope_factors(config: ModelConfig) -> bool:
    """Whether the file needs the tensor `ROPE_FACTORS`."""
    scaling = config.rotary_scaling or {}
    return bool(scaling.get("rope_type", scaling.get("type")) == "llama3")


def _rope_metadata(scaling: Mapping[str, Any]) -> dict[str, Any]:
    kind = scaling.get("rope_type")
    if kind == "linear":
        return {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind in ("dynamic", "longrope"):
        raise ConfigError(f"rope_type {kind} cannot be exported as GGUF", "keepstep export RUN --hf OUT")
    if kind != "yarn":
        return {}
    unknown = {key for key, value in scaling.items() if key not in (*_YARN_KEYS, "rope_type") and value is not None}
    if unknown - {"truncate"} or scaling.get("truncate") is False:
        raise ConfigError(
            f"YaRN with {', '.join(sorted(unknown))} cannot be exported as GGUF", "keepstep export RUN --hf OUT"
        )
    found = {key: scaling[ours] for ours, key in _YARN_KEYS.items() if scaling.get(ours) is not None}
    context = "rope.scaling.original_context_length"
    return {"rope.scaling.type": kind} | {
        key: int(value) if key == context else float(value) for key, value in found.items()
    }
