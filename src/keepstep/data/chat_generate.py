"""A function-calling set of any size, offline: requests, right calls, and requests that need no call.

Row i is a pure function of (seed, split, i). The two splits share neither functions nor argument values, so an
evaluation on `test` cannot be passed by remembering `train`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from keepstep.data.chat_functions import Function, Parameter, standard_functions
from keepstep.data.chat_rows import Conversation, call, canonical

Split = Literal["train", "test"]
Category = Literal["simple", "multiple", "parallel", "irrelevance"]

CATEGORIES: tuple[Category, ...] = ("simple", "multiple", "parallel", "irrelevance")
_WEIGHTS = (2, 3, 2, 2)
TEST_SHARE = 0.15
_MOST_TOOLS = 3
FOLLOW_UP_SHARE = 0.05
"""Rows that go on after the call: the tool answers and the assistant says so."""

_REQUESTS = (
    "Please {what}. {details}",
    "{What}. {details}",
    "I want to {what}. {details}",
    "Can you {what}? {details}",
    "{What}, please. {details}",
)
_DETAILS = ("Use {0}.", "With {0}.", "Take {0}.", "{0}.")
_PAIRS = ("{name} {value}", "{name} = {value}", "{name} is {value}")
_REFUSALS = (
    "None of these tools can do that.",
)
_RESULTS = ("ok", "done", "failed", "empty")


@dataclass(frozen=True)
class GeneratedRow:
    """A conversation and what kind of task it is."""

    conversation: Conversation
    category: Category

    def row(self) -> dict[str, Any]:
        """The canonical JSON object with its category."""
        return {**self.conversation.row(), "category": self.category}


def generate_rows(count: int, seed: int, split: Split, first: int = 0) -> Iterator[GeneratedRow]:
    """Rows [first, first + count) of an endless set."""
    for index in range(first, first + count):
        yield generate_row(index, seed, split)


def generate_row(index: int, seed: int, split: Split) -> GeneratedRow:
    """One row."""
    draw = random.Random(f"{seed} {split} {index}")
    category = draw.choices(CATEGORIES, _WEIGHTS)[0]
    functions = split_functions(split)
    shown = 1 if category == "simple" else draw.randint(2, _MOST_TOOLS)
    chosen = draw.sample(functions, shown + 1)
    tools, absent = chosen[:shown], chosen[shown]
    if category == "irrelevance":
        task = _Task([absent], draw, split)
        return GeneratedRow(_conversation(tools, task.request(), draw.choice(_REFUSALS), []), category)
    wanted = draw.sample(tools, 2) if category == "parallel" else [draw.choice(tools)]
    task = _Task(wanted, draw, split)
    calls = [call(name, arguments) for name, arguments in task.calls]
    follow_up = draw.choice(_RESULTS) if draw.random() < FOLLOW_UP_SHARE else None
    return GeneratedRow(_conversation(tools, task.request(), "", calls, follow_up), category)


def _conversation(
    tools: Sequence[Function], request: str, said: str, calls: list[dict[str, Any]], result: str | None = None
) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": "user", "content": request}]
    messages.append({"role": "assistant", "content": said, "tool_calls": calls})
    if result is not None:
        messages += [{"role": "tool", "content": result, "name": item["function"]["name"]} for item in calls]
        messages.append({"role": "assistant", "content": f"The answer: {result}."})
    return canonical(messages, [function.tool() for function in tools])


class _Task:
    """What is asked for: functions with values for their required and some of their other parameters."""

    def __init__(self, functions: Sequence[Function], draw: random.Random, split: Split) -> None:
        self._draw = draw
        self._functions = functions
        self.calls: list[tuple[str, dict[str, Any]]] = []
        for function in functions:
            given = [item for item in function.parameters if item.required or draw.random() < 0.3]
            given = given or [draw.choice(function.parameters)]
            self.calls.append((function.name, {item.name: _value(item, draw, split) for item in given}))

    def request(self) -> str:
        """The words of it."""
        return " ".join(
            self._one(function, arguments)
            for function, (_, arguments) in zip(self._functions, self.calls, strict=True)
        )

    def _one(self, function: Function, arguments: dict[str, Any]) -> str:
        draw = self._draw
        pair = draw.choice(_PAIRS)
        pairs = [pair.format(name=name, value=_spoken(value)) for name, value in arguments.items()]
        listed = pairs[0] if len(pairs) == 1 else f"{', '.join(pairs[:-1])} and {pairs[-1]}"
        what = function.summary
        return draw.choice(_REQUESTS).format(
            what=what, What=what[0].upper() + what[1:], details=draw.choice(_DETAILS).format(listed)
        )


def _spoken(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _value(parameter: Parameter, draw: random.Random, split: Split) -> Any:
    match parameter.kind:
        case "boolean":
            return draw.random() < 0.5
        case "integer":
            return _drawn_number(draw, split)
        case "number":
            return _drawn_number(draw, split) + draw.choice((0.25, 0.5, 0.75))
        case "string":
            return " ".join(draw.sample(split_words(split), draw.choice((1, 1, 2))))


def _drawn_number(draw: random.Random, split: Split) -> int:
    while True:
        number = draw.randint(2, 9999)
        if _split_of(str(number)) == split:
            return number


@cache
def split_functions(split: Split) -> tuple[Function, ...]:
    """The functions that only this split uses."""
    return tuple(function for function in standard_functions() if _split_of(function.name) == split)


@cache
def split_words(split: Split) -> tuple[str, ...]:
    """Words for argument values: those of all summaries and names, each in one split only."""
    words = {
        word for function in standard_functions() for word in re.findall(r"[a-z]{3,10}", f"{function.name} {function.summary}".lower())
    }
    return tuple(sorted(word for word in words if _split_of(word) == split))


def _split_of(text: str) -> Split:
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") / 2**32
    return "test" if share < TEST_SHARE else "train"
