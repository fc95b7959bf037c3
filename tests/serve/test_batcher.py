"""Continuous batching: answers are those that each prompt gets alone, and nothing that fails ends the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keepstep.evaluate.chat_model import ChatModel, cached_forward
from keepstep.evaluate.generate import generate
from keepstep.models.attention_context import KeyValueCache
from keepstep.serve.batcher import Batcher, BusyError, Generation
from tests.evaluate.test_chat_model import tiny_model
from tests.patience import PATIENCE_S


@pytest.fixture
def model(tmp_path: Path) -> ChatModel:
    return tiny_model(tmp_path, room=256)


@pytest.fixture
def batcher(model: ChatModel) -> Iterator[Batcher]:
    made = Batcher(model.model, most_rows=3)
    yield made
    made.close()


def greedy(logits_v: Tensor) -> int | None:
    return int(logits_v.argmax())


def ended(generation: Generation) -> list[int | str]:
    return list(generation.tokens(PATIENCE_S, lambda: None))


def test_answers_are_those_of_each_prompt_alone(model: ChatModel, batcher: Batcher) -> None:
    """Seven prompts of other lengths in three places: they join and leave while others are decoded."""
    prompts = [list(range(5, 5 + 9 * number % 31 + 1)) for number in range(7)]
    lengths = [70, 3, 20, 90, 1, 40, 10]
    asked = [Generation(prompt, greedy, most) for prompt, most in zip(prompts, lengths, strict=True)]
    for generation in asked:
        batcher.submit(generation)
    for prompt, most, generation in zip(prompts, lengths, asked, strict=True):
        alone = generate(cached_forward(model.model, 256), prompt, max_new_tokens=most, temperature=0)
        assert ended(generation) == [*alone, "length"]
    assert batcher.running == batcher.waiting == 0
    assert batcher.tokens_written == sum(lengths)


def test_answer_that_fails_leaves_the_others_alone(batcher: Batcher) -> None:
    def fails(_: Tensor) -> int | None:
        raise RuntimeError("out of memory")

    broken, sound = Generation([1, 2], fails, 9), Generation([3, 4, 5], greedy, 50)
    for generation in (sound, broken):
        batcher.submit(generation)
    assert ended(broken) == ["failed"]
    assert broken.error == "RuntimeError: out of memory"
    assert len(ended(sound)) == 51


def test_cancelled_answer_makes_room(batcher: Batcher) -> None:
    endless = [Generation([1], greedy, 1 << 30) for _ in range(3)]
    last = Generation([2], greedy, 2)
    for generation in (*endless, last):
        batcher.submit(generation)
    endless[1].cancelled.set()
    assert len(ended(last)) == 3
    assert ended(endless[1])[-1] == "cancelled"
    for generation in endless:
        generation.cancelled.set()


def test_too_many_waiting_are_refused(model: ChatModel) -> None:
    batcher = Batcher(model.model, most_rows=1, most_waiting=0)
    with pytest.raises(BusyError):
        batcher.submit(Generation([1], greedy, 1))
    batcher.close()


def test_gathered_rows_keep_their_keys(model: ChatModel) -> None:
    """Rows of two caches, one of them padded, decode as they would have on their own."""
    whole = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
    alone = [KeyValueCache(1, 16), KeyValueCache(1, 16)]
    with torch.no_grad():
        model.model(whole[:1, 2:5], cache=alone[0])
        model.model(whole[1:, :5], cache=alone[1])
        together = KeyValueCache.gathered([(alone[0], 0), (alone[1], 0)], 8)
        again = KeyValueCache.gathered([(together, 1), (together, 0)], 7)
        logits = model.model(whole[:, 5:].flip(0), cache=again)[:, -1]
        for row, cache in enumerate(alone):
            torch.testing.assert_close(logits[1 - row], model.model(whole[row : row + 1, 5:], cache=cache)[0, -1])
    assert again.padding_b is not None
    assert again.padding_b.tolist() == [0, 2]
