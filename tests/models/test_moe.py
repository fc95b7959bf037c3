"""Experts: routing, grouped matmuls, balancing, and the same bits whatever recomputation does."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keepstep.config.presets import preset_fields
from keepstep.config.schema import ExpertsConfig, ModelConfig
from keepstep.models.moe import MoE, Router, count_tokens, router_biases, router_health, routers
from keepstep.models.ops.grouped_matmul import grouped_matmul, has_grouped_kernel, loop_matmul
from keepstep.models.ops.routed_experts import fp32_linear
from keepstep.models.size import active_parameters, matmul_parameters, parameter_count
from keepstep.models.transformer import Block, Transformer
from keepstep.parallel.apply import apply_recompute
from tests.doc_blocks import ROOT
from tests.models.model_variants import LLAMA, VARIANTS, build, random_tokens

CPU = torch.device("cpu")


def mixture(**experts: object) -> ModelConfig:
    values = {"count": 4, "top_k": 2, "ffn_hidden": 16, **experts}
    return ModelConfig(**LLAMA, experts=ExpertsConfig(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 34])
def test_grouped_matmul_is_the_loop(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((50, 16), (5, width, 16)))
    # The first and the last expert have no token.
    ends = torch.tensor([0, 11, 11, 50, 50], dtype=torch.int32)
    results = []
    kernel = has_grouped_kernel(CPU, dtype)
    for multiply in (partial(grouped_matmul, has_kernel=kernel), loop_matmul):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = multiply(*inputs, ends)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=10 * tolerance, rtol=tolerance)
    assert results[0][2][0].abs().max() == 0


def test_grouped_kernel_is_used_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_grouped_kernel(CPU, torch.float32):
        pytest.skip("this torch has no grouped matmul for CPUs")
    monkeypatch.delattr(torch, "_grouped_mm")
    with pytest.raises(AttributeError, match="_grouped_mm"):
        MoE(VARIANTS["experts"])(torch.zeros(1, 4, 32))
    has_grouped_kernel.cache_clear()
    try:
        assert not has_grouped_kernel(CPU, torch.float32)
    finally:
        has_grouped_kernel.cache_clear()


def test_experts_compute_what_each_token_alone_would() -> None:
    config = mixture(shared_ffn_hidden=8, scale=1.7, normalize=False)
    torch.manual_seed(0)
    layer = MoE(config).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_btd = torch.randn(2, 5, 32)
    expected = torch.empty_like(x_btd)
    for row, token in ((row, token) for row in range(2) for token in range(5)):
        x = x_btd[row, token]
        scores, chosen = (layer.router.weight @ x).softmax(0).topk(2)
        total = layer.shared(x[None, None])[0, 0]  # type: ignore[misc]
        for score, expert in zip(scores, chosen, strict=True):
            gate, up = (layer.experts.gate_up[expert] @ x).chunk(2)
            total = total + 1.7 * score * (layer.experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
        expected[row, token] = total
    torch.testing.assert_close(layer(x_btd), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_sigmoid_routing_equals_deepseek_v3(groups: int, top_groups: int) -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    values = {"n_routed_experts": 8, "num_experts_per_tok": 3, "hidden_size": 32, "n_group": groups}
    theirs = deepseek.DeepseekV3TopkRouter(
        deepseek.DeepseekV3Config(**values, topk_group=top_groups, routed_scaling_factor=2.5, norm_topk_prob=True)
    )
    options = {"scores": "sigmoid", "scale": 2.5, "balance_bias": True, "groups": groups, "top_groups": top_groups}
    ours = Router(mixture(count=8, top_k=3, **options))
    generator = torch.Generator().manual_seed(3)
    weight, bias, x_nd = (torch.randn(shape, generator=generator) for shape in ((8, 32), (8,), (40, 32)))
    with torch.no_grad():
        for router, own_bias in ((theirs, theirs.e_score_correction_bias), (ours, ours.balance_bias)):
            router.weight.copy_(weight)
            own_bias.copy_(0.2 * bias)
    _, expected, chosen = theirs(x_nd)
    weights_nk, chosen_nk = ours(x_nd)

    def spread(values: Tensor, places: Tensor) -> Tensor:
        return torch.zeros(40, 8).scatter(1, places, values)

    torch.testing.assert_close(spread(weights_nk, chosen_nk), spread(expected, chosen), atol=1e-6, rtol=1e-5)


def test_balancing_losses_have_the_gradients_of_their_formulas() -> None:
    router = Router(mixture(aux_loss=0.3, z_loss=0.2, normalize=False)).train()
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    x_nd = torch.randn(20, 32)
    router.loss_weight = torch.tensor(5.0)
    weights_nk, chosen_nk = router(x_nd)
    (gradient,) = torch.autograd.grad(weights_nk.square().sum(), [router.weight])

    logits = x_nd @ router.weight.t()
    scores = logits.softmax(-1)
    share = torch.nn.functional.one_hot(chosen_nk, 4).sum((0, 1)) / 40
    losses = 0.3 * 4 * (share * scores.mean(0)).sum() + 0.2 * logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(scores.gather(1, chosen_nk).square().sum() + 5.0 * losses, [router.weight])
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)
    assert router.take_tokens().tolist() == count_tokens(chosen_nk, 4).tolist()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_recomputation_changes_no_bit_and_counts_tokens_once(mode: str) -> None:
    config = mixture(aux_loss=0.1, z_loss=0.1, balance_bias=True)
    tokens_bt = random_tokens(config, 2, 20)
    results = []
    # The kernel is tried at its first use, which may be inside a block.
    has_grouped_kernel.cache_clear()
    for each in (mode, "none"):
        model = build(config).train()
        for block in model.blocks.values():
            assert isinstance(block, Block)
            apply_recompute(block, each)  # type: ignore[arg-type]
        for _, router in routers(model):
            router.loss_weight = torch.tensor(40.0)
        model(tokens_bt, tokens_bt).backward()
        tokens = [router.take_tokens() for _, router in routers(model)]
        assert [int(each.sum()) for each in tokens] == [80, 80]
        results.append([*tokens, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(ours, expected) for ours, expected in zip(*results, strict=True))


def test_evaluation_counts_nothing() -> None:
    model = build(VARIANTS["experts"]).train()
    with torch.no_grad():
        model(random_tokens(model.config, 1, 9))
    model.eval()(random_tokens(model.config, 1, 9)).sum().backward()
    assert all(router.tokens_e is None for _, router in routers(model))


def test_router_health_of_even_and_uneven_loads() -> None:
    even, one = torch.full((2, 4), 10), torch.tensor([[40, 0, 0, 0], [10, 10, 10, 10]])
    assert router_health(even, []).tolist() == pytest.approx([1, 1, 0])
    assert router_health(one, [torch.tensor([0.1, -0.3])]).tolist() == pytest.approx([4, 0.5, 0.3])
    assert router_health(torch.tensor([[7]]), []).tolist() == pytest.approx([1, 1, 0])


def test_bias_grows_for_experts_with_few_tokens() -> None:
    router = Router(mixture(balance_bias=True, bias_update_rate=0.01))
    tokens_e = torch.tensor([10, 0, 5, 5])
    router.update_bias(tokens_e, torch.tensor(1.0))
    assert router.balance_bias.tolist() == pytest.approx([-0.01, 0.01, 0.0, 0.0])
    before = router.balance_bias.clone()
    router.update_bias(tokens_e, torch.tensor(0.0))
    assert torch.equal(router.balance_bias, before)
    assert list(router_biases(build(VARIANTS["grouped experts"]))) == [
        f"blocks.{layer}.mlp.router.balance_bias" for layer in (1, 2)
    ]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("olmoe-1b-7b", 6.9, 1.3),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gpt-oss-20b", 20.9, 3.6 + 0.58),  # published without the input embedding
    ],
)
def test_presets_have_their_published_sizes(name: str, total: float, active: float) -> None:
    model = ModelConfig(preset=name, **preset_fields(name))
    assert parameter_count(model) / 1e9 == pytest.approx(total, abs=0.05)
    assert active_parameters(model) / 1e9 == pytest.approx(active, abs=0.06)


def test_size_counts_the_parameters_that_a_token_uses() -> None:
    config = VARIANTS["grouped experts"]
    model = Transformer(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(config) == total
    expert = model.blocks["1"].mlp.experts.down[0].numel() * 3  # type: ignore[union-attr,operator]
    assert active_parameters(config) == total - 2 * 5 * expert
    fewer = replace(config, experts=replace(config.experts, top_k=2))
    assert matmul_parameters(config) - matmul_parameters(fewer) == 2 * expert


def test_narrow_presets_keep_the_proportions_of_experts() -> None:
    fields = preset_fields("qwen3-30b-a3b", {"hidden": 64}.get)
    assert (fields["experts"].ffn_hidden, fields["experts"].count) == (24, 128)


@pytest.mark.slow
def test_benchmark_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "moe.json"
    monkeypatch.setattr(sys, "argv", ["moe.py", "layer", "steps", "--tiny", "--out", str(out)])
    runpy.run_path(str(ROOT / "benchmarks" / "moe.py"), run_name="__main__")
    result = json.loads(out.read_text())
    assert {"layer_ratio_olmoe", "layer_ratio_mixtral", "qwen3_8layer_tokens_per_s", "olmoe_mfu"} <= result.keys()
    for layer in result["layers"].values():
        # Both round to bf16, at different places.
        assert max(layer["output_and_gradient_difference"]) < 0.02


def test_router_gradient_of_bf16_weights_keeps_fp32_precision() -> None:
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(64, 32).bfloat16(), torch.randn(8, 32).bfloat16(), torch.randn(64, 8)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = fp32_linear(*leaves)
    exact = x.float() @ weight.float().t()
    torch.testing.assert_close(logits, exact, atol=1e-5, rtol=1e-5)
    d_x, d_weight = torch.autograd.grad(logits, leaves, gradient)
    torch.testing.assert_close(d_x.float(), gradient @ weight.float(), atol=2e-3, rtol=2**-8)
    torch.testing.assert_close(d_weight.float(), gradient.t() @ x.float(), atol=2e-3, rtol=2**-8)
