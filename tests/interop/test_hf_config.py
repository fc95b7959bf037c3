"""config.json files of real models give the shapes we know; what the decoder cannot compute is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from keepstep.config.check import check_shape
from keepstep.config.hf_config import hf_config_of, model_config_from_hf
from keepstep.config.presets import PRESETS
from keepstep.config.schema import ExpertsConfig, ModelConfig
from keepstep.core.errors import CheckpointError, ConfigError
from keepstep.interop.hf_names import export_parameters, import_parameters
from keepstep.models.size import parameter_count
from tests.models.model_variants import VARIANTS, build

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MPT_7B: dict[str, Any] = {
    "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2048,
    "vocab_size": 50432, "no_bias": True, "learned_pos_emb": True, "logit_scale": None,
    "norm_type": "low_precision_layernorm",
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False, "softmax_scale": None},
}  # fmt: skip
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_scaling": None, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 28,
}  # fmt: skip
QWEN2_05B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1000000.0,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "use_sliding_window": False,
    "sliding_window": 131072, "max_window_layers": 24,
}  # fmt: skip
PHI_4: dict[str, Any] = {
    "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352, "rope_theta": 250000,
    "rope_scaling": None, "max_position_embeddings": 16384, "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": False, "attention_bias": False,
    "hidden_act": "silu",
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    "max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window_pattern": 6,
}  # fmt: skip
OLMO2_7B: dict[str, Any] = {
    "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352, "max_position_embeddings": 4096,
    "rope_theta": 500000, "rms_norm_eps": 1e-06,
}  # fmt: skip

FALCON3_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 23040, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 131072, "rope_theta": 1000042,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
    "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip


def test_old_llama_config_gives_preset_and_scaling() -> None:
    config = ModelConfig(**model_config_from_hf(LLAMA_1B))
    assert parameter_count(config) == 1_235_814_400
    assert config.rotary_base == PRESETS["llama-1b"]["rotary_base"]
    assert config.rotary_scaling is not None
    assert config.rotary_scaling["factor"] == 32.0


@pytest.mark.parametrize(
    ("described", "count"),
    [
        (MPT_7B, 6_649_286_656),
        (QWEN3_06B, 596_049_920),
        (QWEN2_05B, 494_032_768),
        (PHI_4, 14_659_507_200),
        (GEMMA3_1B, 999_885_952),
        (OLMO2_7B, 7_298_617_344),
        (FALCON3_7B, 7_455_550_464),
    ],
    ids=["mpt-7b", "qwen3-0.6b", "qwen2-0.5b", "phi-4", "gemma-3-1b", "olmo-2-7b", "falcon3-7b"],
)
def test_released_models_have_their_known_number_of_parameters(described: dict[str, Any], count: int) -> None:
    assert parameter_count(ModelConfig(**model_config_from_hf(described))) == count


def test_sliding_window_switched_off_is_off() -> None:
    assert model_config_from_hf(QWEN2_05B)["sliding_window"] == 0
    mistral = {**LLAMA_1B, "model_type": "mistral", "sliding_window": 4096}
    assert model_config_from_hf(mistral)["sliding_window"] == 4096
    assert model_config_from_hf({**mistral, "sliding_window": None})["sliding_window"] == 0


def test_sliding_window_defaults_to_the_familys() -> None:
    unsaid = {**LLAMA_1B, "model_type": "mistral"}
    assert model_config_from_hf(unsaid)["sliding_window"] == 4096
    assert model_config_from_hf(LLAMA_1B)["sliding_window"] == 0
    qwen = {key: value for key, value in QWEN2_05B.items() if key not in ("sliding_window", "max_window_layers")}
    assert model_config_from_hf({**qwen, "use_sliding_window": True, "max_window_layers": 0})["sliding_window"] == 4096
    assert model_config_from_hf({**qwen, "use_sliding_window": True})["sliding_window"] == 0


def test_layers_of_two_kinds_are_the_familys_or_the_files() -> None:
    qwen = model_config_from_hf({**QWEN2_05B, "use_sliding_window": True, "max_window_layers": 12})
    assert qwen["layer_types"] == ("full_attention",) * 12 + ("sliding_attention",) * 12
    gemma = {**LLAMA_1B, "model_type": "gemma3_text", "rope_scaling": None, "rope_theta": 1e6, "sliding_window": 512}
    fields = model_config_from_hf(gemma)
    assert fields["layer_types"] == ("sliding_attention",) * 5 + ("full_attention",)
    assert (fields["rotary_base"], fields["rotary_local_base"]) == (1e6, 10000.0)
    assert model_config_from_hf({**gemma, "rope_local_base_freq": 5e3})["rotary_local_base"] == 5e3
    full = model_config_from_hf({**gemma, "layer_types": ["full_attention"] * 16})
    assert full["sliding_window"] == full.get("rotary_local_base", 0) == 0
    smol = model_config_from_hf({**LLAMA_1B, "model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0] * 4})
    assert smol["no_rope_layer_interval"] == 4


def test_export_refuses_what_the_family_does_not_compute() -> None:
    gemma = ModelConfig(**model_config_from_hf({**LLAMA_1B, "model_type": "gemma2", "rope_scaling": None}))
    assert hf_config_of(gemma, "float32")["model_type"] == "gemma2"
    olmo = ModelConfig(**model_config_from_hf({**LLAMA_1B, "model_type": "olmo2"}))
    llama = ModelConfig(**model_config_from_hf(LLAMA_1B))
    for config, named in (
        (replace(gemma, embedding_multiplier=2.0), "embedding_multiplier is 2.0.*family gemma2"),
        (replace(gemma, attention_multiplier=0.3), "attention_multiplier"),
        (replace(gemma, norm="rmsnorm"), "norm is rmsnorm"),
        (replace(gemma, no_rope_layer_interval=2), "no_rope_layer_interval"),
        (replace(olmo, head_qk_norm=True), "head_qk_norm"),
        (replace(olmo, residual_multiplier=0.5), "residual_multiplier"),
        (replace(llama, norm="rmsnorm_1p"), "norm is rmsnorm_1p"),
        (replace(llama, final_logit_softcapping=30.0), "final_logit_softcapping"),
        (replace(llama, no_rope_layer_interval=4, residual_multiplier=0.5), "no_rope_layer_interval"),
        (replace(llama, family="phi3"), "rotary_scaling"),
    ):
        with pytest.raises(ConfigError, match=named):
            hf_config_of(config, "float32")


def test_published_deepseek_configs_are_the_presets() -> None:
    for name, published in (("deepseek-v3", DEEPSEEK_V3), ("deepseek-v2-lite", DEEPSEEK_V2_LITE)):
        preset = ModelConfig(**PRESETS[name])
        preset = replace(preset, experts=replace(preset.experts, aux_loss=0.0))
        read = ModelConfig(**model_config_from_hf(published))
        assert read.rotary_scaling == {**(preset.rotary_scaling or {}), "type": "yarn"}
        for described in (published, hf_config_of(preset, "bfloat16"), hf_config_of(read, "bfloat16")):
            read = ModelConfig(**model_config_from_hf(described))
            assert replace(read, seq_len=4096, rotary_scaling=preset.rotary_scaling) == preset
    for change, named in (
        ({"shared_ffn_hidden": 100}, "shared_ffn_hidden is 100"),
        ({"balance_bias": True}, "balance_bias is True.*deepseek_v2"),
        ({"normalize": True}, "normalize"),
    ):
        with pytest.raises(ConfigError, match=named):
            hf_config_of(replace(preset, experts=replace(preset.experts, **change)), "float32")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_lora_rank is 512"):
        hf_config_of(replace(preset, experts=ExpertsConfig()), "float32")


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_published_phi3_with_long_texts_has_its_factors(kind: str) -> None:
    factors = {"type": kind, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    phi3 = {**PHI_4, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    config = ModelConfig(**model_config_from_hf({**phi3, "rope_scaling": factors}))
    kept = {key: value for key, value in factors.items() if key != "type"}
    sizes = {"original_max_position_embeddings": 4096, "factor": 32.0}
    assert config.rotary_scaling == {"rope_type": "longrope", **kept, **sizes}
    check_shape(config)
    described = hf_config_of(config, "float32")
    assert (described["original_max_position_embeddings"], described["max_position_embeddings"]) == (4096, 131072)
    assert replace(ModelConfig(**model_config_from_hf(described)), head_dim=0) == config
    with pytest.raises(ConfigError, match="needs long_factor for rope_type longrope, 64 numbers"):
        check_shape(replace(config, rotary_scaling={**(config.rotary_scaling or {}), "long_factor": [1.0] * 63}))


def test_export_of_experts_with_sinks_is_gpt_oss_or_refused() -> None:
    preset = ModelConfig(**PRESETS["gpt-oss-20b"])
    described = hf_config_of(preset, "bfloat16")
    assert ModelConfig(**model_config_from_hf(described)) == replace(
        preset, experts=replace(preset.experts, aux_loss=0.0)
    )
    for config, named in (
        (replace(preset, out_bias=False), "out_bias"),
        (replace(preset, attention_sinks=False), "experts.bias is True.*mixtral"),
        (replace(preset, experts=replace(preset.experts, swiglu_limit=0.0)), "swiglu_limit"),
        (replace(preset, experts=replace(preset.experts, bias=False)), "experts.bias"),
        (replace(preset, experts=replace(preset.experts, count=0), out_bias=False), "attention_sinks"),
    ):
        with pytest.raises(ConfigError, match=named):
            hf_config_of(config, "float32")


def test_vocabulary_below_the_weights_is_refused() -> None:
    config = VARIANTS["grouped rotary"]
    tensors = dict(export_parameters(build(config).state_dict(), config, "llama"))
    with pytest.raises(CheckpointError, match=r"rows, more than model\.vocab \(5\)"):
        dict(import_parameters(tensors, replace(config, vocab=5, vocab_multiple=1), "llama"))


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ({**LLAMA_1B, "model_type": "deepseek_v3"}, "num_key_value_heads = 8"),
        ({**DEEPSEEK_V3, "rope_interleave": False}, "rope_interleave = False"),
        ({**DEEPSEEK_V3, "topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({**DEEPSEEK_V3, "attention_bias": True, "mlp_bias": True}, "attention_bias = True"),
        ({**DEEPSEEK_V3, "model_type": "deepseek_v2"}, "scoring_func = 'sigmoid'"),
        ({**LLAMA_1B, "model_type": "deepseek_v32"}, "this decoder has no sparse attention"),
        ({**LLAMA_1B, "model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ({**LLAMA_1B, "model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({**LLAMA_1B, "model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ({**LLAMA_1B, "model_type": "qwen3_moe", "mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]"),
        ({**LLAMA_1B, "model_type": "qwen3_moe", "use_sliding_window": True}, "use_sliding_window = True"),
        ({**LLAMA_1B, "hidden_act": "gelu"}, "hidden_act"),
        ({**LLAMA_1B, "attention_bias": True}, "attention_bias"),
        ({**LLAMA_1B, "rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "rope_type 'axial'"),
        ({**LLAMA_1B, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({**LLAMA_1B, "model_type": "phi3"}, "rope_type 'llama3'"),
        ({**LLAMA_1B, "model_type": "gemma3"}, "this decoder has no images"),
        ({**LLAMA_1B, "model_type": "phi"}, "this decoder has no parallel attention"),
        ({**LLAMA_1B, "model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**LLAMA_1B, "model_type": "gemma2", "hidden_activation": "relu"}, "hidden_activation"),
        ({**LLAMA_1B, "model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({**LLAMA_1B, "model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types with 1 entries"),
        ({**LLAMA_1B, "model_type": "gemma2", "layer_types": ["chunked_attention"] * 16}, "'chunked_attention'"),
        ({**LLAMA_1B, "model_type": "smollm3", "no_rope_layers": [1, 0] + [1] * 14}, "not every n-th"),
        ({**LLAMA_1B, "model_type": "olmo2", "attention_bias": True}, "attention_bias"),
        ({**MPT_7B, "logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ({**MPT_7B, "attn_config": {"qk_ln": True}}, "qk_ln"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hf_config_refuses_what_our_decoder_does_not_compute(described: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_config_from_hf(described)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 99999999999999999999},
        {"hidden_size": -64},
        {"num_attention_heads": 0},
        {"vocab_size": True},
        {"vocab_size": "many"},
        {"intermediate_size": 1e300},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": [1]},
        {"rope_parameters": "x"},
        {"rope_scaling": 3},
        {"tie_word_embeddings": "perhaps"},
        {"sliding_window": "wide", "model_type": "mistral"},
        {"layer_types": 5, "model_type": "mistral"},
        {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 0}},
        {"qk_rope_head_dim": "wide", "num_key_value_heads": 32, "model_type": "deepseek_v3"},
        {"swiglu_limit": [7], "model_type": "gpt_oss"},
    ],
    ids=str,
)
def test_hf_config_with_a_damaged_value_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_config_from_hf({**LLAMA_1B, **change})


def test_missing_and_left_over_tensors_are_errors() -> None:
    config = VARIANTS["grouped rotary"]
    tensors = dict(export_parameters(build(config).state_dict(), config, "llama"))
    with pytest.raises(CheckpointError, match=r"1 tensors have no place.*experts"):
        dict(import_parameters({**tensors, "model.layers.0.experts.weight": torch.zeros(1)}, config, "llama"))
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        dict(import_parameters(tensors, config, "llama"))


def test_import_without_prefix_and_with_derived_tensors() -> None:
    config = VARIANTS["learned"]
    state = build(config).state_dict()
    exported = export_parameters(state, config, "gpt2")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in exported}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    loaded = dict(import_parameters(tensors, config, "gpt2"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
