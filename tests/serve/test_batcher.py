"""Continuous batching: answers are those that each prompt gets alone, and nothing that fails ends the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keepstep.evaluate.chat_model import ChatModel, cached_forward
from keepstep.evaluate.generate import generate
from keepstep.evaluate.kept_prompts import KeptPrompts
from keepstep.models.attention_context import KeyValueCache
from keepstep.serve.batcher import Batcher, BusyError, Generation
from tests.evaluate.test_chat_model import tiny_model
from tests.models.model_variants import VARIANTS, build, random_tokens
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


def test_prompts_that_begin_alike_are_computed_from_where_they_differ(model: ChatModel, batcher: Batcher) -> None:
    first = list(range(5, 45))
    prompts = [first, [*first, 7, 8, 9], [*first[:30], 1, 2, 3], [9, *first], [*first, 7, 8, 9]]
    for prompt, reused in zip(prompts, [0, 40, 30, 0, 42], strict=True):
        generation = Generation(prompt, greedy, 12)
        batcher.submit(generation)
        alone = generate(cached_forward(model.model, 256), prompt, max_new_tokens=12, temperature=0)
        assert ended(generation) == [*alone, "length"]
        assert generation.reused == reused
    assert batcher.tokens_reused == 112


def test_kept_prompts_are_few_and_forgotten_after_a_failure(model: ChatModel) -> None:
    kept, caches = KeptPrompts(model.model, most_bytes=3 * 64 * 100), list[KeyValueCache]()
    for number in range(6):
        prompt = [number, *range(40)]
        caches.append(kept.begin(prompt, 41, 41))
        with torch.no_grad():
            model.model(torch.tensor([prompt]), cache=caches[-1])
        kept.keep(prompt, caches[-1])
    assert 0 < sum(cache.bytes_held() for _, cache in kept._kept) <= 3 * 64 * 100 < sum(c.bytes_held() for c in caches)
    assert kept.begin([5, *range(40), 3], 50, 50).length == 41
    assert kept.begin([0, *range(40), 3], 50, 50).length == 0, "the oldest went first"
    kept.clear()
    assert kept.begin([5, *range(40), 3], 50, 50).length == 0


def test_rope_that_depends_on_the_length_stays_with_each_answer() -> None:
    """The scaling of a text of 21 tokens differs from those of 10 and 12; all are decoded together."""
    made = build(VARIANTS["rope by length"]).eval()
    batcher = Batcher(made, most_rows=3)
    prompts = [random_tokens(made.config, 1, length, seed=length)[0].tolist() for length in (3, 14, 5)]
    seen: list[list[Tensor]] = [[], [], []]

    def recording(number: int) -> Callable[[Tensor], int]:
        return lambda logits_v: (seen[number].append(logits_v), int(logits_v.argmax()))[1]

    asked = [Generation(prompt, recording(number), 7) for number, prompt in enumerate(prompts)]
    for generation in asked:
        batcher.submit(generation)
    for number, (prompt, generation) in enumerate(zip(prompts, asked, strict=True)):
        tokens = [token for token in ended(generation) if isinstance(token, int)]
        cache = KeyValueCache(made.config.layers, 64, longest=len(prompt) + 7)
        with torch.no_grad():
            expected_tv = made(torch.tensor([[*prompt, *tokens[:-1]]]), cache=cache)[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack(seen[number]), expected_tv, atol=1e-5, rtol=1e-5)
    batcher.close()
