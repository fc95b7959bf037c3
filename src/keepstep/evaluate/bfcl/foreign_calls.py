"""Calls in the syntax of Java and JavaScript with named arguments: `a.f(x="b", y=new int[]{1, 2})`.

BFCL compares arguments of such calls as text. This reads well-formed calls and refuses what is not an expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from keepstep.evaluate.ast_check import MalformedCall
from keepstep.evaluate.bfcl.checker import Call

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`(?:\\.|[^`\\])*`)|(?P<word>[\w$]+)|(?P<sign>.)""",
    re.DOTALL,
)
_CALL = re.compile(r"\s*([A-Za-z_$][\w$]*(?:\s*\.\s*[A-Za-z_$][\w$]*)*)\s*\(", re.ASCII)
_NAMED = re.compile(r"([A-Za-z_$][\w$]*)\s*=(?![=>])\s*(.*)", re.DOTALL | re.ASCII)
_KEYWORDS = {"new", "instanceof", "function", "async", "await", "typeof", "return", "final", "extends", "in", "of"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class WrongFormat(MalformedCall):
    """The text can be parsed, but it is not a call."""


def java_calls(text: str) -> list[Call]:
    """The call of a Java expression. Raises MalformedCall."""
    name, parts = _split(text)
    if not parts or "" in parts:
        raise MalformedCall("an argument is empty")
    return [(name, _arguments(parts, _java_text))]


def javascript_calls(text: str) -> list[Call]:
    """The call of a JavaScript expression. Raises MalformedCall."""
    name, parts = _split(text)
    return [(name, _arguments([part for part in parts if part], _javascript_text))]


def _split(text: str) -> tuple[str, list[str]]:
    """The name of a call and the texts of its arguments."""
    if not text.strip():
        raise WrongFormat("there is no call")
    opened = _CALL.match(text)
    if not opened:
        raise MalformedCall(f"{text[:60]!r} is not a call")
    inside, rest = _until_closed(text, opened.end())
    if rest.strip() not in ("", ";"):
        raise MalformedCall(f"{rest.strip()[:60]!r} follows the call")
    return re.sub(r"\s", "", opened[1]), _at_commas(inside)


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Kind, token and depth of brackets; an opening bracket is outside of itself. Raises MalformedCall."""
    closing: list[str] = []
    for token in _TOKEN.finditer(text):
        kind, part = str(token.lastgroup), token[0]
        if kind == "sign" and part in _PAIRS:
            yield kind, part, len(closing)
            closing.append(_PAIRS[part])
            continue
        if kind == "sign" and part in ")]}" and (not closing or closing.pop() != part):
            raise MalformedCall(f"{part!r} closes nothing")
        if kind == "sign" and part in "\"'`":
            raise MalformedCall("a string does not end")
        yield kind, part, len(closing)
    if closing:
        raise MalformedCall(f"{closing[-1]!r} is missing")


def _until_closed(text: str, start: int) -> tuple[str, str]:
    depth = 1
    for token in _TOKEN.finditer(text, start):
        if token.lastgroup == "sign":
            depth += (token[0] in _PAIRS) - (token[0] in ")]}")
            if not depth:
                return text[start : token.start()], text[token.end() :]
    raise MalformedCall("')' is missing")


def _at_commas(text: str) -> list[str]:
    parts = [""]
    angle = 0
    for kind, part, depth in _tokens(text):
        # Not the comma of a type such as HashMap<String, Object>.
        angle = max(0, angle + (part == "<") - (part == ">")) if kind == "sign" and not depth else angle
        if part == "," and not depth and not (angle and re.search(r"\w<[\w\s,<>]*$", parts[-1])):
            parts.append("")
        else:
            parts[-1] += part
    return [part.strip() for part in parts] if text.strip() else []


def _arguments(parts: list[str], read: Any) -> dict[Any, Any]:
    arguments: dict[Any, Any] = {}
    for part in parts:
        named = _NAMED.fullmatch(part)
        if not named and not re.fullmatch(r"[A-Za-z_$][\w$]*", part):
            _check_expression(part)
            continue
        name, value = (named[1], named[2]) if named else (None, part)
        if name in arguments:
            raise MalformedCall(f"{name} is given twice")
        _check_expression(value)
        arguments[name] = read(value)
    return arguments


def _check_expression(text: str) -> None:
    """Refuse two values without an operator between them, and an assignment."""
    before = ""
    if not text or text[0] == "=":
        raise MalformedCall("an argument has no value")
    for kind, part, depth in _tokens(text):
        if depth or kind == "space":
            continue
        if kind in ("word", "text") and before in ("word", "text"):
            raise MalformedCall(f"there is no operator before {part!r}")
        if part == "=" and re.search(r"(^|[^=!<>])=(?![=>])", text):
            raise MalformedCall("an argument is an assignment")
        before = "" if part in _KEYWORDS else kind


def _javascript_text(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _java_text(value: str, *, nested: bool = False) -> str:
    """A Java expression as the leaderboard writes it: without spaces between tokens, and without a class body."""
    if value[0] in "[{@`":
        raise MalformedCall(f"{value[0]!r} does not begin a Java expression")
    tokens = [(kind, part) for kind, part, _ in _tokens(value) if kind != "space"]
    if len(tokens) == 1 and tokens[0][0] == "text":
        return value if nested else value[1:-1]
    created = re.match(r"new\s+([^({\[]+)", value)
    if not created:
        return value if re.fullmatch(r"[\w$.]+\s*\(.*\)", value, re.DOTALL) else "".join(part for _, part in tokens)
    kind, rest = re.sub(r"\s", "", created[1]), value[created.end() :].lstrip()
    if rest.startswith("("):
        inside, _ = _until_closed(rest, 1)
        return f"new {kind}({', '.join(_java_text(part, nested=True) for part in _at_commas(inside))})"
    if not re.match(r"(\[\s*\]\s*)+\{", rest):
        raise MalformedCall("an array has no elements")
    return f"new {kind}[]{_java_elements(rest[rest.index('{') :])}"


def _java_elements(text: str) -> str:
    """The elements of an array, in braces."""
    inside, _ = _until_closed(text, 1)
    parts = _at_commas(inside)
    read = (_java_elements(part) if part.startswith("{") else _java_text(part, nested=True) for part in parts if part)
    return "{" + ",".join(read) + "}"
