"""A generated function-calling data set of any size: requests with the right calls, and requests that need no call.

Row i is a pure function of (seed, split, i). The two splits share neither functions nor argument values, so memorising
`train` does not help on `test`. Most functions of `train` are recombined from parts of real ones: a few hundred
functions could be memorised, but an endless supply has to be read from the prompt. `test` uses real functions.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from keepstep.data.chat.functions import Function, Parameter, standard_functions
from keepstep.data.chat.rows import Conversation, call, canonical

Split = Literal["train", "test"]
Category = Literal["simple", "multiple", "parallel", "irrelevance"]
_Calls = list[tuple[str, dict[str, Any]]]

CATEGORIES: tuple[Category, ...] = ("simple", "multiple", "parallel", "irrelevance")
_WEIGHTS = (2, 3, 2, 3)
_SHORT_WEIGHTS = (2, 3, 0, 4)
TEST_SHARE = 0.15
_MOST_TOOLS = 3
_RECOMBINED_SHARE = 0.85
_SHORT_SHARE = 0.5
"""Rows of `train` with small tools and short requests: copying from the prompt is cheaper to learn on short texts."""
_MADE_UP_SHARE = 0.3
"""Invented words among the names and values of `train`: words of `test` are as new to the model."""
_RELATED_SHARE = 0.25
"""Recombined functions of `train` that resemble another function of their row."""
FOLLOW_UP_SHARE = 0.05
"""Rows that continue after the call with the tool's answer and a reply of the assistant."""

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
"""Requests that only describe the task; the others also name the function."""
_PAIRS = ("`{name}` {value}", "`{name}` = {value}", "`{name}`: {value}")
_REFUSAL = "None of these tools can do that."
_RESULTS = ("ok", "done", "failed", "empty")


@dataclass(frozen=True)
class GeneratedRow:
    """A conversation and its category."""

    conversation: Conversation
    category: Category


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
        # Three words of the summary, and one parameter.
        chosen = [Function(each.name, " ".join(each.summary.split()[:3]), each.parameters[:1]) for each in chosen]
    tools, absent = chosen[:shown], chosen[shown:]
    messages = _turn(category, tools, absent[0], draw, split)
    # Rows of `train` have further requests: when to refuse needs more examples than how to call.
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
    """A request and the answer to it."""
    if kind == "irrelevance":
        request = _request([absent], _drawn_calls([absent], draw, split), draw, brief)
        said = f"`{absent.name}` is none of these tools." if f"`{absent.name}`" in request else _REFUSAL
        return [{"role": "user", "content": request}, {"role": "assistant", "content": said}]
    functions = draw.sample(tools, 2 if kind == "parallel" else 1)
    calls = _drawn_calls(functions, draw, split)
    messages: list[dict[str, Any]] = [{"role": "user", "content": _request(functions, calls, draw, brief)}]
    # The name comes first: whether such a tool exists is easier to decide after the name is written.
    said = ", ".join(f"`{name}`" for name, _ in calls) + ":"
    messages.append({"role": "assistant", "content": said, "tool_calls": [call(*item) for item in calls]})
    if draw.random() < FOLLOW_UP_SHARE:
        result = draw.choice(_RESULTS)
        messages += [{"role": "tool", "content": result, "name": name} for name, _ in calls]
        messages.append({"role": "assistant", "content": f"The answer: {result}."})
    return messages


def _choose_functions(count: int, draw: random.Random, split: Split) -> list[Function]:
    chosen: list[Function] = list(draw.sample(split_functions(split), count))
    if split == "train":
        for place, item in enumerate(chosen):
            if draw.random() < _RECOMBINED_SHARE:
                chosen[place] = _recombined(item, draw, chosen[:place])
    # With two tools of the same name or summary, the right answer would be a guess.
    unique = len({item.name for item in chosen}) == len({item.summary for item in chosen}) == count
    return chosen if unique else _choose_functions(count, draw, split)


def _recombined(function: Function, draw: random.Random, others: Sequence[Function]) -> Function:
    """A new function with the shape of a real one, and words and parameters of others or invented ones.

    It may share parts with the `others` of its row, as functions of one module do: a name that is only partly the same
    is another function.
    """
    pool = _parts()
    parts = [_name_part(pool["names"], draw) for _ in range(draw.randint(2, 3))]
    words = [word if draw.random() < 0.3 else _word(pool["words"], draw, 0.1) for word in function.summary.split()]
    words[0] = draw.choice(pool["verbs"])
    kinds = [draw.choice((item.kind, "string", "integer")) for item in function.parameters]
    named: dict[str, None] = {}
    if others and draw.random() < _RELATED_SHARE:
        near = draw.choice(others)
        shared = near.name.split("_")[:-1]
        parts = [*shared[:2], parts[-1]] if draw.random() < 0.7 else [parts[0], near.name.split("_")[-1]]
        named[draw.choice(near.parameters).name] = None
        words[: draw.randint(0, 2)] = near.summary.split()[: draw.randint(0, 2)]
    while len(named) < len(kinds):
        named[_word(pool["parameters"], draw, _MADE_UP_SHARE)] = None
    parameters = tuple(
        Parameter(new, kind, old.required) for new, kind, old in zip(named, kinds, function.parameters, strict=True)
    )
    return Function("_".join(parts), " ".join(words), parameters)


def _name_part(known: Sequence[str], draw: random.Random) -> str:
    """A part of a name, in one of several spellings."""
    part = _word(known, draw, _MADE_UP_SHARE)
    spelling = draw.randrange(16)
    if spelling in (1, 2):
        return part.capitalize() + _word(known, draw, _MADE_UP_SHARE).capitalize()
    return part.upper() if spelling == 0 else part.capitalize() if spelling == 3 else part


def _word(known: Sequence[str], draw: random.Random, made_up_share: float) -> str:
    """A known word, or an invented one from the start of one word and the end of another, which can only be copied."""
    plain = split_words("train")
    if draw.random() >= made_up_share:
        return draw.choice(known) if draw.random() < 0.7 else draw.choice(plain)
    first, last = draw.choice(plain), draw.choice(plain)
    return first[: draw.randint(2, max(2, len(first) - 2))] + last[-draw.randint(1, max(1, len(last) - 3)) :]


@cache
def _parts() -> dict[str, tuple[str, ...]]:
    """Words of the functions of `train`, by where they occur."""
    functions = split_functions("train")
    summaries = [function.summary.split() for function in functions]
    found = {
        "names": {part for function in functions for part in function.name.split("_") if part},
        "verbs": {words[0] for words in summaries},
        "words": {word for words in summaries for word in words[1:]},
        "parameters": {item.name for function in functions for item in function.parameters},
    }
    return {use: tuple(sorted(words)) for use, words in found.items()}


def _drawn_calls(functions: Sequence[Function], draw: random.Random, split: Split) -> _Calls:
    """A call of each function, with values for its required and some of its optional parameters."""
    calls = []
    for function in functions:
        given = [item for item in function.parameters if item.required or draw.random() < 0.3]
        given = given or [draw.choice(function.parameters)]
        calls.append((function.name, {item.name: _value(item, draw, split) for item in given}))
    return calls


def _request(functions: Sequence[Function], calls: _Calls, draw: random.Random, brief: bool) -> str:
    texts = []
    for function, (_, arguments) in zip(functions, calls, strict=True):
        pair = draw.choice(_PAIRS)
        pairs = [pair.format(name=name, value=_spoken(value)) for name, value in arguments.items()]
        details = pairs[0] if len(pairs) == 1 else f"{', '.join(pairs[:-1])} and {pairs[-1]}"
        by_summary = not brief and draw.random() < _BY_SUMMARY_SHARE
        forms = _REQUESTS_BY_SUMMARY if by_summary else _BRIEF_REQUESTS if brief else _REQUESTS
        texts.append(draw.choice(forms).format(name=function.name, what=function.summary, details=details))
    return " ".join(texts)


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
            known, is_train = split_words(split), split == "train"
            count = draw.choice((1, 1, 2))
            words = [_word(known, draw, _MADE_UP_SHARE) if is_train else draw.choice(known) for _ in range(count)]
            return draw.choice("-./").join(words)


def _drawn_number(draw: random.Random, split: Split) -> int:
    while True:
        number = draw.randint(2, 9999)
        if split_of(str(number)) == split:
            return number


@cache
def split_functions(split: Split) -> tuple[Function, ...]:
    """The functions that only this split uses."""
    return tuple(function for function in standard_functions() if split_of(function.name) == split)


@cache
def split_words(split: Split) -> tuple[str, ...]:
    """Words for argument values: those of all summaries and names, each in one split only."""
    texts = (f"{function.name.replace('_', ' ')} {function.summary}" for function in standard_functions())
    words = {word for text in texts for word in re.findall(r"\b[a-z]{3,10}\b", text)}
    return tuple(sorted(word for word in words if split_of(word) == split))


def split_of(text: str) -> Split:
    """Which split uses a name or a value, by its hash."""
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") / 2**32
    return "test" if share < TEST_SHARE else "train"
