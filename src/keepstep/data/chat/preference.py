"""Preference data: pairs of answers to one prompt, in the formats that are published for DPO and KTO.

| keys | meaning |
|---|---|
| `prompt`, `chosen`, `rejected` | a prompt and two answers, as texts or as lists of messages |
| `chosen`, `rejected` | two whole conversations; the messages that both start with are the prompt |
| `prompt`, `completion`, `label` | one answer and whether it is wanted (KTO) |

`tools` may come with each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.data.chat.files import SUFFIXES, RejectedRow, conversation_files, read_row, rows_of_files
from keepstep.data.chat.rows import BadRow, Conversation, Message, canonical, checked_object, cleaned

PreferenceMethod = Literal["none", "dpo", "ipo", "kto"]
_Parsed = tuple[Conversation, list[tuple[tuple[Message, ...], bool]]]


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt, with its place in the files."""

    file: str
    row: int
    prompt: Conversation
    messages: tuple[Message, ...]
    label: bool

    @property
    def conversation(self) -> Conversation:
        """Prompt and answer; only the answer carries a loss."""
        return with_answer(self.prompt, self.messages)


@dataclass(frozen=True)
class AnswerPair:
    """Two documents that are compared: a chosen and a rejected answer or, for KTO, an answer and one that was given to
    another prompt, which measures how far the model has moved."""

    file: str
    row: int
    prompt: Conversation
    conversations: tuple[Conversation, ...]
    label: bool = True

    def reject(self, reason: str) -> RejectedRow:
        """This row, rejected after all."""
        return RejectedRow(self.file, self.row, reason, [item.row() for item in self.conversations])


def check_preference_data(data: DataConfig) -> None:
    """Raise for data that cannot hold pairs of answers."""
    if data.blend or not conversation_files(Path(data.path)):
        raise DataError(
            f"preference learning needs files with pairs of answers, and data.{'blend' if data.blend else 'path'} is "
            f"{dict(data.blend) or data.path}",
            f"give a file or folder of {', '.join(SUFFIXES)} as data.path, with chosen and rejected (dpo, ipo) or "
            "completion and label (kto)",
        )


def read_pairs(path: Path, *, kto: bool) -> Iterator[AnswerPair | RejectedRow]:
    """Every row of the files as a pair, or rejected with a reason; for `kto` a row of two answers becomes two pairs."""
    if not kto:
        yield from (item if isinstance(item, RejectedRow) else _pair(*item) for item in _read(path, labelled=False))
        return
    answers: list[Answer] = []
    for item in _read(path, labelled=True):
        if isinstance(item, RejectedRow):
            yield item
        else:
            answers += item
    yield from _mismatched(answers, path)


def _pair(chosen: Answer, rejected: Answer) -> AnswerPair:
    return AnswerPair(chosen.file, chosen.row, chosen.prompt, (chosen.conversation, rejected.conversation))


def _mismatched(answers: Sequence[Answer], path: Path) -> Iterator[AnswerPair]:
    """Each answer with the latest answer before it that was given to another prompt; the first ones with the last."""
    if answers and all(answer.prompt == answers[0].prompt for answer in answers):
        raise DataError(
            f"{path} has answers to one prompt alone, but KTO compares answers to different prompts",
            "give rows with different prompts",
        )
    # Those of the last prompt are the ones before the first.
    other = next((each for each in reversed(answers) if each.prompt != answers[0].prompt), None)
    before: Answer | None = None
    for answer in answers:
        if before is not None and before.prompt != answer.prompt:
            other = before
        assert other is not None
        documents = (answer.conversation, with_answer(answer.prompt, other.messages))
        yield AnswerPair(answer.file, answer.row, answer.prompt, documents, answer.label)
        before = answer


def _read(path: Path, *, labelled: bool) -> Iterator[tuple[Answer, ...] | RejectedRow]:
    def as_json(parsed: _Parsed) -> Any:
        return [parsed[0].row(), *(messages for messages, _ in parsed[1])]

    for file, number, row in rows_of_files(path):
        found = read_row(file, number, row, partial(parse_row, labelled=labelled), as_json)
        if isinstance(found, RejectedRow):
            yield found
        else:
            prompt, answers = found
            yield tuple(Answer(file, number, prompt, messages, label) for messages, label in answers)


def parse_row(row: Any, *, labelled: bool) -> _Parsed:
    """The prompt, and each answer with its label. Raises BadRow."""
    row = checked_object(row, "the row")
    if "chosen" in row and "rejected" in row:
        chosen, rejected = (_messages(row, name) for name in ("chosen", "rejected"))
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
        if shared == len(chosen) or shared == len(rejected):
            raise BadRow("chosen and rejected are equal" if chosen == rejected else "one answer continues the other")
        prompt = _prompt(row, chosen[:shared], chosen[shared:])
        if not _is_answer(rejected[shared:]):
            raise BadRow(f"rejected continues with a message of the {rejected[shared]['role']}")
        return prompt, [(chosen[shared:], True), (rejected[shared:], False)]
    if not labelled:
        raise BadRow("it has no chosen and rejected" + (": label is for kto" if "label" in row else ""))
    if "completion" not in row or "label" not in row:
        raise BadRow("it has neither chosen and rejected nor completion and label")
    if row["label"] not in (True, False):
        raise BadRow(f"its label is {row['label']!r}, which is neither true nor false")
    answer, label = _messages(row, "completion"), bool(row["label"])
    if not _is_answer(answer):
        raise BadRow(f"completion starts with a message of the {answer[0]['role']}")
    # An unwanted answer may be wrong in every way: only the prompt has to be right.
    return _prompt(row, (), answer if label else [{"role": "assistant", "content": "?"}]), [(answer, label)]


def _prompt(row: Mapping[str, Any], shared: Sequence[Message], answer: Sequence[Message]) -> Conversation:
    """What both answers follow. Both may repeat the prompt as messages, as UltraFeedback's do."""
    before = tuple(shared) if shared else _messages(row, "prompt") if "prompt" in row else ()
    if not before:
        raise BadRow("it has no prompt, and its answers are no conversations with a common start")
    if shared and "prompt" in row and _is_answer(shared):
        before = (*_messages(row, "prompt"), *shared)
    # As context an earlier answer carries no loss, which weight 0 says.
    context = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in before]
    if not _is_answer(answer):
        raise BadRow(f"chosen continues with a message of the {answer[0]['role']}")
    checked = canonical([*context, *answer], row.get("tools"))
    return Conversation(checked.messages[: len(context)], checked.tools)


def with_answer(prompt: Conversation, messages: Sequence[Message]) -> Conversation:
    """A conversation that ends with this answer. It may be a bad one: it is not checked against the tools."""
    return Conversation((*prompt.messages, *messages), prompt.tools)


def _is_answer(messages: Sequence[Message]) -> bool:
    return bool(messages[0]["role"] == "assistant")


def _messages(row: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """A prompt or an answer as messages; a text is what the user asks or the assistant answers."""
    value = row[name]
    if isinstance(value, str):
        value = [{"role": "user" if name == "prompt" else "assistant", "content": value}]
    try:
        return cleaned(value)
    except BadRow as bad:
        raise BadRow(f"{name}: {bad}") from None
