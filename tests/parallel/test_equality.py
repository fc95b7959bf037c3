"""Every layout trains the same: loss and gradient norm of ten steps equal those of one process.

One world of processes for each size runs all of its cases, because starting processes costs more than a case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.worlds import run_world

TOLERANCE = 1e-4

YARN = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 16, mscale_all_dim: 1.0}"

MODELS: dict[str, list[str]] = {
    "mpt": ["model=mpt-125m"],
    "alibi": ["model=mpt-125m", "model.positions=alibi", "model.sliding_window=20"],
    "gpt": ["model=gpt3-125m"],
    "llama": ["model=llama-1b", "model.kv_heads=2", "model.tied=false"],
    "window": ["model=llama-1b", "model.kv_heads=2", "model.tied=false", "model.sliding_window=6"],
    "long": ["model=llama-1b", "model.kv_heads=2", "model.seq_len=1024", "model.sliding_window=150"],
    "partial": ["model=llama-1b", "model.kv_heads=2", "model.partial_rotary_factor=0.5"],
    "granite": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.tied=false",
        "model.embedding_multiplier=3",
        "model.logits_scaling=2",
        "model.residual_multiplier=0.5",
        "model.attention_multiplier=0.2",
        "model.no_rope_layer_interval=2",
    ],
    "kinds": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.tied=true",
        "model.norm=rmsnorm_1p",
        "model.norm_placement=both",
        "model.activation=geglu_tanh",
        "model.qk_norm=true",
        "model.sliding_window=6",
        "model.rotary_local_base=50",
        "model.layer_types=[sliding_attention, full_attention]",
    ],
    "olmo": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.norm_placement=after",
        "model.qk_norm=true",
        "model.head_qk_norm=false",
    ],
    "capped": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.attn_logit_softcapping=0.5",
        "model.final_logit_softcapping=2",
    ],
    "sinks": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.attention_sinks=true",
        "model.qkv_bias=true",
        "model.out_bias=true",
        "model.sliding_window=6",
        "model.layer_types=[sliding_attention, full_attention]",
    ],
    "latent": [
        "model=llama-1b",
        "model.head_dim=12",
        "model.kv_heads=0",
        "model.kv_lora_rank=8",
        "model.q_lora_rank=12",
        "model.qk_rope_head_dim=4",
        "model.v_head_dim=8",
        "model.experts.count=4",
        "model.experts.shared_ffn_hidden=8",
        "model.experts.first_dense_layers=1",
        f"model.rotary_scaling={YARN}",
    ],
    "plain latent": [
        "model=llama-1b",
        "model.head_dim=12",
        "model.kv_heads=0",
        "model.kv_lora_rank=8",
        "model.qk_rope_head_dim=4",
        "lora.rank=4",
        "lora.dropout=0",
        "lora.targets=[q, o]",
    ],
    "muon": ["model=llama-1b", "model.kv_heads=2", "model.tied=true", "model.qk_norm=true", "optimizer=muon"],
    "experts": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.experts.count=3",
        "model.experts.ffn_hidden=16",
        "model.experts.balance_bias=true",
        "model.experts.bias_update_rate=0.05",
        "model.experts.shared_ffn_hidden=8",
    ],
    "balanced": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.experts.count=4",
        "model.experts.aux_loss=1",
        "model.experts.z_loss=0.01",
    ],
    "expert muon": ["model=llama-1b", "model.experts.count=4", "model.experts.aux_loss=0.1", "optimizer=muon"],
    "shared": [
        "model=llama-1b",
        "model.kv_heads=2",
        "model.experts.count=4",
        "model.experts.ffn_hidden=16",
        "model.experts.balance_bias=true",
        "model.experts.bias_update_rate=0.05",
        "model.experts.shared_ffn_hidden=8",
        "model.experts.shared_gate=true",
    ],
    "deep mpt": ["model=mpt-125m", "model.layers=4"],
    "deepest mpt": ["model=mpt-125m", "model.layers=8"],
    "deep llama": ["model=llama-1b", "model.layers=5", "model.kv_heads=2", "model.tied=false"],
    "lora": ["model=llama-1b", "model.kv_heads=2", "lora.rank=4", "lora.dropout=0"],
    "lora gpt": ["model=gpt3-125m", "lora.rank=4", "lora.dropout=0", "lora.targets=[q, v, o, up, down]"],
    "deep lora": ["model=llama-1b", "model.layers=5", "model.kv_heads=2", "lora.rank=4", "lora.dropout=0"],
}
"""Tied and untied heads, biases, grouped-query attention, every kind of position, both optimizers, adapters."""

TINY = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.seq_len=32", "model.max_positions=0",
    "model.vocab=90", "model.vocab_multiple=8", "global_batch=4", "microbatch=2",
    "optimizer.lr=0.002", "precision=fp32", "compute.device=cpu",
]  # fmt: skip
"""90 tokens in 96 rows: a padded vocabulary, cut between processes."""

PACKED = ("alibi+packed", "llama+packed", "window+packed", "kinds+packed")
"""Models whose rows hold several documents."""

NEWER = ("partial", "granite", "kinds", "kinds+packed")
"""Features of later families."""

WHOLE_HEADS = ("sinks", "latent", "plain latent")
"""Attention of gpt-oss and DeepSeek."""

EVERY_MODEL = ("mpt", "alibi", "gpt", "llama")

LAYOUTS: dict[int, dict[str, tuple[str, tuple[str, ...]]]] = {
    2: {
        "dp2": ("shard=2 microbatch=1", EVERY_MODEL),
        "pp2": ("pipeline=2", (*EVERY_MODEL, "llama+packed")),
        "cp2": ("context=2", (*EVERY_MODEL, *PACKED[:3])),
        "tp2": ("tensor=2", ("gpt", "llama+packed", "lora", "lora gpt", *NEWER, *WHOLE_HEADS, "olmo", "capped")),
        "pp2 newer": ("pipeline=2", (*NEWER, "olmo", "capped")),
        "cp2 newer": ("context=2", (*NEWER, *WHOLE_HEADS, "olmo", "capped")),
        "dp2 newer": ("shard=2 microbatch=1", ("kinds", "olmo", "capped")),
        "dp2 newer bounds": ("shard=2 microbatch=1", ("granite", "kinds+packed", "olmo")),
        "tp2 bounds": ("tensor=2", ("llama+packed", "window+packed")),
        "dp2 bounds": ("shard=2 microbatch=1", ("llama+packed", "window")),
        "ddp2": ("replicate=-1 shard=1", ("mpt", "experts")),
        # The routers' losses are means over a micro batch, so these have the same micro batches as one process.
        "dp2 experts": ("shard=2", ("experts", "balanced", "expert muon")),
        "dp2 experts recomputed": ("shard=2 compute.recompute=full", ("experts", "balanced")),
        "ep2": ("shard=2 expert=2", ("balanced", "expert muon")),
        "ep2 recomputed": ("shard=2 expert=2 compute.recompute=full", ("shared",)),
        "cp2 ep2": ("context=2 expert=2", ("balanced",)),
        "tp2 experts": ("tensor=2", ("balanced",)),
        "pp2 experts": ("pipeline=2", ("balanced",)),
        "dp2 muon": ("shard=2", ("muon",)),
        "ddp2 muon": ("replicate=-1 shard=1", ("muon",)),
        "dp2 muon offload": ("shard=2 offload=true", ("muon",)),
        "dp2 kept": ("shard=2 microbatch=1 keep_gathered=true", ("gpt",)),
        "dp2 offload": ("shard=2 offload=true", ("gpt",)),
        "pp2 interleaved": ("pipeline=2 schedule=interleaved", ("deep mpt", "deep llama", "deep lora")),
        "pp2 zero-bubble": ("pipeline=2 schedule=zero_bubble", ("gpt", "llama", "capped")),
        "cp2 recomputed": ("context=2 compute.recompute=selective", ("llama",)),
        "dp2 chunked": ("shard=2 microbatch=1 compute.recompute=full compute.mlp_chunk_tokens=12", ("llama",)),
        "tp2 chunked": ("tensor=2 compute.mlp_chunk_tokens=24", ("gpt", "lora")),
        "pp2 chunked": ("pipeline=2 schedule=interleaved compute.mlp_chunk_tokens=24", ("deep mpt",)),
    },
    4: {
        "dp2 tp2": ("shard=2 tensor=2", (*EVERY_MODEL, "muon")),
        "pp2 tp2": ("pipeline=2 tensor=2", (*EVERY_MODEL, "muon")),
        "hsdp 2x2": ("replicate=2 shard=2 microbatch=1", (*EVERY_MODEL, "experts", "muon")),
        "dp4 experts": ("shard=4 microbatch=1", ("experts",)),
        "ep4": ("shard=4 expert=4 microbatch=1", ("shared",)),
        "hsdp 2x2 ep2": ("replicate=2 shard=2 expert=2 microbatch=1", ("shared",)),
        "ep2 tp2": ("shard=2 expert=2 tensor=2", ("balanced",)),
        "cp2 tp2": ("context=2 tensor=2", ("alibi+packed",)),
        "hsdp 2x1 cp2": ("replicate=2 shard=1 context=2", ("llama",)),
        "pp2 cp2 interleaved": ("pipeline=2 context=2 schedule=interleaved", ("deep mpt",)),
        "cp4": ("context=4", ("llama+packed", "long")),
        "pp4": ("pipeline=4 microbatch=1", ("deep mpt",)),
        "dp2 pp2 by four": ("shard=2 pipeline=2 schedule=interleaved stages=4 microbatch=1", ("deepest mpt",)),
        "dp2 pp2 zero-bubble by four": (
            "shard=2 pipeline=2 schedule=zero_bubble stages=4 microbatch=1",
            ("deepest mpt",),
        ),
        "pp2 tp2 zero-bubble": ("pipeline=2 tensor=2 schedule=zero_bubble compute.recompute=full", ("gpt",)),
    },
    8: {
        "dp2 pp2 tp2": ("shard=2 pipeline=2 tensor=2 microbatch=1", EVERY_MODEL),
        "hsdp 2x2 tp2": ("replicate=2 shard=2 tensor=2 microbatch=1", ("llama",)),
        "cp2 pp2 tp2": ("context=2 pipeline=2 tensor=2", ("llama+packed",)),
    },
}


def case(layout: str, settings: str, model: str) -> dict[str, Any]:
    words = [word if word.startswith(("compute.", "microbatch")) else f"parallel.{word}" for word in settings.split()]
    name, _, packed = model.partition("+")
    told = {"packed": bool(packed), "use_varlen": layout.endswith("bounds")}
    return {"name": f"{layout}: {model}", "words": [*TINY, *MODELS[name], *words], **told}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [case("alone", "shard=1", model) for model in (*MODELS, *PACKED)]
    return run_world(1, cases, tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", LAYOUTS)
def test_every_layout_trains_like_one_process(processes: int, alone: dict[str, Any], tmp_path: Path) -> None:
    cases = [
        case(layout, settings, model) for layout, (settings, models) in LAYOUTS[processes].items() for model in models
    ]
    results = run_world(processes, cases, tmp_path)
    wrong = []
    for name, result in results.items():
        expected = alone[f"alone: {name.partition(': ')[2]}"]
        pairs = [
            pair
            for ours, theirs in zip(result["numbers"], expected["numbers"], strict=True)
            for pair in zip(ours, theirs, strict=True)
        ]
        pairs.append((result["valid"], expected["valid"]))
        off = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        if off > TOLERANCE or result["targets"] != expected["targets"]:
            wrong.append(f"{name}: off by {off:.1e}; {result['numbers'][0]} for {expected['numbers'][0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_noise_of_training_is_that_of_one_process_and_stays_out_of_evaluation(tmp_path: Path) -> None:
    layouts = {"tp2": "tensor=2", "cp2": "context=2", "pp2": "pipeline=2", "pp2x2": "pipeline=2 schedule=interleaved"}
    kinds = {"plain": "model.dropout=0", "dropout": "model.dropout=0.5", "noise": "finetune.neftune=5"}
    cases = []
    for layout, settings in layouts.items():
        for kind, word in kinds.items():
            words = case(layout, settings, "deep llama")["words"]
            cases.append({"name": f"{layout} {kind}", "words": [*words, word], "steps": 0})
    results = run_world(2, cases, tmp_path)
    bound = 5 / (32 * 32) ** 0.5
    for layout in layouts:
        plain, dropout, noise = (results[f"{layout} {kind}"] for kind in kinds)
        assert dropout["valid"] == noise["valid"] == plain["valid"]
        assert 0.9 * bound < noise["noise"] <= bound + 1e-6, layout


RELOADED = {
    "gpt": ("pipeline=2 tensor=2", "pipeline=2 schedule=zero_bubble"),
    # Three experts on four processes: one of them holds none.
    "experts": ("shard=4 microbatch=1", "shard=2"),
    "shared": ("shard=4 expert=2 microbatch=1", "shard=2 expert=2"),
    "latent": ("context=2 tensor=2", "pipeline=2"),
}
"""Models, and the layouts of four processes that save them and of two that load them."""


@pytest.mark.slow
def test_first_weights_and_checkpoints_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    spread, fresh, alone, again = [], [], [], []
    for model, (on_four, on_two) in RELOADED.items():
        place, common = str(tmp_path / model), {"fingerprints": True, "steps": 2}
        spread.append({**case("spread", on_four, model), **common, "save": place})
        fresh.append({**case("fresh", "shard=1", model), **common, "steps": 0})
        alone.append({**case("alone", "shard=1", model), **common, "load": place})
        again.append({**case("again", on_two, model), **common, "load": place})
    results = run_world(4, spread, tmp_path) | run_world(1, [*fresh, *alone], tmp_path) | run_world(2, again, tmp_path)
    for model in RELOADED:
        saved, new, one, two = (results[f"{name}: {model}"] for name in ("spread", "fresh", "alone", "again"))
        # The tied embedding is held by two stages: the worker itself compares what processes hold under one name.
        assert saved["started"] == new["started"], model
        weights = {name: digest for name, digest in saved["ended"].items() if name in saved["started"]}
        assert one["started"] == weights, model
        assert two["started"] == weights, model
        # The optimizer came along too: both go on alike from here.
        pairs = zip(one["numbers"], two["numbers"], strict=True)
        assert all(ours == pytest.approx(theirs, rel=TOLERANCE) for ours, theirs in pairs), model
