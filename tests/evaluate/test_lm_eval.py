"""The harness's adapter scores and continues texts as the model itself would (runs where lm-eval is installed)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.evaluate.continuous_batching import generate_batch
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer

pytest.importorskip("lm_eval")

CONFIG = ModelConfig(layers=2, hidden=32, heads=4, vocab=128, seq_len=32, positions="rotary", init_std=0.3)


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool = False) -> Any:
        return type("Encoding", (), {"ids": [ord(letter) for letter in text]})()

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture
def adapter() -> tuple[Any, Transformer]:
    from keepstep.evaluate.lm_eval_tasks import KeepstepLM

    model = Transformer(CONFIG).eval()
    init_weights(model, 3)

    def continued(requests: Any) -> list[list[int]]:
        generated = generate_batch(model, requests, rows=2, stop_tokens={0})
        return [one.tokens[:-1] if one.ended else one.tokens for one in generated]

    return KeepstepLM(model, continued, Letters(), stop_tokens=frozenset({0}), context_length=32, batch=2), model


def request(*args: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type="loglikelihood", doc={}, arguments=args, idx=0)


@torch.no_grad()
def test_scores_are_the_models_own_log_probabilities(adapter: tuple[Any, Transformer]) -> None:
    harness, model = adapter
    found = harness.loglikelihood([request("abc", "de"), request("", "xyz"), request("hello there", "!")])
    for (score, _), (context, rest) in zip(found, [("abc", "de"), ("\0", "xyz"), ("hello there", "!")], strict=True):
        ids = torch.tensor([[ord(letter) for letter in context + rest]])
        logits = model(ids)[0, len(context) - 1 : -1]
        expected = -F.cross_entropy(logits, ids[0, len(context) :], reduction="sum")
        assert score == pytest.approx(float(expected), abs=1e-4)


def test_rolling_scores_predict_every_token_once(adapter: tuple[Any, Transformer]) -> None:
    harness, _ = adapter
    text = "the quick brown fox jumps over the lazy dog, twice over"
    (whole,) = harness.loglikelihood_rolling([request(text)])
    parts = ["\0" + text[:31], text[30:61]]
    expected = sum(harness._score([([ord(letter) for letter in part], 1)])[0][0] for part in parts)
    assert whole == pytest.approx(expected, abs=1e-3)


def test_continuations_end_at_the_stop_text(adapter: tuple[Any, Transformer]) -> None:
    harness, _ = adapter
    (answer,) = harness.generate_until([request("abc", {"max_gen_toks": 12})])
    assert len(answer) == 12
    (cut,) = harness.generate_until([request("abc", {"max_gen_toks": 12, "until": [answer[5]]})])
    assert cut == answer[: answer.index(answer[5])]
