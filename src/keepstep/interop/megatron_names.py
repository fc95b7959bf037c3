"""Arguments, names and layouts of megatron-core's GPT → ours: what `hf_config` and `hf_names` are for Hugging Face.

Its fused query-key-value weights already have our layout. Its gate and up rows are two halves; ours are in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from keepstep.config.hf_config import checked_field
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError, malformed_as
from keepstep.interop.hf_names import Rule, same, vocab_rows
from keepstep.models.mlp import gate_blocks, pack_gate_up, unpack_gate_up

_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0), "apply_layernorm_1p": (False,), "rotary_interleaved": (False,), "rotary_percent": (1,),
    "use_rope_scaling": (False,), "rope_scaling_type": (None,), "squared_relu": (False,), "window_size": (None,),
    "multi_latent_attention": (False,), "mtp_num_layers": (None, 0), "rotary_seq_len_interpolation_factor": (None, 1),
    "apply_residual_connection_post_layernorm": (False,), "qk_l2_norm": (False,),
}  # fmt: skip
"""The values of each argument that our decoder computes; with any other it would load and compute something else."""


def model_config_from_megatron(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` for the arguments that Megatron stores with its weights."""
    missing = [key for key in ("num_layers", "hidden_size", "num_attention_heads") if key not in arguments]
    if missing:
        raise ConfigError(
            f"this Megatron checkpoint does not say its {missing[0]}", "give the model's shape with --config RUN.yaml"
        )
    with malformed_as(ConfigError, "the arguments of this Megatron checkpoint are damaged", "copy it again"):
        fields = _fields(arguments)
    return {name: checked_field(name, value, "Megatron's arguments") for name, value in fields.items()}


def _fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    for key, allowed in _REFUSED.items():
        if key in arguments and arguments[key] not in allowed:
            message = f"this Megatron model has {key} = {arguments[key]!r}, which keepstep does not support"
            raise ConfigError(message, f"supported: {key} = {' or '.join(repr(value) for value in allowed)}")
    positions = arguments.get("position_embedding_type", "learned_absolute")
    if positions not in _POSITIONS:
        raise ConfigError(f"this Megatron model has {positions!r} positions", f"known: {', '.join(_POSITIONS)}")
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    head_size = arguments.get("kv_channels") or hidden // heads
    gated = bool(arguments.get("swiglu"))
    return {
        "layers": arguments["num_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": arguments["num_query_groups"] if arguments.get("group_query_attention") else 0,
        "head_dim": head_size if head_size * heads != hidden else 0,
        "ffn_hidden": arguments.get("ffn_hidden_size") or 4 * hidden,
        "vocab": arguments.get("vocab_size") or arguments["padded_vocab_size"],
        "seq_len": arguments.get("seq_length") or arguments["max_position_embeddings"],
        "max_positions": arguments.get("max_position_embeddings") or 0,
        "positions": _POSITIONS[positions],
        "rotary_base": float(arguments.get("rotary_base") or 10000.0),
        "norm": "rmsnorm" if arguments.get("normalization") == "RMSNorm" else "layernorm",
        "norm_eps": arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5,
        # Megatron's fused kernel, its default, computes GELU by tanh.
        "activation": "swiglu" if gated else "gelu_tanh" if arguments.get("bias_gelu_fusion", True) else "gelu",
        "bias": bool(arguments.get("add_bias_linear", True)),
        "qkv_bias": bool(arguments.get("add_qkv_bias", False)),
        "qk_norm": bool(arguments.get("qk_layernorm", False)),
        "tied": not arguments.get("untie_embeddings_and_output_weights", False),
    }


def plain_name(name: str) -> str:
    """The name without Transformer Engine, which stores a norm inside the linear that follows it."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def megatron_rules(config: ModelConfig) -> Iterator[Rule]:
    """One rule for each of our parameters, in the model's order; their names are as `plain_name` returns them."""
    kinds = ("weight", "bias") if config.bias else ("weight",)
    norm_kinds = kinds if config.norm == "layernorm" else ("weight",)
    yield _padded_vocab("embed.weight", "embedding.word_embeddings.weight", config)
    if config.positions == "learned":
        yield same("position.weight", "embedding.position_embeddings.weight")
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"decoder.layers.{layer}."
        for kind in norm_kinds:
            yield same(ours + f"attention_norm.{kind}", theirs + f"input_layernorm.{kind}")
        for kind in ("weight", "bias") if config.bias or config.qkv_bias else ("weight",):
            yield same(ours + f"attention.qkv.{kind}", theirs + f"self_attention.linear_qkv.{kind}")
        for kind in kinds:
            yield same(ours + f"attention.out.{kind}", theirs + f"self_attention.linear_proj.{kind}")
        if config.qk_norm:
            yield same(ours + "attention.query_norm.weight", theirs + "self_attention.q_layernorm.weight")
            yield same(ours + "attention.key_norm.weight", theirs + "self_attention.k_layernorm.weight")
        for kind in norm_kinds:
            yield same(ours + f"mlp_norm.{kind}", theirs + f"pre_mlp_layernorm.{kind}")
        for kind in kinds:
            if config.activation == "swiglu":
                yield _halves(ours + f"mlp.gate_up.{kind}", theirs + f"mlp.linear_fc1.{kind}", config)
            else:
                yield same(ours + f"mlp.up.{kind}", theirs + f"mlp.linear_fc1.{kind}")
            yield same(ours + f"mlp.down.{kind}", theirs + f"mlp.linear_fc2.{kind}")
    for kind in norm_kinds:
        yield same(f"norm.{kind}", f"decoder.final_layernorm.{kind}")
    if not config.tied:
        yield _padded_vocab("head.weight", "output_layer.weight", config)


def _padded_vocab(ours: str, theirs: str, config: ModelConfig) -> Rule:
    """Their tables are padded for the tensor-parallel degree; ours to `model.vocab_multiple`."""
    rule = vocab_rows(ours, theirs, config)
    return Rule(ours, (theirs,), lambda tensor: rule.pack(tensor[: config.vocab]), rule.unpack)


def _halves(ours: str, theirs: str, config: ModelConfig) -> Rule:
    blocks = gate_blocks(config)

    def pack(fused: Tensor) -> Tensor:
        gate, up = fused.chunk(2)
        return pack_gate_up(gate, up, blocks)

    return Rule(ours, (theirs,), pack, lambda packed: (torch.cat(unpack_gate_up(packed, blocks)),))
