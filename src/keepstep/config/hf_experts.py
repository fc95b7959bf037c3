"""`config.json` of families with experts ↔ `model.experts`. Never imports transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.config.schema import ExpertsConfig, ModelConfig
from keepstep.core.errors import ConfigError

SPARSE_STEPS = ("qwen2_moe", "qwen3_moe")
"""Families in which some layers may have an ordinary feed-forward block, of a width of its own."""
DEEPSEEK: tuple[Any, ...] = ("deepseek_v2", "deepseek_v3")
"""Families with latent attention."""
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
EXPERT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
    },
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
    "qwen2_moe": {
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "num_local_experts": 128, "num_experts_per_tok": 4, "norm_topk_prob": True, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek_v2": {
        **_LATENT, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **_LATENT, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "topk_method": "noaux_tc", "norm_topk_prob": True,
    },
}  # fmt: skip
"""Families with experts, and what a file without the key means in each."""


def from_experts(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Fields of `ModelConfig` that only these families have; `config` has the family's defaults."""
    if family not in EXPERT_DEFAULTS:
        return {}
    _refuse(config, "router_jitter_noise", 0.0)
    _refuse(config, "clip_qkv", None)
    _refuse(config, "use_sliding_window", False)
    if family in DEEPSEEK:
        return _from_deepseek(config, family)
    experts: dict[str, Any] = {
        # transformers 5 renames the key of some families when it saves.
        "count": config.get("num_local_experts") or config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn_hidden": config["moe_intermediate_size" if family in SPARSE_STEPS else "intermediate_size"],
        "normalize": config.get("norm_topk_prob", False),
    }
    if family in SPARSE_STEPS:
        experts |= _layers_with_experts(config)
    if family == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        experts |= {"shared_ffn_hidden": shared, "shared_gate": True}
    fields: dict[str, Any] = {"experts": experts}
    if family == "gpt_oss":
        _refuse(config, "swiglu_alpha", 1.702)
        experts |= {"bias": True, "swiglu_limit": config["swiglu_limit"]}
        biased = config["attention_bias"]
        fields |= {"attention_sinks": True, "qkv_bias": biased, "out_bias": biased}
    if family == "olmoe":
        fields["head_qk_norm"] = False
    if family == "qwen2_moe":
        fields["qkv_bias"] = config.get("qkv_bias", True)
    return fields


def _from_deepseek(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    v3 = family == "deepseek_v3"
    scores = "sigmoid" if v3 else "softmax"
    computed = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "rope_interleave": True}
    for key, value in {**computed, "scoring_func": scores}.items():
        _refuse(config, key, value)
    _refuse(config, "num_key_value_heads", config["num_attention_heads"])
    method = config["topk_method"]
    if v3 or method != "group_limited_greedy":
        _refuse(config, "topk_method", "noaux_tc" if v3 else "greedy")
    if not v3:
        # transformers never normalises the scores of this family.
        _refuse(config, "norm_topk_prob", False)
    experts: dict[str, Any] = {
        "count": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn_hidden": config["moe_intermediate_size"],
        "scores": scores,
        "normalize": config["norm_topk_prob"],
        "scale": config["routed_scaling_factor"],
        "shared_ffn_hidden": config["n_shared_experts"] * config["moe_intermediate_size"],
        "first_dense_layers": config["first_k_dense_replace"],
        "balance_bias": v3,
    }
    if method != "greedy":
        experts |= {"groups": config["n_group"], "top_groups": config["topk_group"]}
    latent = {name: config[name] or 0 for name in _LATENT if name != "qk_nope_head_dim"}
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {**latent, "head_dim": head_dim, "kv_heads": 0, "experts": experts}


def _refuse(config: Mapping[str, Any], key: str, computed: Any) -> None:
    if config.get(key) not in (computed, None):
        message = f"config.json has {key} = {config[key]!r}, which keepstep does not support with experts"
        raise ConfigError(message, f"supported: {computed!r}")


def _layers_with_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    step, ordinary = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    sparse = [layer not in ordinary and (layer + 1) % step == 0 for layer in layers]
    first = sparse.index(True) if True in sparse else len(sparse)
    for dense in (0, first):
        if sparse == [layer >= dense and (layer + 1) % step == 0 for layer in layers]:
            return {"first_dense_layers": dense, "layer_interval": step}
    raise ConfigError(
        f"config.json has mlp_only_layers = {ordinary!r}, which keepstep does not support",
        "supported: the first layers, or none",
    )


def experts_family(config: ModelConfig) -> Any:
    """The family that computes a model with experts."""
    if config.kv_lora_rank:
        return "deepseek_v3" if config.experts.scores == "sigmoid" else "deepseek_v2"
    if config.attention_sinks:
        return "gpt_oss"
    if config.experts.shared_ffn_hidden:
        return "qwen2_moe"
    if config.qk_norm:
        return "qwen3_moe" if config.head_qk_norm else "olmoe"
    return "mixtral"


def check_experts(config: ModelConfig, family: str) -> None:
    """Raise for experts that transformers does not compute in this family: the export would be misread."""
    experts = config.experts
    expected = _fixed_experts(config, family)
    for name, value in expected.items():
        if getattr(experts, name) != value:
            raise ConfigError(
                f"model.experts.{name} is {getattr(experts, name)}, which transformers does not compute for the family "
                f"{family}",
                "keepstep itself trains, evaluates and serves it: eval, chat",
            )
    if family == "olmoe" and config.heads * config.head_size != config.hidden:
        raise ConfigError(f"model.head_dim is {config.head_dim}, which olmoe does not have", "model.head_dim=0")


def _fixed_experts(config: ModelConfig, family: str) -> dict[str, Any]:
    """Fields of `experts` that a family has at one value only."""
    experts, plain = config.experts, ExpertsConfig()
    fixed = {"bias": family == "gpt_oss", "swiglu_limit": 0.0, "shared_gate": family == "qwen2_moe"}
    if family in DEEPSEEK:
        # Shared experts are as wide as the others.
        shared = max(1, experts.shared_ffn_hidden // config.expert_size) * config.expert_size
        fixed |= {"balance_bias": family == "deepseek_v3", "layer_interval": 1, "shared_ffn_hidden": shared}
        return fixed | ({"normalize": False} if family == "deepseek_v2" else {})
    fixed |= {name: getattr(plain, name) for name in ("scores", "scale", "groups", "balance_bias")}
    if family in ("mixtral", "gpt_oss"):
        fixed["normalize"] = True
    if family == "gpt_oss":
        fixed |= {"swiglu_limit": experts.swiglu_limit or 7.0, "shared_ffn_hidden": 0}
    if family not in SPARSE_STEPS:
        fixed |= {"first_dense_layers": 0, "layer_interval": 1}
    return fixed


def to_experts(config: ModelConfig, family: str) -> dict[str, Any]:
    """Keys of config.json that only these families have."""
    if family not in EXPERT_DEFAULTS:
        return {}
    experts = config.experts
    if family in DEEPSEEK:
        return _to_deepseek(config, family)
    keys: dict[str, Any] = {"num_experts_per_tok": experts.top_k, "norm_topk_prob": experts.normalize}
    keys["num_local_experts" if family in ("mixtral", "gpt_oss") else "num_experts"] = experts.count
    if family == "gpt_oss":
        keys |= {"swiglu_limit": experts.swiglu_limit, "attention_bias": config.qkv_bias}
    if family not in SPARSE_STEPS:
        return {**keys, "intermediate_size": config.expert_size}
    keys |= {
        "moe_intermediate_size": config.expert_size,
        "decoder_sparse_step": experts.layer_interval,
        "mlp_only_layers": list(range(min(experts.first_dense_layers, config.layers))),
        "use_sliding_window": False,
    }
    if family == "qwen2_moe":
        keys |= {"shared_expert_intermediate_size": experts.shared_ffn_hidden, "qkv_bias": config.qkv_bias}
    return keys


def _to_deepseek(config: ModelConfig, family: str) -> dict[str, Any]:
    experts = config.experts
    grouped = "noaux_tc" if family == "deepseek_v3" else "group_limited_greedy" if experts.groups > 1 else "greedy"
    return {
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": config.q_lora_rank or None,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "qk_nope_head_dim": config.head_size - config.qk_rope_head_dim,
        "v_head_dim": config.value_size,
        "head_dim": config.qk_rope_head_dim,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": config.expert_size,
        "n_shared_experts": experts.shared_ffn_hidden // config.expert_size,
        "first_k_dense_replace": min(experts.first_dense_layers, config.layers),
        "moe_layer_freq": 1,
        "routed_scaling_factor": experts.scale,
        "scoring_func": experts.scores,
        "norm_topk_prob": experts.normalize,
        "topk_method": grouped,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        **({"rope_interleave": True, "num_nextn_predict_layers": 0} if family == "deepseek_v3" else {}),
    }
