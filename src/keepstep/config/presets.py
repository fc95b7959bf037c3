"""Model presets as data. A new preset is one new line here.

If only `hidden` is overridden, heads, key-value heads and feed-forward width scale in the preset's proportions, so that
`model=mpt-125m model.hidden=64` is a valid small MPT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from keepstep.config.hf_config import is_model_file, read_model_file
from keepstep.config.schema import ExpertsConfig

Fields = Mapping[str, Any]

_MPT: Fields = {
    "vocab": 50368, "seq_len": 2048, "positions": "learned", "norm": "layernorm", "activation": "gelu",
    "bias": True, "tied": True, "init": "kaiming",
}  # fmt: skip
_GPT: Fields = {
    "vocab": 50257, "positions": "learned", "norm": "layernorm", "activation": "gelu_tanh", "bias": True, "tied": True,
    "init": "normal", "init_std": 0.006, "max_positions": 2048,
}  # fmt: skip
_LLAMA: Fields = {
    "vocab": 128256, "positions": "rotary", "rotary_base": 500000.0, "norm": "rmsnorm", "activation": "swiglu",
    "bias": False, "tied": False, "init": "normal", "seq_len": 8192,
}  # fmt: skip


def _mpt(layers: int, hidden: int, heads: int) -> Fields:
    return {**_MPT, "layers": layers, "hidden": hidden, "heads": heads}


def _gpt(layers: int, hidden: int, heads: int, seq_len: int, tensor: int) -> Fields:
    # Megatron pads the vocabulary to a multiple of 128 × tensor parallel degree, which is part of the published shapes.
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "seq_len": seq_len, "vocab_multiple": 128 * tensor}
    return {**_GPT, **shape}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn_hidden: int, **more: Any) -> Fields:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden}
    return {**_LLAMA, **shape, **more}


def _deepseek(layers: int, hidden: int, heads: int, ffn_hidden: int, mscale: float, **more: Any) -> Fields:
    scaling = {
        "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": mscale,
        "mscale_all_dim": mscale, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    latent = {"kv_lora_rank": 512, "head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 128}
    own = {"rotary_base": 10000.0, "rotary_scaling": scaling, "norm_eps": 1e-6, "seq_len": 4096}
    return _llama(layers, hidden, heads, 0, ffn_hidden, **latent, **own, **more)


PRESETS: Mapping[str, Fields] = {
    "mpt-tiny": _mpt(4, 16, 4),
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
    "gpt3-125m": _gpt(12, 768, 12, 1024, 1),
    "gpt3-375m": _gpt(12, 512, 8, 1024, 1),
    "gpt3-857m": _gpt(24, 1024, 16, 2048, 1),
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048, 1),
    "gpt3-13b": _gpt(40, 5120, 40, 2048, 2),
    "gpt3-30b": _gpt(48, 7168, 56, 2048, 4),
    "gpt3-175b": _gpt(96, 12288, 96, 2048, 8),
    "llama-1b": _llama(16, 2048, 32, 8, 8192, tied=True, seq_len=4096),
    "llama-3b": _llama(28, 3072, 24, 8, 8192, tied=True),
    "llama-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-405b": _llama(126, 16384, 128, 8, 53248),
    "smollm-135m": _llama(30, 576, 9, 3, 1536, vocab=49152, tied=True, seq_len=2048, rotary_base=10000.0),
    "olmoe-1b-7b": _llama(
        16, 2048, 16, 16, 1024, vocab=50304, seq_len=4096, rotary_base=10000.0, qk_norm=True, head_qk_norm=False,
        experts=ExpertsConfig(count=64, top_k=8, ffn_hidden=1024, normalize=False, aux_loss=0.01, z_loss=0.001),
    ),
    "qwen3-30b-a3b": _llama(
        48, 2048, 32, 4, 6144, head_dim=128, vocab=151936, seq_len=4096, rotary_base=1000000.0, norm_eps=1e-6,
        qk_norm=True, experts=ExpertsConfig(count=128, top_k=8, ffn_hidden=768, aux_loss=0.001),
    ),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14336, vocab=32000, seq_len=4096, rotary_base=1000000.0,
        experts=ExpertsConfig(count=8, top_k=2, ffn_hidden=14336, aux_loss=0.02),
    ),
    "gpt-oss-20b": _llama(
        24, 2880, 64, 8, 2880, head_dim=64, vocab=201088, seq_len=4096, rotary_base=150000.0, qkv_bias=True,
        out_bias=True, attention_sinks=True, sliding_window=128, layer_types=("sliding_attention", "full_attention"),
        rotary_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        experts=ExpertsConfig(
            count=32, top_k=4, ffn_hidden=2880, bias=True, swiglu_limit=7.0, aux_loss=0.001,
        ),
    ),
    "deepseek-v2-lite": _deepseek(
        27, 2048, 16, 10944, 0.707, vocab=102400,
        experts=ExpertsConfig(
            count=64, top_k=6, ffn_hidden=1408, normalize=False, shared_ffn_hidden=2816, first_dense_layers=1,
            aux_loss=0.001,
        ),
    ),
    "deepseek-v3": _deepseek(
        61, 7168, 128, 18432, 1.0, vocab=129280, q_lora_rank=1536,
        experts=ExpertsConfig(
            count=256, top_k=8, ffn_hidden=2048, scores="sigmoid", scale=2.5, shared_ffn_hidden=2048, groups=8,
            top_groups=4, first_dense_layers=3, balance_bias=True,
        ),
    ),
}  # fmt: skip

ALIASES: Mapping[str, str] = {"mpt-small-cpu": "mpt-tiny"}

MISNAMED = ("gpt3-375m", "gpt3-857m")
"""Published under these names, but they have 64.6M and 356M parameters."""


def preset_fields(name: str, given: Callable[[str, Any], Any] = lambda _, default: default) -> dict[str, Any]:
    """The preset's fields, scaled where `given` changes `hidden` but not the fields that depend on it.

    `custom` has no fields, the path of a config.json has those of the file. Raises KeyError for an unknown name.
    """
    if name == "custom":
        return {}
    fields = read_model_file(Path(name)) if is_model_file(name) else dict(PRESETS[ALIASES.get(name, name)])
    experts, layers = fields.get("experts") or ExpertsConfig(), given("layers", fields["layers"])
    if isinstance(layers, int) and 0 < layers <= experts.first_dense_layers and layers != fields["layers"]:
        # A model that is made shorter has experts too.
        experts = fields["experts"] = replace(experts, first_dense_layers=layers - 1)
    hidden, heads = fields["hidden"], fields["heads"]
    width = given("hidden", hidden)
    if not isinstance(width, int) or width < 1 or width == hidden:
        return fields
    head_dim = given("head_dim", 0) or max(1, hidden // heads)
    fields["heads"] = max(1, width // head_dim)
    if fields.get("kv_heads"):
        now = given("heads", fields["heads"])
        fields["kv_heads"] = gcd(now, max(1, now * fields["kv_heads"] // heads))
    if fields.get("ffn_hidden"):
        fields["ffn_hidden"] = max(1, width * fields["ffn_hidden"] // hidden)
    widths = {name: getattr(experts, name) for name in ("ffn_hidden", "shared_ffn_hidden")}
    scaled = {name: max(1, width * value // hidden) for name, value in widths.items() if value}
    return fields | ({"experts": replace(experts, **scaled)} if experts.count else {})
