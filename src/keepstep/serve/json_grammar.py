"""Which texts are a beginning of JSON that fits a schema: what constrained decoding asks after every token.

A state is a stack of what must still come, the next thing first. A set of states is kept, because a text may be the
beginning of several alternatives. Each character leads from one set to the next; an empty set means that the text
cannot become valid any more.

`json_schema.py` makes the grammar of a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from typing import Literal as TypingLiteral

State = tuple[Any, ...]
States = frozenset[State]


@dataclass(eq=False)
class Literal:
    """One of these texts."""

    texts: tuple[str, ...]


@dataclass(eq=False)
class Text:
    """A string; its opening quote is still to come."""


@dataclass(eq=False)
class Number:
    """A number, or a whole number."""

    whole: bool


@dataclass(eq=False)
class Choice:
    """Any of these. None of them is a choice itself, or a few of those inside each other would be billions."""

    options: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Array:
    """A list of items."""

    item: Node
    fewest: int = 0
    most: int | None = None


@dataclass(eq=False)
class Object:
    """An object with these properties; without any, with whatever names, and values of `other`."""

    properties: dict[str, Node]
    required: frozenset[str] = frozenset()
    other: Node | None = None


Node = Literal | Text | Number | Choice | Array | Object


@dataclass(frozen=True)
class _Rest:
    """The rest of a literal."""

    text: str


@dataclass(frozen=True)
class _InText:
    """Inside a string; `hexadecimal` digits of an escape are still to come, or -1 right after a backslash."""

    hexadecimal: int = 0


@dataclass(frozen=True)
class _InNumber:
    whole: bool
    phase: str
    length: int = 1
    """Characters of this phase so far."""


@dataclass(frozen=True)
class _InArray:
    array: Array
    count: int
    first: bool


@dataclass(frozen=True)
class _InObject:
    object: Object
    seen: frozenset[str]
    phase: Phase


Phase = TypingLiteral["opened", "after a value", "after a comma"]


@dataclass(frozen=True)
class _Space:
    """At most one space, as models write it after a comma or colon."""


_SPACE = _Space()


@dataclass(frozen=True)
class Free:
    """Any text. Where `opening` is written, one of these states must follow, and then any text again."""

    opening: str
    then: States
    only_first: bool = False
    """Whether it counts at the beginning alone, after spaces."""
    tail: str = ""
    """The end of the text so far that may become the opening."""


def any_json() -> Choice:
    """Any JSON value."""
    anything = Choice()
    anything.options += [Object({}, other=anything), Array(anything), Text(), Number(whole=False)]
    anything.options += [Literal(("true", "false", "null"))]
    return anything


def start(*parts: str | Node | Free) -> States:
    """The states before the first character of these parts, one after the other."""
    return frozenset({tuple(_Rest(part) if isinstance(part, str) else part for part in parts if part != "")})


def advance(states: States, text: str) -> States:
    """The states after some more text; empty if it does not fit."""
    for character in text:
        states = frozenset(after for state in states for after in _next(state, character))
        if not states:
            break
    return states


def may_end(states: States) -> bool:
    """Whether the text so far is complete."""
    return any(all(_nothing_needed(part) for part in state) for state in states)


def must_end(states: States) -> bool:
    """Whether nothing can follow."""
    return states == frozenset({()})


def _nothing_needed(part: Any) -> bool:
    return isinstance(part, _Space | Free) or (isinstance(part, _InNumber) and part.phase in _COMPLETE)


def _next(state: State, character: str) -> Iterator[State]:
    if not state:
        return
    part, rest = state[0], state[1:]
    match part:
        case _Rest():
            if part.text[0] == character:
                yield (_Rest(part.text[1:]), *rest) if len(part.text) > 1 else rest
        case _Space():
            if character == " ":
                yield rest
            yield from _next(rest, character)
        case Free():
            yield from _in_free(part, rest, character)
        case _InText():
            yield from _in_text(part, rest, character)
        case _InNumber():
            if phase := _number_phase(part, character):
                yield (_InNumber(part.whole, phase, part.length + 1 if phase == part.phase else 1), *rest)
            elif part.phase in _COMPLETE:
                yield from _next(rest, character)
        case _InArray():
            yield from _in_array(part, rest, character)
        case _InObject():
            yield from _in_object(part, rest, character)
        case _:
            yield from _begin(part, rest, character)


def _in_free(part: Free, rest: State, character: str) -> Iterator[State]:
    tail, opening = part.tail + character, part.opening
    if tail == opening:
        for state in part.then:
            yield (*state, replace(part, tail=""), *rest)
        return
    if part.only_first and character not in " \n" and not opening.startswith(tail):
        opening = ""
    while tail and not opening.startswith(tail):
        tail = tail[1:]
    yield (replace(part, opening=opening, tail=tail), *rest)


def _begin(node: Node, rest: State, character: str) -> Iterator[State]:
    match node:
        case Literal():
            for text in node.texts:
                yield from _next((_Rest(text), *rest), character)
        case Choice():
            for option in node.options:
                yield from _begin(option, rest, character)
        case Text() if character == '"':
            yield (_InText(), *rest)
        case Number():
            if phase := _number_phase(_InNumber(node.whole, "start"), character):
                yield (_InNumber(node.whole, phase), *rest)
        case Array() if character == "[":
            yield (_InArray(node, 0, first=True), *rest)
        case Object() if character == "{":
            yield (_InObject(node, frozenset(), "opened"), *rest)


def _in_text(part: _InText, rest: State, character: str) -> Iterator[State]:
    if part.hexadecimal > 0:
        if character in "0123456789abcdefABCDEF":
            yield (_InText(part.hexadecimal - 1), *rest)
    elif part.hexadecimal < 0:
        if character in '"\\/bfnrtu':
            yield (_InText(4 if character == "u" else 0), *rest)
    elif character == '"':
        yield rest
    elif character == "\\":
        yield (_InText(-1), *rest)
    elif character >= " ":
        yield (part, *rest)


_COMPLETE = ("zero", "digits", "fraction", "exponent")
_LONGEST = {"digits": 20, "fraction": 20, "exponent": 2}
"""Digits of a number's parts, enough for 64 bits: some models would write digits without end."""
_PHASES: Mapping[str, Iterable[tuple[str, str]]] = {
    "start": (("-", "minus"), ("0", "zero"), ("123456789", "digits")),
    "minus": (("0", "zero"), ("123456789", "digits")),
    "zero": ((".", "point"), ("eE", "e")),
    "digits": (("0123456789", "digits"), (".", "point"), ("eE", "e")),
    "point": (("0123456789", "fraction"),),
    "fraction": (("0123456789", "fraction"), ("eE", "e")),
    "e": (("+-", "sign"), ("0123456789", "exponent")),
    "sign": (("0123456789", "exponent"),),
    "exponent": (("0123456789", "exponent"),),
}


def _number_phase(part: _InNumber, character: str) -> str:
    """The phase of a number after one more character; empty if it is none of its characters."""
    for characters, phase in _PHASES[part.phase]:
        is_too_long = phase == part.phase and part.length >= _LONGEST[phase]
        if character in characters and not is_too_long and not (part.whole and phase in ("point", "e")):
            return phase
    return ""


def _in_array(part: _InArray, rest: State, character: str) -> Iterator[State]:
    array = part.array
    if character == "]" and part.count >= array.fewest:
        yield rest
    if array.most is not None and part.count >= array.most:
        return
    after = (_InArray(array, part.count + 1, first=False), *rest)
    if part.first:
        yield from _begin(array.item, after, character)
    elif character == ",":
        yield (_SPACE, array.item, *after)


def _in_object(part: _InObject, rest: State, character: str) -> Iterator[State]:
    properties, seen = part.object.properties, part.seen
    if part.phase != "after a comma" and character == "}" and part.object.required <= seen:
        yield rest
    elif part.phase == "after a value":
        # A comma needs another property to come.
        if character == "," and (part.object.other or len(seen) < len(properties)):
            yield (_SPACE, _InObject(part.object, seen, "after a comma"), *rest)
    elif character == '"' and part.object.other:
        yield (_InText(), _Rest(":"), _SPACE, part.object.other, _InObject(part.object, seen, "after a value"), *rest)
    elif character == '"':
        for name, value in properties.items():
            if name not in seen:
                after = (_SPACE, value, _InObject(part.object, seen | {name}, "after a value"), *rest)
                yield (_Rest(json.dumps(name, ensure_ascii=False)[1:] + ":"), *after)
