"""Kernels for frozen weights in fp8 and NF4 against torch's own operators. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from keepstep.config.schema import LoraConfig, ModelConfig
from keepstep.models.init import init_weights
from keepstep.models.kernels.cuda import is_hopper
from keepstep.models.lora import adapter_parameters, init_adapters, prepare_adapters
from keepstep.models.quantized_weight import (
    QuantizedFormat,
    QuantizedWeight,
    computes_fp8,
    dequantize_nf4_by_torch,
    quantize_fp8,
    quantize_nf4,
    quantize_tokens,
    quantized_matmul,
    weight_slots,
)
from keepstep.models.transformer import Transformer
from keepstep.train.device import deterministic_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these kernels run on a GPU")
CUDA = torch.device("cuda")
SHAPE = ModelConfig(
    layers=2, hidden=512, heads=8, kv_heads=4, ffn_hidden=1024, vocab=1000, seq_len=512, positions="rotary",
    norm="rmsnorm", activation="swiglu", bias=False,
)  # fmt: skip


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def test_nf4_is_dequantised_to_the_same_bits() -> None:
    from keepstep.models.kernels.quantized import dequantize_nf4
    from keepstep.models.quantized_weight import NF4_VALUES

    codes, scales = quantize_nf4(torch.randn(1000, 4160, device=CUDA))
    table = torch.tensor(NF4_VALUES, device=CUDA)
    for dtype in (torch.float32, torch.bfloat16):
        ours = dequantize_nf4(codes, scales, table, dtype)
        assert torch.equal(ours, dequantize_nf4_by_torch(codes, scales, dtype).view(-1))


def test_tokens_fill_fp8_and_undo_themselves() -> None:
    x = torch.randn(333, 5000, device=CUDA, dtype=torch.bfloat16)
    factors = torch.rand(5000, device=CUDA) + 0.5
    for given in (None, factors):
        small, scales = quantize_tokens(x, given)
        exact = x.float() if given is None else x.float() * given
        expected, expected_scales = quantize_fp8(exact)
        torch.testing.assert_close(scales, expected_scales)
        # The kernel's division may round a tie the other way.
        assert (small.float() != expected.float()).float().mean() < 1e-3
        assert relative(small.float() * scales[:, None], exact) < 0.03


def test_bytes_are_transposed() -> None:
    from keepstep.models.kernels.quantized import transpose_bytes

    codes = torch.randint(0, 256, (1000, 2064), dtype=torch.uint8, device=CUDA)
    assert torch.equal(transpose_bytes(codes), codes.t())


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
@pytest.mark.parametrize("backward", [False, True])
def test_matmuls_are_those_of_the_dequantised_weight(kind: QuantizedFormat, backward: bool) -> None:
    torch.manual_seed(1)
    weight = QuantizedWeight(kind, 3072, 2048, CUDA)
    weight.store(torch.randn(3072, 2048, device=CUDA) * 0.02)
    x = torch.randn(4096, 3072 if backward else 2048, device=CUDA, dtype=torch.bfloat16)
    left = torch.randn(4096, 16, device=CUDA, dtype=torch.bfloat16)
    right = torch.randn(16, 2048 if backward else 3072, device=CUDA, dtype=torch.bfloat16)
    if is_hopper(CUDA):
        assert computes_fp8(x), "the fp8 matmuls did not prove themselves"
    ours = quantized_matmul(x, weight.codes, weight.scales, 3072, backward, left, right)
    whole = weight.dequantized(torch.float32)
    exact = x.float() @ (whole if backward else whole.t()) + left.float() @ right.float()
    assert relative(ours, exact) < (0.05 if kind == "fp8" else 0.01)
    with deterministic_kernels():
        again = quantized_matmul(x, weight.codes, weight.scales, 3072, backward, left, right)
    assert torch.equal(again, quantized_matmul(x, weight.codes, weight.scales, 3072, backward, left, right))


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_model_learns_as_with_the_dequantised_weights(kind: QuantizedFormat, compiled: bool) -> None:
    models = []
    for base in (kind, "bf16"):
        with torch.device("meta"):
            model = Transformer(SHAPE)
        prepare_adapters(model, LoraConfig(rank=8, base=base), torch.bfloat16)
        model.to_empty(device=CUDA)
        init_weights(model, 1)
        init_adapters(model, 1)
        for name, adapter in adapter_parameters(model):
            generator = torch.Generator(CUDA).manual_seed(len(name))
            adapter.data = adapter.data.normal_(0, 0.02, generator=generator).bfloat16()
        models.append(model)
    ours, plain = models
    for name, slot in weight_slots(ours):
        if isinstance(slot, QuantizedWeight):
            plain.get_parameter(name).data = slot.dequantized(torch.bfloat16)
    tokens_bt = torch.randint(0, 1000, (2, 512), device=CUDA)
    if compiled:
        for block in ours.blocks.values():
            block.forward = torch.compile(block.forward)
    found = []
    for model in models:
        trained = [parameter for _, parameter in adapter_parameters(model)]
        gradients = torch.autograd.grad(model(tokens_bt, tokens_bt), trained)
        found.append(torch.cat([each.flatten() for each in gradients]))
    assert relative(*found) < (0.12 if kind == "fp8" else 0.03)
