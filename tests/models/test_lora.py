"""Adapters: nothing changes at first, merging changes nothing, and PEFT computes the same from our files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.config.hf_config import export_family
from keepstep.config.schema import ExpertsConfig, LoraConfig, ModelConfig
from keepstep.interop.peft import save_adapter
from keepstep.models.init import init_weights
from keepstep.models.lora import adapter_parameters, apply_lora, init_adapters, lora_modules, merge_lora
from keepstep.models.ops.backend import KernelBackend, use_backend
from keepstep.models.transformer import Transformer
from tests.models.model_variants import FusedOnCpu, random_tokens
from tests.models.test_reference import imported, reference

SHAPE = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab=61, seq_len=32, positions="rotary", norm="rmsnorm",
    activation="swiglu", bias=False,
)  # fmt: skip
TARGETS = [("q", "v"), ("k", "o", "gate"), ("q", "k", "v", "o", "gate", "up", "down")]


def adapted(config: ModelConfig, lora: LoraConfig, seed: int = 1) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed)
    apply_lora(model, lora)
    init_adapters(model, seed)
    return model


def disturb(model: Transformer) -> None:
    generator = torch.Generator().manual_seed(7)
    for _, parameter in adapter_parameters(model):
        parameter.data.normal_(0.0, 0.2, generator=generator)


@pytest.mark.parametrize("targets", TARGETS)
def test_fresh_adapters_change_nothing_and_merged_ones_change_no_logit(targets: tuple[str, ...]) -> None:
    lora = LoraConfig(rank=4, targets=targets)
    tokens_bt = random_tokens(SHAPE, 2, 9)
    plain = Transformer(SHAPE)
    init_weights(plain, 1)
    model = adapted(SHAPE, lora)
    assert torch.equal(model(tokens_bt), plain(tokens_bt))
    disturb(model)
    expected = model(tokens_bt)
    assert (expected - plain(tokens_bt)).abs().max() > 0.01
    merge_lora(model)
    assert not list(adapter_parameters(model))
    torch.testing.assert_close(model(tokens_bt), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("bias", [False, True])
def test_adapters_in_the_epilogue_compute_the_same(targets: tuple[str, ...], bias: bool) -> None:
    shape = replace(SHAPE, bias=bias)
    model = adapted(shape, LoraConfig(rank=4, targets=targets))
    disturb(model)
    tokens_bt, targets_bt = random_tokens(shape, 2, 9), random_tokens(shape, 2, 9, seed=2)
    trained = [parameter for _, parameter in adapter_parameters(model)]
    outcomes = []
    for backend in (FusedOnCpu(), KernelBackend()):
        with use_backend(backend):
            outcomes.append(torch.autograd.grad(model(tokens_bt, targets_bt), trained))
    torch.testing.assert_close(*outcomes, atol=1e-4, rtol=1e-4)


def test_only_adapters_are_trained() -> None:
    model = adapted(SHAPE, LoraConfig(rank=2))
    disturb(model)
    model(random_tokens(SHAPE, 2, 9), random_tokens(SHAPE, 2, 9, seed=2)).backward()
    adapters = dict(adapter_parameters(model))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in adapters)
        assert (parameter.grad is not None) == (name in adapters)
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in adapters.values())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}),
        ({"activation": "swiglu"}, {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}),
        (
            {"activation": "swiglu", "bias": False, "experts": ExpertsConfig(count=4, top_k=2, ffn_hidden=16)},
            {"attention.qkv", "attention.out"},
        ),
    ],
)
def test_all_is_what_the_model_has(settings: dict[str, Any], expected: set[str]) -> None:
    model = adapted(ModelConfig(layers=1, hidden=16, heads=2, vocab=31, seq_len=8, **settings), LoraConfig(rank=2))
    assert {name.split(".", 2)[2] for name, _ in lora_modules(model)} == expected


@pytest.mark.slow
def test_compiled_adapters_compute_the_same() -> None:
    model = adapted(SHAPE, LoraConfig(rank=2))
    disturb(model)
    tokens_bt = random_tokens(SHAPE, 2, 9)
    expected = model(tokens_bt)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens_bt), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ("q", "v")),
        ("llama", ("q", "k", "v", "o", "gate", "up", "down")),
        ("qwen3", ("q", "k", "o", "up")),
        ("gpt2", ("q", "k", "v", "o", "up", "down")),
        ("mpt with alibi", ("q", "v", "up")),
        ("phi3", ("q", "k", "v", "o", "gate", "up", "down")),
        ("phi3 with partial rotary", ("q", "v", "up")),
        ("olmo2", ("q", "k", "v", "down")),
        ("granite", ("q", "o", "gate")),
        ("smollm3", ("q", "k")),
        ("gemma2", ("q", "k", "v", "o", "gate", "up", "down")),
        ("gemma3", ("q", "k", "gate")),
        ("qwen3 moe", ("q", "k", "v", "o")),
        ("gpt-oss clipped without biases", ("q", "v")),
        ("deepseek v2 lite", ("q",)),
        ("deepseek v3", ("q", "o")),
    ],
)
def test_peft_loads_our_files_and_computes_the_same(tmp_path: Path, name: str, targets: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    theirs = reference(name)
    model, config, family = imported(theirs)
    assert export_family(config) == family
    lora = LoraConfig(rank=3, alpha=7.0, targets=targets)
    apply_lora(model, lora)
    init_adapters(model, 1)
    disturb(model)
    save_adapter(model, lora, family, "base", tmp_path)
    tokens_bt = random_tokens(config, 2, 12)
    adapted_theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    torch.testing.assert_close(model(tokens_bt), adapted_theirs(tokens_bt).logits, atol=2e-5, rtol=1e-4)
