"""Prompts for reinforcement learning: conversations up to an answer, which stays as the reference for rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.data.batch import Batch
from keepstep.data.chat.files import NumberedRow, RejectedRow
from keepstep.data.chat.prepared_rows import ChatRows
from keepstep.data.chat.rows import Conversation, Message, answer_place
from keepstep.data.loader import Loader


@dataclass(frozen=True)
class Prompted:
    """A prompt as tokens, and the conversation whose last message is the reference answer."""

    tokens: list[int]
    conversation: Conversation

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the model answers."""
        return self.conversation.messages[:-1]

    @property
    def reference(self) -> Message:
        """The answer of the data."""
        return self.conversation.messages[-1]


def until_answer(item: NumberedRow | RejectedRow) -> NumberedRow | RejectedRow:
    """The conversation up to the assistant's first answer, which alone carries a loss."""
    if isinstance(item, RejectedRow):
        return item
    turn = answer_place(item.conversation)
    if turn is None:
        return item.reject("there is no user message before the assistant's first answer")
    before = [
        {**message, "weight": 0} if message["role"] == "assistant" else message
        for message in item.conversation.messages[:turn]
    ]
    asked = Conversation((*before, item.conversation.messages[turn]), item.conversation.tools)
    return NumberedRow(item.file, item.row, asked)


class PromptSet:
    """The prompts of training and then of validation, by number."""

    def __init__(self, parts: Sequence[tuple[ChatRows, Path]]) -> None:
        self._parts = parts
        self._lines = [path.read_text(encoding="utf-8").splitlines() for _, path in parts]

    def __getitem__(self, number: int) -> Prompted:
        for (rows, _), lines in zip(self._parts, self._lines, strict=True):
            if number < len(lines):
                tokens, loss = rows.conversation(number)
                row = json.loads(lines[number])
                conversation = Conversation(tuple(row["messages"]), tuple(row.get("tools", ())))
                return Prompted(tokens[: int(loss.argmax())].tolist(), conversation)
            number -= len(lines)
        raise IndexError(number)


class PromptLoader(Loader):
    """A sample is one answer; `num_generations` samples in a row answer the same prompt."""

    def __init__(
        self, source: ChatRows, num_generations: int, *, seed: int, shuffle: bool, first_number: int = 0
    ) -> None:
        super().__init__(source, seed=seed, shuffle=shuffle)
        self._num_generations, self._first_number = num_generations, first_number

    @property
    def samples_per_epoch(self) -> int:
        """Answers before a prompt is asked again."""
        return self._source.count * self._num_generations

    @property
    def order_facts(self) -> dict[str, Any]:
        """Everything that decides which prompt a sample number names."""
        facts: Mapping[str, Any] = super().order_facts
        return {**facts, "num_generations": self._num_generations}

    def rows(self, first_sample: int, count: int) -> Batch:
        """The prompts of these samples: their numbers, in place of tokens that are not written yet."""
        prompts = max(1, count // self._num_generations)
        order = self._order(first_sample // self._num_generations, prompts) + self._first_number
        numbers = np.asarray(order, dtype=np.int64)[:, None]
        return Batch(numbers, numbers, None, None, first_sample)
