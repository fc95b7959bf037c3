"""The decoder computes what the reference implementations compute, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from keepstep.config.hf_config import hf_family, model_config_from_hf
from keepstep.config.schema import ModelConfig
from keepstep.interop.hf_names import export_parameters, import_parameters
from keepstep.models.moe import router_biases
from keepstep.models.transformer import Transformer
from tests.models.model_variants import random_tokens

transformers = pytest.importorskip("transformers")

LLAMA3_SCALING = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN_SCALING = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 4.0, "beta_slow": 0.5,
}  # fmt: skip
SHAPE = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
PHI3 = {**SHAPE, "pad_token_id": None}
WINDOW = {**PHI3, "sliding_window": 5}
OLMO3_YARN = {key: value for key, value in YARN_SCALING.items() if key != "rope_theta"}
GRANITE = {
    **SHAPE, "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.21,
    "logits_scaling": 3.0,
}  # fmt: skip
GEMMA = {**PHI3, "head_dim": 16}
GEMMA2 = {**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}
MPT = {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 32, "vocab_size": 61}

MIXTURE = {**PHI3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 8}
DEEPSEEK = {
    **PHI3, "num_key_value_heads": None, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 18, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "rope_parameters": {**YARN_SCALING, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
LONGROPE = {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.75}
LONG_FACTORS = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.5, 4.0, 9.0],
}  # fmt: skip

REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 32, "vocab_size": 61}),
    "mpt with alibi": ("Mpt", MPT),
    "mpt with clipped qkv": ("Mpt", {**MPT, "attn_config": {"clip_qkv": 0.5}}),
    "llama": ("Llama", SHAPE),
    "llama with biases": ("Llama", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("Llama", {**SHAPE, "tie_word_embeddings": True}),
    "llama with llama3 scaling": ("Llama", {**SHAPE, "rope_parameters": LLAMA3_SCALING}),
    "llama with linear scaling": ("Llama", {**SHAPE, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2 with yarn": ("Qwen2", {**SHAPE, "rope_parameters": YARN_SCALING}),
    "llama with exact yarn": (
        "Llama",
        {**SHAPE, "rope_parameters": {**YARN_SCALING, "truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7}},
    ),
    "qwen2": ("Qwen2", SHAPE),
    "qwen3": ("Qwen3", {**SHAPE, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**SHAPE, "sliding_window": 6}),
    "phi3": ("Phi3", PHI3),
    "phi3 with window": ("Phi3", {**PHI3, "sliding_window": 5, "tie_word_embeddings": True}),
    "phi3 with partial rotary": ("Phi3", {**PHI3, "rope_parameters": {"partial_rotary_factor": 0.75}}),
    "olmo2": ("Olmo2", PHI3),
    "olmo3": ("Olmo3", {**WINDOW, "num_hidden_layers": 5, "rope_scaling": OLMO3_YARN}),
    "granite": ("Granite", GRANITE),
    "granite tied with biases": (
        "Granite",
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("SmolLM3", {**PHI3, "num_hidden_layers": 5}),
    "smollm3 with window": (
        "SmolLM3",
        {**WINDOW, "num_hidden_layers": 5, "use_sliding_window": True, "no_rope_layer_interval": 2},
    ),
    "gemma": ("Gemma", GEMMA),
    "gemma2": ("Gemma2", {**GEMMA2, "final_logit_softcapping": 1.5}),
    "gemma2 untied without caps": (
        "Gemma2",
        {**GEMMA2, "tie_word_embeddings": False, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3Text",
        {**GEMMA, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 12},
    ),
    "gemma3 with linear scaling": (
        "Gemma3Text",
        {
            **GEMMA,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "qwen2 with two kinds of layers": ("Qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3 with two kinds of layers": (
        "Qwen3",
        {
            **WINDOW,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", {**PHI3, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral with window": ("Mixtral", {**WINDOW, "num_local_experts": 3, "num_experts_per_tok": 3}),
    "olmoe": ("Olmoe", {**PHI3, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe normalized": ("Olmoe", {**PHI3, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen2 moe": ("Qwen2Moe", {**MIXTURE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}),
    "qwen3 moe": ("Qwen3Moe", {**MIXTURE, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "gpt-oss with mxfp4 sizes": ("GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32}),
    "gpt-oss clipped without biases": (
        "GptOss",
        {**GPT_OSS, "attention_bias": False, "swiglu_limit": 0.3, "rope_parameters": YARN_SCALING},
    ),
    # The texts of these tests, of 20 tokens, are longer than 16.
    "phi3 with longrope": ("Phi3", {**PHI3, **LONGROPE, "rope_parameters": LONG_FACTORS}),
    "phi3 with longrope and short texts": (
        "Phi3",
        {**PHI3, "original_max_position_embeddings": 24, "rope_parameters": {**LONG_FACTORS, "factor": 4.0}},
    ),
    "llama with dynamic scaling": (
        "Llama",
        {**SHAPE, "max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 3.0}},
    ),
    "falcon3": ("Llama", {**SHAPE, "head_dim": 16, "rope_theta": 1000042.0}),
    "deepseek v2 lite": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek v2": (
        "DeepseekV2",
        {**DEEPSEEK, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek v3": ("DeepseekV3", {**DEEPSEEK, "num_experts_per_tok": 3}),
    "deepseek v3 without yarn": (
        "DeepseekV3",
        {**DEEPSEEK, "num_experts_per_tok": 2, "rope_parameters": None, "v_head_dim": 12, "norm_topk_prob": False},
    ),
}


def reference(name: str) -> Any:
    """A random reference model in which no weight is at a value that hides mistakes (biases 0, norms 1)."""
    family, values = REFERENCES[name]
    values = {"attn_implementation": "eager", "bos_token_id": None, "eos_token_id": None, **values}
    if family == "GPT2":
        values.update(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = getattr(transformers, f"{family}Config")(**values)
    name = family.removesuffix("Text")
    model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data.copy_(noise if parameter.dim() > 1 else noise + 0.7)
    for bias in balance_biases(model).values():
        bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
    return model.eval()


def balance_biases(model: Any) -> dict[str, torch.Tensor]:
    """The biases of DeepSeek-V3's routers, which are no parameters there either."""
    return {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}


def imported(model: Any, **changes: Any) -> tuple[Transformer, ModelConfig, Any]:
    described = model.config.to_dict()
    config = ModelConfig(**{**model_config_from_hf(described), **changes})
    family = hf_family(described)
    ours = Transformer(config)
    ours.load_state_dict(dict(import_parameters(by_expert(model.state_dict(), family), config, family)))
    return ours, config, family


def by_expert(tensors: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Their tensors as their files have them: transformers stacks those of all experts when it reads a file."""
    if family == "gpt_oss":
        return dict(tensors)
    separate: dict[str, torch.Tensor] = {}
    w = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if family == "mixtral" else {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".experts.")
        stem = stem.replace(".mlp", ".block_sparse_moe") if w else stem
        if not stem:
            separate[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if w else name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for number, expert in enumerate(tensor):
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                separate[f"{stem}.experts.{number}.{w.get(kind, kind)}.weight"] = part
    return separate


@pytest.mark.parametrize("name", list(REFERENCES))
@pytest.mark.slow
def test_logits_and_gradients_equal_the_reference(name: str) -> None:
    theirs = reference(name)
    ours, config, family = imported(theirs)
    tokens_bt = random_tokens(config, 2, 20)
    targets_bt = random_tokens(config, 2, 20, seed=2)
    logits = theirs(tokens_bt).logits
    torch.testing.assert_close(ours(tokens_bt), logits, atol=1e-5, rtol=1e-5)

    loss = F.cross_entropy(logits.flatten(0, 1), targets_bt.flatten(), reduction="sum")
    our_loss = ours(tokens_bt, targets_bt)
    torch.testing.assert_close(our_loss, loss, atol=1e-4, rtol=1e-6)
    (loss / 40).backward()
    (our_loss / 40).backward()
    own = {**{key: value.grad for key, value in ours.named_parameters()}, **router_biases(ours)}
    gradients = dict(export_parameters(own, config, family))
    their_gradients = {key: value.grad for key, value in theirs.named_parameters()}
    expected = by_expert({**their_gradients, **balance_biases(theirs)}, family)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        scale = expected[key].abs().max().item()
        torch.testing.assert_close(gradient, expected[key], atol=2e-6 * max(scale, 1.0), rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", list(REFERENCES))
def test_weights_survive_import_and_export_bit_by_bit(name: str) -> None:
    theirs = reference(name)
    ours, config, family = imported(theirs, vocab_multiple=16)
    exported = dict(export_parameters(ours.state_dict(), config, family))
    expected = by_expert({**dict(theirs.named_parameters()), **balance_biases(theirs)}, family)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in exported.items())


def test_padding_the_vocabulary_changes_no_logit() -> None:
    theirs = reference("llama")
    padded, config, _ = imported(theirs, vocab_multiple=64)
    tokens_bt = random_tokens(config, 2, 9)
    logits_btv = padded(tokens_bt)
    assert logits_btv.shape[-1] == 64
    torch.testing.assert_close(logits_btv[..., :61], theirs(tokens_bt).logits, atol=1e-5, rtol=1e-5)
    assert (logits_btv[..., 61:] < -1e30).all()
