"""Split weights are fp32 weights: nothing is lost between the halves, and training cannot tell the difference."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config.schema import ModelConfig, OptimizerConfig
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer
from keepstep.train.optim.master_weights import MasterWeights, join, split
from keepstep.train.optim.optimizer import Optimizers

ONE = torch.ones(())


@settings(max_examples=200)
@given(st.lists(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127), min_size=1))
def test_the_halves_are_exactly_the_whole(values: list[float]) -> None:
    whole = torch.tensor(values, dtype=torch.float32)
    high, low = split(whole)
    assert high.dtype == torch.bfloat16
    assert torch.equal(join(high, low).view(torch.int32), whole.view(torch.int32))
    assert torch.allclose(high.float(), whole, rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_split_weights_take_the_steps_of_fp32_weights(name: str, microbatches: int) -> None:
    plain = Transformer(ModelConfig(layers=1, hidden=16, heads=2, vocab=32, seq_len=8))
    init_weights(plain, 1)
    halves = copy.deepcopy(plain)
    config = OptimizerConfig(name=name, lr=0.01)  # type: ignore[arg-type]
    whole_optimizer, split_optimizer = Optimizers(plain, config), Optimizers(halves, config, MasterWeights(halves))
    generator = torch.Generator().manual_seed(5)
    for _ in range(5):
        for _ in range(microbatches):
            for a, b in zip(plain.parameters(), halves.parameters(), strict=True):
                gradient = torch.randn(a.shape, generator=generator).bfloat16()
                a.grad = gradient.float() if a.grad is None else a.grad + gradient.float()
                b.grad = gradient
            if microbatches > 1:
                split_optimizer.accumulate_gradients()
        for optimizer in (whole_optimizer, split_optimizer):
            optimizer.step(1.0, ONE * 0.5)
            optimizer.zero_grad()
    for name_, weight in split_optimizer.weights().items():
        torch.testing.assert_close(weight, whole_optimizer.weights()[name_].detach(), rtol=1e-5, atol=1e-6)


def test_weights_that_were_loaded_reach_the_model() -> None:
    model = Transformer(ModelConfig(layers=1, hidden=16, heads=2, vocab=32, seq_len=8))
    init_weights(model, 1)
    optimizers = Optimizers(model, OptimizerConfig(), MasterWeights(model))
    filled = {name: torch.full_like(weight, 1 / 3) for name, weight in optimizers.weights().items()}
    optimizers.adopt(filled)
    assert all(torch.equal(weight, filled[name]) for name, weight in optimizers.weights().items())
    assert all((parameter == torch.tensor(1 / 3).bfloat16()).all() for parameter in model.parameters())
