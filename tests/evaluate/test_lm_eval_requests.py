"""What the harness asks is scored and continued as the harness means it; a stand-in takes the harness's place."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

ROOM = 16
WORDS = ["<end>", "Answer", ":", "ĠParis", "Ġis", "Ġ", "Paris", "a"]


class Request:
    """A harness's request: all the adapter looks at is `args`."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter over a model whose next token is always the present one and one more."""
    parts = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model")}
    parts["lm_eval.api.instance"].Instance = Request  # type: ignore[attr-defined]
    parts["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.delitem(sys.modules, "keepstep.evaluate.lm_eval_tasks", raising=False)
    made = importlib.import_module("keepstep.evaluate.lm_eval_tasks")
    monkeypatch.delitem(sys.modules, "keepstep.evaluate.lm_eval_tasks")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Punctuation()]
    )

    def logits(tokens_bt: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((tokens_bt + 1) % len(WORDS), len(WORDS)).float()

    def continued(requests: Any) -> list[list[int]]:
        answers = []
        for request in requests:
            assert len(request.prompt) + request.max_new_tokens <= ROOM, "prompt and answer fit the model together"
            new = [(request.prompt[-1] + 1 + place) % len(WORDS) for place in range(request.max_new_tokens)]
            answers.append(new[: new.index(0)] if 0 in new else new)
        return answers

    return made.KeepstepLM(logits, continued, tokenizer, stop_tokens=frozenset({0}), context_length=ROOM, batch=4)


def test_a_space_at_the_end_of_the_context_belongs_to_the_continuation(adapter: Any) -> None:
    spaced, plain = adapter.loglikelihood([Request("Answer: ", "Paris is"), Request("Answer:", " Paris is")])
    assert spaced == plain
    assert plain[1], "both tokens are the likeliest"
    first = float(torch.log_softmax(torch.eye(len(WORDS))[0], -1)[0])
    assert plain[0] == pytest.approx(2 * first)


def test_answers_as_long_as_the_model_leave_room_for_a_prompt(adapter: Any) -> None:
    long = "Answer" + " is" * 30
    requests = [Request(long, {"max_gen_toks": most}) for most in (4, ROOM, 10 * ROOM)]
    found = adapter.generate_until([*requests, Request("", {"max_gen_toks": 3})])
    assert [len(text.split()) for text in found] == [3, 3, 3, 3]


def test_one_stop_text_may_come_without_a_list(adapter: Any) -> None:
    listed, bare = (
        adapter.generate_until([Request("Answer", {"max_gen_toks": 3, "until": until})])[0]
        for until in (["Ġis"], "Ġis")
    )
    assert bare == listed
