"""Sizes and costs come from the shape alone and agree with the built model to the last parameter."""

from __future__ import annotations

import pytest
import torch

from keepstep.config.presets import PRESETS
from keepstep.config.schema import ModelConfig
from keepstep.models.size import (
    flops_per_token,
    matmul_parameters,
    mfu,
    mfu_llm_foundry,
    parameter_count,
    peak_flops,
)
from keepstep.models.transformer import Transformer
from tests.models.model_variants import VARIANTS

PUBLISHED = {
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "smollm-135m": 134_515_008,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
}
PUBLISHED_ROUNDED = {
    "gpt3-175b": "174.6B",
    "gpt3-30b": "29.98B",
    "gpt3-13b": "12.85B",
    "gpt3-1.3b": "1.316B",
    "gpt3-857m": "356M",
    "gpt3-375m": "64.6M",
    "gpt3-125m": "125.3M",
}


def preset(name: str) -> ModelConfig:
    return ModelConfig(preset=name, **PRESETS[name])


def built_count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_counts_what_the_built_model_holds(name: str) -> None:
    assert parameter_count(preset(name)) == built_count(preset(name))


def test_every_variant_counts_what_the_built_model_holds(variant: ModelConfig) -> None:
    assert parameter_count(variant) == built_count(variant)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_counts_are_reproduced_exactly(name: str, count: int) -> None:
    assert parameter_count(preset(name)) == count


@pytest.mark.parametrize(("name", "rounded"), PUBLISHED_ROUNDED.items())
def test_gpt3_counts_round_to_the_published_ones(name: str, rounded: str) -> None:
    unit = {"M": 1e6, "B": 1e9}[rounded[-1]]
    digits = len(rounded[:-1].partition(".")[2])
    assert round(parameter_count(preset(name)) / unit, digits) == float(rounded[:-1])


def test_every_preset_has_a_published_count() -> None:
    assert set(PRESETS) - {"mpt-tiny"} == PUBLISHED.keys() | PUBLISHED_ROUNDED.keys()


def test_matmul_parameters_are_the_matrices_a_token_is_multiplied_with() -> None:
    for config in VARIANTS.values():
        with torch.device("meta"):
            model = Transformer(config)
        named = model.blocks.named_parameters()
        matrices = sum(p.numel() for name, p in named if p.dim() == 2 and not name.endswith("bias"))
        experts = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 3)
        matrices += experts * config.experts.top_k // max(1, config.experts.count)
        assert matmul_parameters(config) == matrices + config.padded_vocab * config.hidden


def test_a_token_of_llama_8b_costs_what_its_matrices_and_its_attention_cost() -> None:
    config = preset("llama-8b")
    multiplied = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert flops_per_token(config, 8192) == 6 * multiplied + 12 * 32 * 4096 * 8192


def test_mfu_is_the_share_of_the_peak() -> None:
    config = preset("llama-1b")
    at_peak = 989.5e12 / flops_per_token(config, 4096)
    assert mfu(at_peak / 2, config, 4096, 989.5e12) == pytest.approx(0.5)


def test_the_llm_foundry_formula_reproduces_its_own_table() -> None:
    # Published for an H100: 45,455 tokens/s a GPU is 41.8 % for the 1b, 1,058 is 43.4 % for the 70b.
    assert mfu_llm_foundry(45455, preset("mpt-1b"), 2048, 989.5e12) == pytest.approx(0.418, abs=0.003)
    assert mfu_llm_foundry(1058, preset("mpt-70b"), 2048, 989.5e12) == pytest.approx(0.434, abs=0.003)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756.5e12),
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA H200", "fp8", 1979e12),
        ("NVIDIA B200", "fp8", 4500e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("Intel(R) Xeon(R)", "bf16", None),
    ],
)
def test_peaks_are_found_by_device_name(device: str, precision: str, peak: float | None) -> None:
    assert peak_flops(device, precision) == peak
