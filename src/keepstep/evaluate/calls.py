"""Tool calls out of a model's text, in the dialects that models write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from keepstep.data.chat_import import bracketed_calls
from keepstep.data.chat_rows import BadRow, call, parsed_list

Call = tuple[str, dict[str, Any]]

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(.*)", re.DOTALL)


class Malformed(Exception):  # noqa: N818 - the model's mistake, counted as such
    """The text means to call something but cannot be read."""


def parse_calls(text: str) -> list[Call]:
    """Names and arguments of every call in the text; none where it only says something. Raises Malformed.

    Read are Hermes and Qwen (`<tool_call>{…}</tool_call>`), Mistral (`[TOOL_CALLS] […]`), Llama (the whole text is a
    JSON object, or a list of them) and Python-like lists (`[f(a=1)]`).
    """
    stripped = text.strip().removeprefix("<|python_tag|>").strip()
    try:
        if "<tool_call>" in stripped:
            return [_one(json.loads(body)) for body in _HERMES.findall(stripped)]
        mistral = _MISTRAL.search(stripped)
        if mistral:
            return [_one(item) for item in parsed_list(mistral[1], "calls")]
        if stripped.startswith("{") and '"name"' in stripped:
            return [_one(item) for item in _objects(stripped)]
        if re.match(r'\[\s*\{\s*"', stripped):
            return [_one(item) for item in parsed_list(stripped, "calls")]
        if re.match(r"\[[A-Za-z_][\w. ]*\(", stripped) and stripped.endswith("]"):
            return [_pair(item) for item in bracketed_calls(stripped)]
    except (ValueError, BadRow, RecursionError) as error:
        # RecursionError: a model that goes round in circles opens brackets without end.
        raise Malformed(str(error)) from None
    return []


def _objects(text: str) -> Iterator[Any]:
    """JSON values one after the other, with or without a semicolon between them."""
    at = 0
    while at < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        yield value
        at += len(text[at:]) - len(text[at:].lstrip("; \t\r\n"))


def _one(value: Any) -> Call:
    if not isinstance(value, dict):
        raise BadRow(f"a call is {type(value).__name__}, not an object")
    return _pair(call(value.get("name"), value.get("arguments", value.get("parameters"))))


def _pair(made: dict[str, Any]) -> Call:
    return made["function"]["name"], made["function"]["arguments"]
