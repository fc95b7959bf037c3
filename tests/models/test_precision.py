"""One model for eager and compiled, full and half precision, plain and FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from keepstep.config.schema import ModelConfig
from keepstep.models.transformer import Transformer
from tests.models.model_variants import VARIANTS, build, random_tokens


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_and_gradients(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens_bt = random_tokens(model.config, 2, 24)
    loss = model(tokens_bt, random_tokens(model.config, 2, 24, seed=2), loss_chunks=2)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return loss.detach(), gradients


@pytest.mark.parametrize("name", ["learned", "alibi", "grouped rotary", "query and key norm"])
def test_fsdp_in_bfloat16_equals_the_plain_bfloat16_model_bit_by_bit(name: str, one_process_group: None) -> None:
    plain, sharded = build(VARIANTS[name]).bfloat16(), build(VARIANTS[name])
    # The default policy casts what it finds in a block's arguments; rotary tables and masks must come through whole.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (1,))
    for unit in (*sharded.blocks.values(), sharded):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    loss, gradients = loss_and_gradients(sharded)
    expected_loss, expected = loss_and_gradients(plain)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected_loss)
    for key, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[key].float()), key


def test_bfloat16_gradients_point_where_the_exact_ones_do(variant: ModelConfig) -> None:
    exact_loss, exact = loss_and_gradients(build(variant))
    loss, gradients = loss_and_gradients(build(variant).bfloat16())
    torch.testing.assert_close(loss, exact_loss, rtol=5e-3, atol=0)
    for key, gradient in gradients.items():
        # The gradient by a key's bias is zero in exact arithmetic: nothing but rounding is left of it.
        if exact[key].norm() > 1e-4 and not key.endswith("qkv.bias"):
            assert torch.cosine_similarity(gradient.float().flatten(), exact[key].flatten(), dim=0) > 0.98, key


# Warnings of torch's own compiler: it looks at .grad (2.13) and imports what it has deprecated (2.11).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
# `compute.compile` refuses experts.
@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.experts.count])
@pytest.mark.slow
def test_blocks_compile_without_a_break(name: str) -> None:
    model, compiled = build(VARIANTS[name]), build(VARIANTS[name])
    for block in compiled.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    loss, gradients = loss_and_gradients(compiled)
    expected_loss, expected = loss_and_gradients(model)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)
    torch.compiler.reset()


def test_dropout_acts_in_training_only() -> None:
    config = ModelConfig(layers=1, hidden=32, heads=4, vocab=61, seq_len=24, dropout=0.5)
    model, tokens_bt = build(config), random_tokens(config, 1, 24)
    assert not torch.equal(model(tokens_bt), model(tokens_bt))
    model.eval()
    assert torch.equal(model(tokens_bt), model(tokens_bt))
