"""Tools without a download: functions of Python's standard library, with schemas from signatures and docstrings.

The sources are parsed and never imported: no side effects, and the same Python version gives the same tools everywhere.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from keepstep.data.chat.rows import Tool
from keepstep.data.corpus import standard_library_files

Kind = Literal["string", "integer", "number", "boolean"]

_SKIPPED = {"idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "encodings", "distutils"}
_INTEGERS = {
    "n", "i", "j", "k", "size", "count", "width", "limit", "length", "index", "indent", "port", "depth", "maxsize",
    "amt", "level", "lineno", "num", "number", "offset", "pos", "stacklevel", "maxlen", "year", "month", "day", "hour",
    "minute", "second", "fd", "pid", "bits", "maxlinelen", "tabsize", "start", "stop", "step", "max", "min", "nargs",
}  # fmt: skip
_NUMBERS = {"timeout", "delay", "interval", "seconds", "mu", "sigma", "alpha", "beta", "x", "y", "radius", "angle"}
_MOST_PARAMETERS = 3
_LONGEST_SUMMARY = 8
_LONGEST_NAME = 48
_KINDS: dict[str, Kind] = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function."""

    name: str
    kind: Kind
    required: bool


@dataclass(frozen=True)
class Function:
    """A function that a request can call."""

    name: str
    summary: str
    """What it does, in a phrase that starts with a verb in lower case and has no full stop."""
    parameters: tuple[Parameter, ...]

    def tool(self) -> Tool:
        """The schema that a prompt shows."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": f"{self.summary[0].upper()}{self.summary[1:]}.",
                "parameters": {
                    "type": "object",
                    "properties": {item.name: {"type": item.kind} for item in self.parameters},
                    "required": [item.name for item in self.parameters if item.required],
                },
            },
        }


@cache
def standard_functions() -> tuple[Function, ...]:
    """Functions and methods whose docstring starts with a plain sentence, by name; summaries are unique."""
    found: dict[str, Function] = {}
    summaries: set[str] = set()
    for function in sorted(_all_functions(), key=lambda item: item.name):
        if function.name not in found and function.summary.lower() not in summaries:
            found[function.name] = function
            summaries.add(function.summary.lower())
    return tuple(found.values())


def _all_functions() -> Iterator[Function]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in standard_library_files():
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith(("_", "lib-", "config-")) for part in parts) or _SKIPPED.intersection(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        yield from _functions(tree.body, parts[-1:])


def _functions(body: list[ast.stmt], prefix: tuple[str, ...]) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _functions(node.body, (*prefix, node.name))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            summary, parameters = _summary(ast.get_docstring(node) or ""), _parameters(node.args)
            name = "_".join((*prefix[-1:], node.name))
            if summary and parameters and len(parameters) <= _MOST_PARAMETERS and len(name) <= _LONGEST_NAME:
                yield Function(name, summary, parameters)


def _summary(docstring: str) -> str | None:
    """The first sentence as a phrase for a request; None if it is not a plain sentence that starts with a verb."""
    first = re.split(r"(?<=[.:])\s|\n\s*\n", docstring.strip(), maxsplit=1)[0]
    words = first.replace("\n", " ").rstrip(".:; ").split()
    if not 3 <= len(words) <= _LONGEST_SUMMARY or not re.fullmatch(r"[A-Z][a-z]+", words[0]):
        return None
    sentence = " ".join(words)
    if not re.fullmatch(r"[A-Za-z0-9 ,'/-]+", sentence) or words[0].endswith(("s", "ed", "ing")):
        return None
    if words[0] in ("The", "This", "An", "Same", "Like", "If", "For", "True", "False", "None", "Helper", "Internal"):
        return None
    return words[0].lower() + sentence[len(words[0]) :]


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...] | None:
    if arguments.vararg or arguments.kwarg:
        return None
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = list(zip(positional, [*defaults, *arguments.defaults], strict=True))
    pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    if pairs and pairs[0][0].arg in ("self", "cls"):
        pairs = pairs[1:]
    if any(argument.arg.startswith("_") for argument, _ in pairs):
        return None
    return tuple(Parameter(argument.arg, _kind(argument, default), default is None) for argument, default in pairs)


def _kind(argument: ast.arg, default: ast.expr | None) -> Kind:
    """The type by annotation, by default value or, as most have neither, by name."""
    if isinstance(argument.annotation, ast.Name) and argument.annotation.id in _KINDS:
        return _KINDS[argument.annotation.id]
    if isinstance(default, ast.Constant) and isinstance(default.value, int | float):
        return _KINDS[type(default.value).__name__]
    if argument.arg in _INTEGERS:
        return "integer"
    return "number" if argument.arg in _NUMBERS else "string"
