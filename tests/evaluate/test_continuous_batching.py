"""Draws follow the nucleus, and the benchmark of generation runs on any machine."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import UsageError
from keepstep.evaluate.continuous_batching import Request, generate_batch
from keepstep.evaluate.draw import Sampler
from tests.doc_blocks import ROOT
from tests.models.model_variants import VARIANTS, build


def test_nucleus_keeps_the_likeliest_tokens_that_reach_top_p() -> None:
    logits_bv = torch.tensor([0.3, 0.05, 0.5, 0.15]).log().repeat(2000, 1)
    draws_b = torch.rand(2000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    chosen_b, _ = Sampler(1.0, top_p=0.7).choose(logits_bv, draws_b)
    shares = torch.bincount(chosen_b, minlength=4) / 2000
    torch.testing.assert_close(shares, torch.tensor([0.375, 0.0, 0.625, 0.0]), atol=0.03, rtol=0.0)
    cold_b, _ = Sampler(0.01).choose(logits_bv, draws_b)
    assert set(cold_b.tolist()) == {2}
    with pytest.raises(UsageError, match="top_p"):
        Sampler(1.0, top_p=0.0)


def test_generation_benchmark_measures_both_sides() -> None:
    spec = importlib.util.spec_from_file_location("generation", ROOT / "benchmarks" / "generation.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    shape = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "positions": "rotary", "tied": True}
    config = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab=64, seq_len=64, **shape)
    device = torch.device("cpu")
    found = benchmark.against_transformers(config, rows=3, prompt_tokens=4, new_tokens=6, repeats=1, device=device)
    ratio = found["keepstep_tokens_per_s"] / found["transformers_tokens_per_s"]
    assert found["generate_ratio_hf"] == pytest.approx(ratio)
    assert benchmark.against_waiting(config, rows=3, longest=8, repeats=1, device=device) > 0


def test_a_long_request_does_not_change_the_rope_of_a_short_one() -> None:
    """Texts of more than 16 tokens have another scaling, and these share two rows."""
    model = build(VARIANTS["rope by length"]).eval()
    short, long = Request([1, 2, 3, 4], 6, seed=1), Request(list(range(5, 18)), 6, seed=2)
    alone = [generate_batch(model, [each], rows=1, sampler=Sampler(1.0))[0] for each in (short, long)]
    together = generate_batch(model, [long, short, short, long], rows=2, sampler=Sampler(1.0))
    for found, expected in zip(together, (alone[1], alone[0], alone[0], alone[1]), strict=True):
        assert found.tokens == expected.tokens
        assert found.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-6)
