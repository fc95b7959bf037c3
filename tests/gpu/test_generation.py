"""Batched generation by CUDA graphs gives the tokens and log-probabilities of the same steps without graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from keepstep.config.load import load_config
from keepstep.evaluate import continuous_batching
from keepstep.evaluate.continuous_batching import Generated, Request, generate_batch
from keepstep.evaluate.draw import Sampler
from keepstep.models.block_plan import BlockPlan
from keepstep.models.init import init_weights
from keepstep.models.transformer import Block, Transformer
from keepstep.train.device import deterministic_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs run on a GPU")


class WithoutGraphs:
    """Runs every step kernel by kernel."""

    def run(self, _window: int, step: Callable[[], None]) -> None:
        step()


def small_model(plan: BlockPlan | None = None) -> Transformer:
    config = replace(load_config(None, ["model=smollm-135m"]).config.model, layers=3, vocab=4096)
    model = Transformer(config).eval()
    init_weights(model, 1)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        if plan is not None:
            block.use(plan)
    return model.to(device="cuda", dtype=torch.bfloat16)


def some_requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 150, (48, 2), generator=generator).tolist()
    return [
        Request(torch.randint(0, 4096, (size,), generator=generator).tolist(), most, number)
        for number, (size, most) in enumerate(sizes)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [None, BlockPlan(deferred_add=True)], ids=["evaluation", "training"])
def test_graphs_change_nothing(
    temperature: float,
    plan: BlockPlan | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, requests = small_model(plan), some_requests()

    def answers() -> list[Generated]:
        return generate_batch(model, requests, rows=16, sampler=Sampler(temperature), stop_tokens={7, 8})

    with deterministic_kernels():
        by_graphs = [answers() for _ in range(2)]
    assert "without CUDA graphs" not in capsys.readouterr().err
    assert by_graphs[0] == by_graphs[1]
    monkeypatch.setattr(continuous_batching, "_Graphs", WithoutGraphs)
    with deterministic_kernels():
        assert answers() == by_graphs[0]


@torch.no_grad()
def test_greedy_tokens_are_nearly_the_likeliest_of_a_whole_forward() -> None:
    model, requests = small_model(), some_requests()
    for request, found in zip(requests, generate_batch(model, requests, rows=16), strict=True):
        tokens = torch.tensor([[*request.prompt, *found.tokens]], device="cuda")
        logits = model(tokens)[0, len(request.prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(found.tokens, device="cuda")[:, None])[:, 0]
        # bf16 rounds the last digits of logits in another order in each forward.
        assert (logits.max(dim=1).values - chosen).max() < 0.05
