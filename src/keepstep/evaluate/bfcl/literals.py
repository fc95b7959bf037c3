"""Values of Java and JavaScript literals. BFCL gives the arguments of such calls as text.

What does not have the form of its type stays text, so the type check after it can refuse it or take it as the name of a
variable. The patterns accept what the official checker accepts, oddities included: they decide verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_WHOLE = r"-?\d+"
_DECIMAL = rf"{_WHOLE}(\.\d+)?"
_SCIENTIFIC = rf"{_DECIMAL}([eE][+-]?\d+)?"

_NUMBERS: dict[str, dict[str, tuple[str, int, Callable[[str], Any]]]] = {
    "java": {
        "byte": (_WHOLE, 0, int),
        "short": (_WHOLE, 0, int),
        "integer": (_WHOLE, 0, int),
        "long": (rf"{_WHOLE}[lL]", 1, int),
        "float": (rf"{_SCIENTIFIC}[fF]", 1, float),
        "double": (_SCIENTIFIC, 0, float),
    },
    "javascript": {
        "integer": (_WHOLE, 0, int),
        "float": (_DECIMAL, 0, float),
        "Bigint": (rf"{_WHOLE}n", 1, int),
    },
}
"""Of each type: its pattern, the length of its suffix, and what reads the rest."""

_AS_LIST = re.compile(r"new\s+ArrayList<\w*>\(Arrays\.asList\((.+?)\)\)")
_ADDED = re.compile(r"new\s+ArrayList<\w*>\(\)\s*\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_EMPTY_LIST = re.compile(r"new\s+ArrayList<\w*>\(\)")
_JAVA_ARRAY = re.compile(r"new\s+\w+\[\]\s*\{(.*?)\}")
_JAVA_MAP = re.compile(r"new\s+HashMap<.*?>\s*\(\)\s*\{\s*\{?\s*(.*?)\s*\}?\s*\}", re.DOTALL)
_EMPTY_MAP = re.compile(r"new\s+HashMap<.*?>\s*\(\)")
_PUT = re.compile(r"put\(\"(.*?)\",\s*(.*?)\)")
_ROWS = r"\[.*?\]\s*(,\s*\[.*?\]\s*)*"
_JS_TABLE = re.compile(rf"\[\s*{_ROWS}\]|\bnew\s+Array\(\s*{_ROWS}\)")
_JS_ARRAY = re.compile(r"\[(.*?)\]|\bnew\s+Array\((.*?)\)")
_JS_PAIR = re.compile(r"([^:]+):\s*(.*?)(?:,\s*(?=[^,]+:)|$)")


def java_value(text: str, kind: str, element: str = "") -> Any:
    """The value of a Java literal of this type; `element` is the type of a list's elements."""
    match kind:
        case "boolean":
            return {"true": True, "false": False}.get(text, text)
        case "Array":
            return _java_array(text, element)
        case "ArrayList":
            return _array_list(text, element)
        case "HashMap":
            return _hash_map(text)
    return _number("java", text, kind)


def _number(language: str, text: str, kind: str) -> Any:
    """A number of this type; any other text unchanged."""
    if kind not in _NUMBERS[language]:
        return text
    pattern, suffix, read = _NUMBERS[language][kind]
    if not re.match(f"{pattern}$", text):
        return text
    # `$` also matches before a newline at the end.
    digits = text.removesuffix("\n")
    return read(digits[: len(digits) - suffix])


def _java_array(text: str, element: str) -> Any:
    found = _JAVA_ARRAY.search(text)
    if not found:
        return text
    parts = [part.strip() for part in found[1].split(",") if part.strip()]
    return [java_value(part, element) if element else _guess_java(part) for part in parts]


def _array_list(text: str, element: str) -> Any:
    def item(part: str) -> Any:
        part = part.strip()
        if element in ("char", "String"):
            return part[1:-1]
        return java_value(part, element) if element else _guess_java(part)

    if found := _AS_LIST.search(text):
        return [item(part) for part in found[1].split(",")]
    if found := _ADDED.search(text):
        return [item(part) for part in re.findall(r"add\((.+?)\)", found[1])]
    return [] if _EMPTY_LIST.search(text) else text


def _hash_map(text: str) -> Any:
    found = _JAVA_MAP.search(text)
    if found:
        return {key: _guess_java(value.strip()) for key, value in _PUT.findall(found[1])}
    return {} if _EMPTY_MAP.search(text) else text


def _guess_java(text: str) -> Any:
    """The value of a literal whose type is not known."""
    for kind in ("boolean", "long", "float"):
        value = java_value(text, kind)
        if not isinstance(value, str):
            return value
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    return _any_number(text)


def _any_number(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            pass
    return text


def javascript_value(text: str, kind: str, element: str = "") -> Any:
    """The value of a JavaScript literal of this type; `element` is the type of an array's elements."""
    match kind:
        case "String":
            return text[1:-1] if _quoted(text) else text
        case "Boolean":
            return {"true": True, "false": False}.get(text, text)
        case "array":
            return _js_array(text.strip(), element)
        case "dict":
            return _js_object(text.strip())
    return _number("javascript", text, kind)


def _quoted(text: str) -> bool:
    return any(text.startswith(quote) and text.endswith(quote) for quote in "\"'")


def _js_array(text: str, element: str) -> Any:
    if table := _JS_TABLE.match(text):
        rows = [row.strip() for row in re.findall(r"\[(.*?)\]", table[0])]
        # The first row begins with the bracket of the table itself.
        rows[0] = rows[0].removeprefix("[")
        return [[_guess_js(part) for part in row.split(",")] for row in rows]
    found = _JS_ARRAY.match(text)
    if not found:
        return text
    body = (found[1] if found[1] is not None else found[2]).strip()
    parts = [part.strip() for part in body.split(",")] if body else []
    return [javascript_value(part, element) if element else _guess_js(part) for part in parts]


def _js_object(text: str) -> Any:
    found = re.match(r"\{(.*?)\}", text)
    if text == "{}" or not found:
        return {} if text == "{}" else text
    pairs = ((key.strip().strip("'\""), value.strip()) for key, value in _JS_PAIR.findall(found[1]))
    return {key: _js_member(value) for key, value in pairs}


def _js_member(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return _js_array(text, "")
    if text.startswith("{") and text.endswith("}"):
        return _js_object(text)
    return _guess_js(text.strip("'\""))


def _guess_js(text: str) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    return text[1:-1] if _quoted(text) else _any_number(text)
