"""A function-calling set of any size, offline: requests, right calls, and requests that need no call.

Row i is a pure function of (seed, split, i). The two splits share neither functions nor argument values, so an
evaluation on `test` cannot be passed by remembering `train`. Most functions of `train` are put together anew from the
parts of real ones: a few hundred functions could be learnt by heart, endless ones have to be read in the prompt.
`test` asks for the real functions of its own, as they are.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from keepstep.data.chat_functions import Function, Parameter, standard_functions
from keepstep.data.chat_rows import Conversation, call, canonical

Split = Literal["train", "test"]
Category = Literal["simple", "multiple", "parallel", "irrelevance"]

CATEGORIES: tuple[Category, ...] = ("simple", "multiple", "parallel", "irrelevance")
_WEIGHTS = (2, 3, 2, 3)
_SHORT_WEIGHTS = (2, 3, 0, 4)
TEST_SHARE = 0.15
_MOST_TOOLS = 3
_RECOMBINED_SHARE = 0.85
_SHORT_SHARE = 0.5
"""Rows of `train` with small tools and few words: reading is learnt on short texts first, and cheaply."""
_MADE_UP_SHARE = 0.3
"""Names and values of `train` that are no words: the held-out ones are none either to a model that never met them."""
_RELATED_SHARE = 0.25
"""Made-up functions of `train` that look like another one of their row."""
FOLLOW_UP_SHARE = 0.05
"""Rows that go on after the call: the tool answers and the assistant says so."""

_BRIEF_REQUESTS = ("I need `{name}` with {details}.", "Run `{name}`: {details}.")
_REQUESTS = (
    "Use `{name}` to {what}: {details}.",
    "Call `{name}` to {what}, with {details}.",
    "With `{name}`, {what}: {details}.",
    *_BRIEF_REQUESTS,
)
_REQUESTS_BY_SUMMARY = (
    "Please {what}: {details}.",
    "I want to {what}, with {details}.",
    "Can you {what}? Take {details}.",
)
_BY_SUMMARY_SHARE = 0.1
"""Requests that only describe what they want; the others name the function too, as people do who know their tools."""
_PAIRS = ("`{name}` {value}", "`{name}` = {value}", "`{name}`: {value}")
_REFUSAL = "None of these tools can do that."
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
    short = split == "train" and draw.random() < _SHORT_SHARE
    category = draw.choices(CATEGORIES, _SHORT_WEIGHTS if short else _WEIGHTS)[0]
    fewest, most = (1, 2) if short and category == "irrelevance" else (2, _MOST_TOOLS)
    shown = 1 if category == "simple" else draw.randint(fewest, most)
    turns = draw.randint(1, 4) if short else draw.randint(1, 2) if split == "train" else 1
    chosen = _choose_functions(shown + min(turns, 3), draw, split)
    if short:
        chosen = [_shortened(function) for function in chosen]
    tools, absent = chosen[:shown], chosen[shown:]
    messages = _turn(category, tools, absent[0], draw, split)
    # Rows of `train` go on with further requests: when to refuse takes more practice than how to call.
    for turn in range(1, turns):
        kind = draw.choices(CATEGORIES, (4, 0, 1 if shown > 1 and not short else 0, 4))[0]
        messages += _turn(kind, tools, absent[turn % len(absent)], draw, split, brief=True)
    return GeneratedRow(canonical(messages, [function.tool() for function in tools]), category)


def _turn(
    kind: Category,
    tools: Sequence[Function],
    absent: Function,
    draw: random.Random,
    split: Split,
    *,
    brief: bool = False,
) -> list[dict[str, Any]]:
    """A request and what is said to it."""
    if kind == "irrelevance":
        request = _Task([absent], draw, split).request(brief)
        said = f"`{absent.name}` is none of these tools." if f"`{absent.name}`" in request else _REFUSAL
        return [{"role": "user", "content": request}, {"role": "assistant", "content": said}]
    task = _Task(draw.sample(tools, 2 if kind == "parallel" else 1), draw, split)
    calls = [call(name, arguments) for name, arguments in task.calls]
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.request(brief)}]
    # Said before anything is decided: whether there is such a tool is easier to tell with its name at hand.
    said = ", ".join(f"`{name}`" for name, _ in task.calls) + ":"
    messages.append({"role": "assistant", "content": said, "tool_calls": calls})
    if draw.random() < FOLLOW_UP_SHARE:
        result = draw.choice(_RESULTS)
        messages += [{"role": "tool", "content": result, "name": name} for name, _ in task.calls]
        messages.append({"role": "assistant", "content": f"The answer: {result}."})
    return messages


def _choose_functions(count: int, draw: random.Random, split: Split) -> list[Function]:
    chosen: list[Function] = list(draw.sample(split_functions(split), count))
    if split == "train":
        for place, item in enumerate(chosen):
            if draw.random() < _RECOMBINED_SHARE:
                chosen[place] = _recombined(item, draw, chosen[:place])
    # Two tools of one name, or of one summary, would make the right answer a guess.
    unique = len({item.name for item in chosen}) == len({item.summary for item in chosen}) == count
    return chosen if unique else _choose_functions(count, draw, split)


def _shortened(function: Function) -> Function:
    """The same with three words of its summary and one parameter."""
    return Function(function.name, " ".join(function.summary.split()[:3]), function.parameters[:1])


def _recombined(function: Function, draw: random.Random, others: Sequence[Function]) -> Function:
    """A function that never was: the shape of one, with words and parameters of all others and made-up ones.

    It may share parts with the `others` of its row, as functions of one module do: a name that is only half the same
    is another function.
    """
    pool = _parts()
    parts = [_name_part(pool.names, draw) for _ in range(draw.randint(2, 3))]
    words = [word if draw.random() < 0.3 else _word(pool.words, draw, 0.1) for word in function.summary.split()]
    words[0] = draw.choice(pool.verbs)
    kinds = [draw.choice((item.kind, "string", "integer")) for item in function.parameters]
    named: dict[str, None] = {}
    if others and draw.random() < _RELATED_SHARE:
        near = draw.choice(others)
        shared = near.name.split("_")[:-1]
        parts = [*shared[:2], parts[-1]] if draw.random() < 0.7 else [parts[0], near.name.split("_")[-1]]
        named[draw.choice(near.parameters).name] = None
        words[: draw.randint(0, 2)] = near.summary.split()[: draw.randint(0, 2)]
    while len(named) < len(kinds):
        named[_word(pool.parameters, draw, _MADE_UP_SHARE)] = None
    parameters = tuple(
        Parameter(new, kind, old.required) for new, kind, old in zip(named, kinds, function.parameters, strict=True)
    )
    return Function("_".join(parts), " ".join(words), parameters)


def _name_part(known: Sequence[str], draw: random.Random) -> str:
    """Names are written in every way there is."""
    part = _word(known, draw, _MADE_UP_SHARE)
    match draw.randrange(16):
        case 0:
            return part.upper()
        case 1 | 2:
            return part.capitalize() + _word(known, draw, _MADE_UP_SHARE).capitalize()
        case 3:
            return part.capitalize()
        case _:
            return part


def _word(known: Sequence[str], draw: random.Random, made_up_share: float) -> str:
    """A known word, or one made up of the beginning of one and the end of another: what is copied must be read."""
    plain = _parts().plain
    if draw.random() >= made_up_share:
        return draw.choice(known) if draw.random() < 0.7 else draw.choice(plain)
    first, last = draw.choice(plain), draw.choice(plain)
    return first[: draw.randint(2, max(2, len(first) - 2))] + last[-draw.randint(1, max(1, len(last) - 3)) :]


@dataclass(frozen=True)
class _Parts:
    names: tuple[str, ...]
    verbs: tuple[str, ...]
    words: tuple[str, ...]
    parameters: tuple[str, ...]
    plain: tuple[str, ...]


@cache
def _parts() -> _Parts:
    functions = split_functions("train")
    summaries = [function.summary.split() for function in functions]
    return _Parts(
        names=_unique(part for function in functions for part in function.name.split("_") if part),
        verbs=_unique(words[0] for words in summaries),
        words=_unique(word for words in summaries for word in words[1:]),
        parameters=_unique(item.name for function in functions for item in function.parameters),
        plain=split_words("train"),
    )


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(words)))


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

    def request(self, brief: bool = False) -> str:
        """The words of it."""
        pairs = zip(self._functions, self.calls, strict=True)
        return " ".join(self._one(function, arguments, brief) for function, (_, arguments) in pairs)

    def _one(self, function: Function, arguments: dict[str, Any], brief: bool) -> str:
        draw = self._draw
        pair = draw.choice(_PAIRS)
        pairs = [pair.format(name=name, value=_spoken(value)) for name, value in arguments.items()]
        details = pairs[0] if len(pairs) == 1 else f"{', '.join(pairs[:-1])} and {pairs[-1]}"
        by_summary = not brief and draw.random() < _BY_SUMMARY_SHARE
        forms = _REQUESTS_BY_SUMMARY if by_summary else _BRIEF_REQUESTS if brief else _REQUESTS
        return draw.choice(forms).format(name=function.name, what=function.summary, details=details)


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
            words = [_drawn_word(draw, split) for _ in range(draw.choice((1, 1, 2)))]
            return draw.choice("-./").join(words)


def _drawn_word(draw: random.Random, split: Split) -> str:
    return _word(split_words("train"), draw, _MADE_UP_SHARE) if split == "train" else draw.choice(split_words("test"))


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
    texts = (f"{function.name.replace('_', ' ')} {function.summary}" for function in standard_functions())
    words = {word for text in texts for word in re.findall(r"\b[a-z]{3,10}\b", text)}
    return tuple(sorted(word for word in words if _split_of(word) == split))


def _split_of(text: str) -> Split:
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") / 2**32
    return "test" if share < TEST_SHARE else "train"
