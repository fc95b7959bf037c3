"""Features of single families: fused operators leave alone what they do not compute, and every parameter learns."""

from __future__ import annotations

import torch

from keepstep.config.schema import ModelConfig
from keepstep.models.attention_context import make_context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.ops.backend import KernelBackend, use_backend
from keepstep.models.transformer import Block, Transformer
from tests.models.model_variants import VARIANTS, FusedOnCpu, build, random_tokens


def gradients(model: Transformer, backend: KernelBackend) -> dict[str, torch.Tensor]:
    """The loss and all gradients of two rows that are longer than any sliding window."""
    model.zero_grad()
    with use_backend(backend):
        loss = model(random_tokens(model.config, 2, 20), random_tokens(model.config, 2, 20, seed=2))
        (loss / 40).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **{name: grad.clone() for name, grad in found.items() if grad is not None}}


def test_fused_operators_compute_the_same(variant: ModelConfig) -> None:
    model = build(variant)
    plain = gradients(model, KernelBackend())
    assert plain.keys() == {"loss", *dict(model.named_parameters())}
    assert all(grad.abs().sum() > 0 for grad in plain.values())
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.use(BlockPlan(fused_attention=True, deferred_add=True))
    fused = gradients(model, FusedOnCpu())
    for name, expected in plain.items():
        torch.testing.assert_close(fused[name], expected, atol=1e-6, rtol=1e-4, msg=name)


def test_own_attention_kernel_is_for_plain_scores() -> None:
    refused = ("gemma", "sliding window")
    fused = (
        "multipliers",
        "grouped rotary",
        "layers without rope",
        "partial rotary",
        "norms after",
        "query and key norm",
    )
    for name in (*fused, *refused):
        model = build(VARIANTS[name])
        block = model.blocks["0"]
        assert isinstance(block, Block)
        context = make_context(model.config, torch.zeros(1, 20, 32), torch.arange(20)[None], None, None)
        assert (context.fused_rule() is not None and block.attention.can_fuse_attention()) == (name in fused), name
