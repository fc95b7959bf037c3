"""Check tool calls as BFCL's AST checker does: parse them from a model's text, compare them, and count errors.

A call is compared by name, parameters, types and values. `exact` requires equal values; `lenient` ignores what BFCL
ignores: case, spaces and punctuation inside strings.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from keepstep.data.chat.published_sets import bracketed_calls
from keepstep.data.chat.rows import BadRow, Tool, call, parsed_list

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""

ErrorName = Literal[
    "wrong_func_name", "missing_required", "unexpected_param", "type_error", "value_error",
    "wrong_count", "malformed", "irrelevance",
]  # fmt: skip

_JSON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(.*)", re.DOTALL)


class MalformedCall(Exception):  # noqa: N818 - the model's mistake, counted as such
    """The text contains a call that cannot be parsed."""


def parse_calls(text: str) -> list[Call]:
    """Names and arguments of every call in a text; empty for a text without calls. Raises MalformedCall.

    Formats: Hermes and Qwen (`<tool_call>{…}</tool_call>`), Mistral (`[TOOL_CALLS] […]`), Llama (the text is a JSON
    object, or a list of them) and Python-like lists (`[f(a=1)]`).
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
        # RecursionError: a model that repeats itself may open brackets without end.
        raise MalformedCall(str(error)) from None
    return []


def _objects(text: str) -> Iterator[Any]:
    """Consecutive JSON values, with or without a semicolon between them."""
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


@dataclass(frozen=True)
class Task:
    """One question: its tools and the expected calls; without expected calls, the answer must not call anything."""

    category: str
    tools: Sequence[Tool]
    expected: Sequence[Call]


@dataclass(frozen=True)
class Verdict:
    """The result for one answer: the error of the exact comparison, and whether the lenient one passes."""

    category: str
    error: ErrorName | None
    lenient: bool

    @property
    def exact(self) -> bool:
        """Whether the exact comparison passes."""
        return self.error is None


def judge(task: Task, text: str) -> Verdict:
    """Compare an answer with the expected calls of a task."""
    try:
        calls = parse_calls(text)
    except MalformedCall:
        # If no call is expected, the attempt to call is the error.
        return Verdict(task.category, "malformed" if task.expected else "irrelevance", False)
    error = compare(task, calls, lenient=False)
    return Verdict(task.category, error, error is None or compare(task, calls, lenient=True) is None)


def compare(task: Task, calls: Sequence[Call], *, lenient: bool) -> ErrorName | None:
    """The first error, or None if all calls are right; parallel calls may come in any order."""
    if not task.expected:
        return "irrelevance" if calls else None
    if len(calls) != len(task.expected):
        return "wrong_count"
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in task.tools}

    errors = [[_check(want, got, schemas, lenient) for got in calls] for want in task.expected]
    if _all_paired([[error is None for error in row] for row in errors]):
        return None
    # The error is that of the first wrong call, in the order of the answer.
    return next(row[place] for place, row in enumerate(errors) if row[place])


def _all_paired(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether each expected call (a row) can be paired with a different given call (a column) that fits."""
    taken: dict[int, int] = {}

    def place(want: int, seen: set[int]) -> bool:
        for got in (number for number, fit in enumerate(fits[want]) if fit):
            if got not in seen:
                seen.add(got)
                # An expected call that already has it takes another one, if possible.
                if got not in taken or place(taken[got], seen):
                    taken[got] = want
                    return True
        return False

    return all(place(want, set()) for want in range(len(fits)))


def _check(want: Call, got: Call, schemas: Mapping[str, Any], lenient: bool) -> ErrorName | None:
    (name, expected), (called, given) = want, got
    if called != name:
        return "wrong_func_name"
    if _json(given) == _json(expected):
        # Equal calls are right, even if the row's own schema does not allow them.
        return None
    schema = schemas.get(name, {})
    properties = schema.get("properties", {})
    if any(required not in given for required in schema.get("required", ())):
        return "missing_required"
    if any(parameter not in properties for parameter in given):
        return "unexpected_param"
    if any(not has_type(value, properties[parameter].get("type")) for parameter, value in given.items()):
        return "type_error"
    if expected.keys() != given.keys():
        return "value_error"
    if all(_same(expected[parameter], given[parameter], lenient) for parameter in expected):
        return None
    return "value_error"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def has_type(value: Any, kind: Any) -> bool:
    """Whether a value has a JSON Schema type, or one of several. An integer is a number, a boolean is not."""
    if isinstance(kind, list):
        return any(has_type(value, one) for one in kind)
    if not isinstance(kind, str) or kind not in _JSON_TYPES:
        return True
    return isinstance(value, _JSON_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _same(expected: Any, given: Any, lenient: bool) -> bool:
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, str) and isinstance(given, str) and lenient:
        return _plain(expected) == _plain(given)
    if isinstance(expected, list) and isinstance(given, list):
        return len(expected) == len(given) and all(map(lambda a, b: _same(a, b, lenient), expected, given))
    if isinstance(expected, dict) and isinstance(given, dict):
        return expected.keys() == given.keys() and all(_same(expected[key], given[key], lenient) for key in expected)
    return bool(expected == given)


def _plain(text: str) -> str:
    return re.sub(r"[\s,./\-_*^]", "", text).lower().replace("'", '"')


@dataclass
class CategoryResult:
    """Counts of one category."""

    count: int = 0
    exact: int = 0
    lenient: int = 0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class ToolReport:
    """Results of all categories."""

    categories: Mapping[str, CategoryResult]

    @property
    def exact(self) -> float:
        """Share of exactly right answers among the tasks that expect a call."""
        return _share([result for name, result in self.categories.items() if name != "irrelevance"])

    @property
    def irrelevance(self) -> float | None:
        """Share of tasks that expect no call and got none; None if there are no such tasks."""
        result = self.categories.get("irrelevance")
        return _share([result]) if result else None

    def as_json(self) -> dict[str, Any]:
        """The report as plain numbers."""
        categories = {
            name: {
                "count": result.count,
                "exact": result.exact / result.count,
                "lenient": result.lenient / result.count,
                "errors": dict(result.errors),
            }
            for name, result in self.categories.items()
        }
        return {"exact": self.exact, "irrelevance": self.irrelevance, "categories": categories}


def _share(results: Iterable[CategoryResult]) -> float:
    listed = list(results)
    count = sum(result.count for result in listed)
    return sum(result.exact for result in listed) / count if count else 0.0


def summarise(verdicts: Iterable[Verdict]) -> ToolReport:
    """Counts by category, in the order of first occurrence."""
    categories: dict[str, CategoryResult] = {}
    for verdict in verdicts:
        result = categories.setdefault(verdict.category, CategoryResult())
        result.count += 1
        result.exact += verdict.exact
        result.lenient += verdict.lenient
        if verdict.error:
            result.errors[verdict.error] += 1
    return ToolReport(categories)


def table(report: ToolReport) -> str:
    """The report as a table."""
    lines = [f"{'category':<13}{'count':>6}{'exact':>9}{'lenient':>9}  errors"]
    for name, result in sorted(report.categories.items()):
        errors = ", ".join(f"{error} {count}" for error, count in result.errors.most_common()) or "none"
        exact, lenient = result.exact / result.count, result.lenient / result.count
        lines.append(f"{name:<13}{result.count:>6}{exact:>9.1%}{lenient:>9.1%}  {errors}")
    lines.append(f"{'all calls':<13}{'':>6}{report.exact:>9.1%}")
    return "\n".join(lines)
