"""`keepstep eval tools`: ask a model questions and check the tool calls in its answers."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, KeepstepError
from keepstep.core.files import write_atomic
from keepstep.data.chat.files import NumberedRow, RejectedRow, read_conversations
from keepstep.data.chat.generated import GENERATED, generate_rows
from keepstep.data.chat.rows import Conversation, Message, answer_place, calls_of
from keepstep.evaluate.ast_check import Call, MalformedCall, Task, ToolReport, judge, parse_calls, summarise
from keepstep.evaluate.chat_model import Prompt, Sampling
from keepstep.evaluate.remote_model import AnyModel

TEST_SEED = 7_919
"""Seed of the generated questions: the same for every model, from the split that no training uses. Change it after the
answers were read while tuning a model, because the questions are no longer unseen then."""


@dataclass(frozen=True)
class Question:
    """A prompt and the calls of a right answer."""

    prompt: Prompt
    task: Task
    conversation: Conversation
    """The row that it comes from."""


@dataclass(frozen=True)
class Answered:
    """The report, and every answer as a JSON object."""

    report: ToolReport
    lines: list[dict[str, Any]]

    @property
    def mean_reward(self) -> float | None:
        """Mean of a reward plug-in's scores; None without one."""
        scores = [line["reward"] for line in self.lines if "reward" in line]
        return sum(scores) / len(scores) if scores else None


Reward = Callable[..., float]
"""A plug-in of the group `keepstep.rewards`: called with messages, answer and expected, it returns a score."""


def load_questions(path: str, rows: int) -> list[Question]:
    """The first `rows` questions of a conversation file, or generated ones with held-out functions and values."""
    if path in GENERATED:
        generated = generate_rows(path, rows, TEST_SEED, "test")
        return [question(row.conversation, row.category) for row in generated]
    found = list(_from_file(Path(path), rows))
    if not found:
        raise DataError(f"{path} holds no question: no row with tools and an answer", "rows need messages and tools")
    return found


def _from_file(path: Path, rows: int) -> Iterator[Question]:
    rejected = without_tools = 0
    for item in read_conversations(path):
        reason = item.reason if isinstance(item, RejectedRow) else _question_problem(item.conversation)
        if reason:
            rejected += 1
            print(f"{item.file} row {item.row}: {reason}", file=sys.stderr)
        elif isinstance(item, NumberedRow) and not item.conversation.tools:
            without_tools += 1
        elif isinstance(item, NumberedRow) and rows:
            rows -= 1
            yield question(item.conversation)
    if rejected:
        print(f"{rejected} rows were rejected and not asked", file=sys.stderr)
    if without_tools:
        print(f"{without_tools} rows have no tools and were not asked", file=sys.stderr)


def _question_problem(conversation: Conversation) -> str:
    """Why a row with tools cannot be used as a question; empty if it can."""
    turn = answer_place(conversation)
    if not conversation.tools:
        return ""
    if turn is None:
        return "there is no user message before the assistant's first answer"
    try:
        expected_calls(conversation.messages[turn])
    except MalformedCall as bad:
        return f"the call in its answer cannot be parsed: {bad}"
    return ""


def question(conversation: Conversation, category: str = "") -> Question:
    """The conversation up to the assistant's first answer, and the calls of that answer as the right ones."""
    turn = answer_place(conversation)
    assert turn is not None, "checked before"
    expected = expected_calls(conversation.messages[turn])
    prompt = Prompt(conversation.messages[:turn], conversation.tools)
    task = Task(category or _category(conversation, len(expected)), conversation.tools, expected)
    return Question(prompt, task, conversation)


def expected_calls(message: Message) -> list[Call]:
    """The calls of a row's own answer, parsed from its text if they are written there. Raises MalformedCall.

    Otherwise a row with `<tool_call>…` in its content would expect no call, and its own answer would be wrong.
    """
    return calls_of(message) or parse_calls(message["content"])


def _category(conversation: Conversation, calls: int) -> str:
    if not calls:
        return "irrelevance"
    if calls > 1:
        return "parallel"
    return "simple" if len(conversation.tools) == 1 else "multiple"


def ask(
    model: AnyModel,
    questions: list[Question],
    sampling: Sampling,
    batch: int,
    progress: Callable[[int], None] = lambda _: None,
    reward: Reward | None = None,
) -> Answered:
    """Ask all questions and check the answers; `reward` scores each of them as well."""
    answers = model.answers([item.prompt for item in questions], sampling, batch, progress)
    verdicts = [judge(item.task, text) for item, text in zip(questions, answers, strict=True)]
    lines = [
        {
            "category": item.task.category,
            "request": item.prompt.messages[-1]["content"],
            "expected": [{"name": name, "arguments": arguments} for name, arguments in item.task.expected],
            "answer": text,
            "error": verdict.error,
        }
        for item, text, verdict in zip(questions, answers, verdicts, strict=True)
    ]
    if reward is not None:
        for item, line in zip(questions, lines, strict=True):
            line["reward"] = score(reward, item.prompt.messages, line["answer"], line["expected"])
    return Answered(summarise(verdicts), lines)


def answered_partly(asked: Sequence[Question], right: Sequence[bool], attempts: int) -> list[Question]:
    """The questions that some of their attempts, which follow each other, answered rightly and others did not."""
    shares = [sum(right[first : first + attempts]) for first in range(0, len(asked), attempts)]
    return [asked[place * attempts] for place, count in enumerate(shares) if 0 < count < attempts]


def score(reward: Reward, messages: Sequence[Message], answer: str, expected: list[dict[str, Any]]) -> float:
    """What a reward plug-in returns for one answer, as a finite number."""
    try:
        value = float(reward(messages=messages, answer=answer, expected=expected))
    except Exception as error:  # the code of others may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        raise KeepstepError(f"the reward failed: {problem}", f"correct it; the answer was {answer[:80]!r}") from error
    if not math.isfinite(value):
        raise KeepstepError(f"the reward is {value} for the answer {answer[:80]!r}", "return a finite number")
    return value


def write_lines(lines: Iterable[dict[str, Any]], path: Path) -> None:
    """One JSON object a line."""
    write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
