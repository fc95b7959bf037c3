"""N:M sparse layers: what counts, what learns, and what they cannot be combined with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from keepstep.config.load import load_config
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError
from keepstep.models.linear import make_linear
from keepstep.models.sparse import SparseLinear, n_of_m_mask, sparse_linear
from keepstep.models.transformer import Transformer

TINY = ModelConfig(layers=1, hidden=16, heads=2, vocab=32, seq_len=8)


def test_mask_keeps_the_n_largest_of_each_m() -> None:
    weight = torch.tensor([[1.0, -4.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    assert n_of_m_mask(weight, 2, 4).tolist() == [[False, True, False, True, True, True, False, False]]
    random = n_of_m_mask(torch.randn(32, 64), 1, 8).unflatten(-1, (-1, 8)).sum(-1)
    assert bool((random == 1).all())


def test_sparse_forward_uses_kept_weights_and_gradients_reach_all() -> None:
    torch.manual_seed(0)
    layer = sparse_linear(8, 4, bias=True)
    x = torch.randn(3, 8)
    masked = torch.where(n_of_m_mask(layer.weight, 2, 4), layer.weight, 0.0)
    torch.testing.assert_close(layer(x), F.linear(x, masked, layer.bias), rtol=0, atol=0)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(4, 8))


@pytest.mark.slow
def test_sparse_model_learns() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(TINY, linear="sparse", linear_options={"n": 1, "m": 4}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens_bt = (torch.arange(9)[None] + torch.arange(12)[:, None]) % 32
    losses = []
    for _ in range(25):
        loss = model(tokens_bt[:, :-1], tokens_bt[:, 1:]) / 96
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_linear_layers_choose_the_projections() -> None:
    model = Transformer(replace(TINY, linear="sparse", linear_layers=("up", "out"), activation="swiglu"))
    sparse = {name for name, module in model.named_modules() if isinstance(module, SparseLinear)}
    assert sparse == {"blocks.0.attention.out", "blocks.0.mlp.gate_up"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 4, "m": 4}, "0 < n < m"),
        ({"n": 2, "m": 5}, "does not divide"),
        ({"n": "2"}, "0 < n < m"),
        ({"k": 1}, "k"),
    ],
)
def test_sparse_options_are_checked(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_linear(replace(TINY, linear="sparse", linear_options=options), "qkv", 16, 16, bias=True)


def returns_no_linear(in_features: int, out_features: int, bias: bool) -> torch.nn.Module:
    return torch.nn.Identity()


def with_a_buffer(in_features: int, out_features: int, bias: bool) -> torch.nn.Module:
    layer = torch.nn.Linear(in_features, out_features, bias)
    layer.register_buffer("mask", torch.ones(out_features, in_features))
    return layer


@pytest.mark.parametrize(
    ("name", "message"), [("returns_no_linear", "is no torch.nn.Linear"), ("with_a_buffer", "buffers")]
)
def test_linear_plugins_are_checked(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_linear(replace(TINY, linear=f"{__name__}:{name}"), "qkv", 16, 16, bias=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["precision=fp8"], "does not compute in fp8"),
        (["lora.rank=4"], "needs model.linear dense"),
        (["parallel.tensor=2"], "must be 1 with model.linear sparse"),
        (["model.linear_layers=[q]"], "must name some of qkv, out, up, down"),
        (["model.linear=spars"], "did you mean sparse?"),
        (["model.linear=dense", "model.linear_options={n: 2}"], "has no effect"),
    ],
)
def test_sparse_refuses_what_cannot_work(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["model.linear=sparse", *words])
    assert any(message in line for line in raised.value.lines())
