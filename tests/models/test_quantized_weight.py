"""Frozen weights in fp8 and NF4 under adapters: the numbers, both passes, and what reaches memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from keepstep.config.schema import LoraConfig
from keepstep.core.errors import ConfigError
from keepstep.models import quantized_weight
from keepstep.models.init import init_weights
from keepstep.models.lora import adapter_parameters, adapters_off, init_adapters, prepare_adapters
from keepstep.models.ops.backend import KernelBackend, use_backend
from keepstep.models.quantized_weight import (
    NF4_BLOCK,
    NF4_VALUES,
    QuantizedFormat,
    QuantizedWeight,
    quantize_fp8,
    quantize_nf4,
    weight_slots,
)
from keepstep.models.transformer import Transformer
from keepstep.parallel.apply import apply_recompute
from tests.models.model_variants import FusedOnCpu, random_tokens
from tests.models.test_lora import SHAPE, disturb

FORMATS: tuple[QuantizedFormat, ...] = ("fp8", "nf4")
BITSANDBYTES_CODES = [
    0, 0, 1, 17, 17, 17, 18, 34, 34, 51, 52, 68, 69, 85, 102, 103, 120, 136, 153, 170, 171, 187, 204, 204, 221, 221,
    238, 238, 238, 239, 255, 255,
]  # fmt: skip
"""Of bitsandbytes 0.50.2: quantize_4bit(linspace(-3, 3, 64), blocksize=64, quant_type="nf4")."""
ERROR = {"fp8": 0.03, "nf4": 0.11}
"""Largest relative difference of normally distributed weights: about 2^-5 and a tenth."""


def weight(kind: QuantizedFormat, rows: int = 48, columns: int = 64) -> tuple[QuantizedWeight, torch.Tensor]:
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    stored = QuantizedWeight(kind, rows, columns, torch.device("cpu"))
    stored.store(whole)
    return stored, whole


def quantized(lora: LoraConfig, seed: int = 1) -> Transformer:
    with torch.device("meta"):
        model = Transformer(SHAPE)
    prepare_adapters(model, lora, torch.float32)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    init_adapters(model, seed)
    disturb(model)
    return model


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_come_back_within_the_format(kind: QuantizedFormat) -> None:
    stored, whole = weight(kind)
    near = stored.dequantized(torch.float32)
    assert (near - whole).norm() / whole.norm() < ERROR[kind]
    assert not torch.equal(near, whole)
    # What is representable is stored exactly, so that quantising twice changes nothing.
    stored.store(near)
    torch.testing.assert_close(stored.dequantized(torch.float32), near, rtol=1e-6, atol=0)


def test_fp8_has_one_scale_per_output() -> None:
    stored, whole = weight("fp8")
    largest = torch.finfo(torch.float8_e4m3fn).max
    assert torch.equal(stored.codes.float().abs().amax(dim=1), torch.full((48,), largest))
    torch.testing.assert_close(stored.scales, whole.abs().amax(dim=1) / largest)


def test_nf4_packs_as_bitsandbytes_does() -> None:
    whole = torch.linspace(-1, 1, NF4_BLOCK) * 3
    codes, scales = quantize_nf4(whole[None])
    assert codes.tolist() == BITSANDBYTES_CODES
    assert scales.tolist() == [3.0]
    decoded = quantized_weight.dequantize_nf4_by_torch(codes, scales, torch.float32).view(-1)
    nearest = (whole[:, None] / 3 - torch.tensor(NF4_VALUES)).abs().argmin(dim=1)
    torch.testing.assert_close(decoded, 3 * torch.tensor(NF4_VALUES)[nearest])


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_of_a_weight_are_quantised_as_the_whole(kind: QuantizedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, whole = weight(kind, rows=192)
    codes = stored.codes.clone().view(torch.uint8)
    monkeypatch.setattr(quantized_weight, "_CHUNK", 1)
    stored.codes.view(torch.uint8).zero_()
    stored.store(whole)
    assert torch.equal(stored.codes.view(torch.uint8), codes)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o", "gate", "up", "down")])
def test_model_computes_as_with_the_weights_that_codes_stand_for(
    kind: QuantizedFormat, targets: tuple[str, ...]
) -> None:
    lora = LoraConfig(rank=4, targets=targets, base=kind)
    model, plain = quantized(lora), quantized(replace(lora, base="bf16"))
    for name, slot in weight_slots(model):
        if isinstance(slot, QuantizedWeight):
            plain.get_parameter(name).data = slot.dequantized(torch.float32)
    tokens_bt, targets_bt = random_tokens(SHAPE, 2, 9), random_tokens(SHAPE, 2, 9, seed=2)
    outcomes = []
    for each in (model, plain):
        trained = [parameter for _, parameter in adapter_parameters(each)]
        loss = each(tokens_bt, targets_bt)
        outcomes.append((loss, torch.autograd.grad(loss, trained)))
    torch.testing.assert_close(*outcomes, atol=1e-5, rtol=1e-4)
    with adapters_off(model), adapters_off(plain):
        torch.testing.assert_close(model(tokens_bt), plain(tokens_bt), atol=1e-5, rtol=1e-4)


def test_fp8_matmuls_are_near_the_exact_ones() -> None:
    model = quantized(LoraConfig(rank=4, base="fp8"))
    tokens_bt, targets_bt = random_tokens(SHAPE, 2, 9), random_tokens(SHAPE, 2, 9, seed=2)
    trained = [parameter for _, parameter in adapter_parameters(model)]
    gradients = []
    for backend in (FusedOnCpu(), KernelBackend()):
        with use_backend(backend):
            found = torch.autograd.grad(model(tokens_bt, targets_bt), trained)
        gradients.append(torch.cat([each.flatten() for each in found]))
    difference = ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize("kind", FORMATS)
def test_recomputation_changes_no_bit(kind: QuantizedFormat) -> None:
    model = quantized(LoraConfig(rank=4, base=kind))
    tokens_bt, targets_bt = random_tokens(SHAPE, 2, 9), random_tokens(SHAPE, 2, 9, seed=2)
    trained = [parameter for _, parameter in adapter_parameters(model)]
    expected = torch.autograd.grad(model(tokens_bt, targets_bt), trained)
    for block in model.blocks.values():
        apply_recompute(block, "full")
    again = torch.autograd.grad(model(tokens_bt, targets_bt), trained)
    assert all(map(torch.equal, again, expected))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.slow
def test_compiled_blocks_compute_the_same() -> None:
    model = quantized(LoraConfig(rank=2, base="nf4", targets=("q", "v", "up", "down")))
    tokens_bt, targets_bt = random_tokens(SHAPE, 2, 9), random_tokens(SHAPE, 2, 9, seed=2)
    trained = [parameter for _, parameter in adapter_parameters(model)]
    expected = torch.autograd.grad(model(tokens_bt, targets_bt), trained)
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
    gradients = torch.autograd.grad(model(tokens_bt, targets_bt), trained)
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", FORMATS)
def test_no_matrix_of_a_block_stays_in_full_precision(kind: QuantizedFormat) -> None:
    model = quantized(LoraConfig(rank=2, base=kind, targets=("q", "v")))
    frozen = {name for name, item in model.blocks.named_parameters() if item.ndim > 1 and not item.requires_grad}
    assert not frozen
    assert not [item for item in model.modules() if type(item) is nn.Linear]
    stored = [item for item in model.modules() if isinstance(item, QuantizedWeight)]
    size = sum(item.codes.nbytes + item.scales.nbytes for item in stored)
    weights = sum(item.shape.numel() for item in stored)
    assert size / weights == pytest.approx({"fp8": 1.0, "nf4": 0.5 + 4 / 64}[kind], rel=0.15)


def test_sizes_that_no_kernel_takes_are_an_error() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        QuantizedWeight("fp8", 40, 64, torch.device("cpu"))
    with pytest.raises(ConfigError, match="multiple of 64"):
        QuantizedWeight("nf4", 3, 5, torch.device("cpu"))


def test_zero_rows_stay_zero() -> None:
    for quantize in (quantize_fp8, quantize_nf4):
        codes, scales = quantize(torch.zeros(16, 64))
        assert torch.isfinite(scales).all()
        assert codes.float().abs().max() == (0 if quantize is quantize_fp8 else 0x77)
