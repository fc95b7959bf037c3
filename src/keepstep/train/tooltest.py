"""`keepstep eval tools`: questions, a model's answers, and how right its calls are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError
from keepstep.core.files import write_atomic
from keepstep.data.chat_files import NumberedRow, Reject, read_conversations
from keepstep.data.chat_generate import generate_rows
from keepstep.data.chat_loader import GENERATED
from keepstep.data.chat_rows import Conversation, Message, calls_of
from keepstep.evaluate.calls import Call, Malformed, parse_calls
from keepstep.evaluate.toolcalls import Task, ToolReport, judge, summarise
from keepstep.train.speaker import Prompt, Sampling, Speaker

TEST_SEED = 7_919
"""Generated questions: the same for every model, and of the split that no training sees. Change it once somebody has
read answers to them while tuning: a figure on questions that were looked at says little."""


@dataclass(frozen=True)
class Question:
    """A prompt and what a right answer calls."""

    prompt: Prompt
    task: Task


@dataclass(frozen=True)
class Answered:
    """The report, and every answer for whoever wants to look."""

    report: ToolReport
    lines: list[dict[str, Any]]


def load_questions(path: str, rows: int) -> list[Question]:
    """The first `rows` questions of a conversation file, or generated ones of held-out functions and values."""
    if path == GENERATED:
        generated = generate_rows(rows, TEST_SEED, "test")
        return [question(row.conversation, row.category) for row in generated]
    found = list(_from_file(Path(path), rows))
    if not found:
        raise DataError(f"{path} holds no question: no row with tools and an answer", "rows need messages and tools")
    return found


def _from_file(path: Path, rows: int) -> Iterator[Question]:
    refused = without_tools = 0
    for item in read_conversations(path):
        reason = item.reason if isinstance(item, Reject) else _why_not_asked(item.conversation)
        if reason:
            refused += 1
            print(f"{item.file} row {item.row}: {reason}", file=sys.stderr)
        elif isinstance(item, NumberedRow) and not item.conversation.tools:
            without_tools += 1
        elif isinstance(item, NumberedRow) and rows:
            rows -= 1
            yield question(item.conversation)
    if refused:
        print(f"{refused} rows were refused and not asked", file=sys.stderr)
    if without_tools:
        print(f"{without_tools} rows have no tools and were not asked", file=sys.stderr)


def _why_not_asked(conversation: Conversation) -> str:
    """Why a row with tools makes no question; empty where it makes one."""
    turn = answer_place(conversation)
    if not conversation.tools:
        return ""
    if turn is None:
        return "nobody asks anything before the assistant speaks"
    try:
        wanted_calls(conversation.messages[turn])
    except Malformed as bad:
        return f"the answer calls something, but it cannot be read: {bad}"
    return ""


def question(conversation: Conversation, category: str = "") -> Question:
    """The conversation up to the assistant's first answer, and that turn's calls as the right ones."""
    turn = answer_place(conversation)
    assert turn is not None, "somebody asks something"
    expected = wanted_calls(conversation.messages[turn])
    prompt = Prompt(conversation.messages[:turn], conversation.tools)
    return Question(prompt, Task(category or _category(conversation, len(expected)), conversation.tools, expected))


def wanted_calls(message: Message) -> list[Call]:
    """The calls of a row's own answer, read from its text where they are written there. Raises Malformed.

    Else a row whose answer is `<tool_call>…` in its content would want no call, and its very answer would be wrong.
    """
    return calls_of(message) or parse_calls(message["content"])


def answer_place(conversation: Conversation) -> int | None:
    """Where the assistant first answers somebody; what it says before, a greeting say, is no answer.

    Nor is what nobody is to learn from: it may be there because it is wrong.
    """
    roles = [item["role"] if item.get("weight") != 0 else "" for item in conversation.messages]
    asked = roles.index("user") if "user" in roles else len(roles)
    return roles.index("assistant", asked) if "assistant" in roles[asked:] else None


def _category(conversation: Conversation, calls: int) -> str:
    if not calls:
        return "irrelevance"
    if calls > 1:
        return "parallel"
    return "simple" if len(conversation.tools) == 1 else "multiple"


def ask(
    speaker: Speaker,
    questions: list[Question],
    sampling: Sampling,
    batch: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Answered:
    """Ask all questions and judge the answers."""
    answers = speaker.answers([item.prompt for item in questions], sampling, batch, progress)
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
    return Answered(summarise(verdicts), lines)


def write_answers(lines: list[dict[str, Any]], path: Path) -> None:
    """One JSON line for each answer."""
    write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
