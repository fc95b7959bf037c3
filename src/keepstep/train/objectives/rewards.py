"""Verifiable rewards: what an answer is worth is computed from its text, by rules or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.core.plugins import load_plugin
from keepstep.data.chat.prompts import Prompted
from keepstep.evaluate.ast_check import Call, MalformedCall, Task, compare, has_type, parse_calls
from keepstep.evaluate.tool_calls import expected_calls, score


@dataclass(frozen=True)
class Answered:
    """An answer to be rewarded."""

    prompted: Prompted
    text: str
    ended: bool
    """Whether the model ended it itself, and not the limit of tokens."""

    def calls(self) -> list[Call] | None:
        """The calls in it; None where one cannot be parsed."""
        try:
            return parse_calls(self.text)
        except MalformedCall:
            return None


Reward = Callable[[Answered], float]


def tool_calls(answer: Answered) -> float:
    """1 where the calls equal those of the reference answer, in any order; without any there, 1 for calling nothing."""
    calls = answer.calls()
    task = Task("", answer.prompted.conversation.tools, _expected(answer.prompted))
    return float(calls is not None and compare(task, calls, lenient=False) is None)


def arguments(answer: Answered) -> float:
    """How much of the reference's calls is right, from 0 to 1: it tells a nearly right answer from a wrong one.

    A function, the name of an argument and its value count one each; what the answer has too much counts against it.
    """
    calls, expected = answer.calls(), _expected(answer.prompted)
    if not calls or not expected:
        return float(calls == expected)
    # The most alike first, each call compared with one other.
    pairs = [(_shared(call, other), i, j) for i, call in enumerate(expected) for j, other in enumerate(calls)]
    shared, left, other_left = 0, set(range(len(expected))), set(range(len(calls)))
    for common, i, j in sorted(pairs, reverse=True):
        if i in left and j in other_left:
            shared += common
            left.remove(i)
            other_left.remove(j)
    return 2 * shared / sum(1 + 2 * len(values) for _, values in (*calls, *expected))


def schema(answer: Answered) -> float:
    """1 where every call names a tool of the prompt and its arguments fit the tool's schema.

    An answer without calls counts only where the reference has none.
    """
    calls = answer.calls()
    if calls is None or (not calls and _expected(answer.prompted)):
        return 0.0
    tools = (tool["function"] for tool in answer.prompted.conversation.tools)
    schemas = {tool["name"]: tool.get("parameters") or {} for tool in tools}
    return float(all(name in schemas and _fits(arguments, schemas[name]) for name, arguments in calls))


def well_formed(answer: Answered) -> float:
    """1 where the answer ends itself, is not empty, and its calls can be parsed."""
    return float(answer.ended and bool(answer.text.strip()) and answer.calls() is not None)


BUILT_IN: Mapping[str, Reward] = {
    "tool_calls": tool_calls,
    "arguments": arguments,
    "schema": schema,
    "format": well_formed,
}


def load_rewards(names: Sequence[str]) -> list[Reward]:
    """The rewards of these names; any that is not built in is a plug-in."""
    return [BUILT_IN[name] if name in BUILT_IN else _from_plugin(name) for name in names]


def _from_plugin(name: str) -> Reward:
    function = load_plugin("rewards", name, {}, "rl.rewards")

    def reward(answer: Answered) -> float:
        expected = [{"name": name, "arguments": arguments} for name, arguments in _expected(answer.prompted)]
        return score(function, answer.prompted.messages, answer.text, expected)

    return reward


def _expected(prompted: Prompted) -> list[Call]:
    try:
        return expected_calls(prompted.reference)
    except MalformedCall:
        return []


def _shared(call: Call, other: Call) -> int:
    """What two calls have in common: the function, names of arguments, values."""
    (name, values), (other_name, others) = call, other
    if name != other_name:
        return 0
    return 1 + sum(1 + bool(others[key] == value) for key, value in values.items() if key in others)


def _fits(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    properties = parameters.get("properties", {})
    if any(required not in arguments for required in parameters.get("required", ())):
        return False
    return all(name in properties and _allows(properties[name], value) for name, value in arguments.items())


def _allows(parameter: Mapping[str, Any], value: Any) -> bool:
    if not has_type(value, parameter.get("type")) or ("enum" in parameter and value not in parameter["enum"]):
        return False
    if isinstance(value, list):
        return all(_allows(parameter.get("items") or {}, each) for each in value)
    # An object without properties of its own may hold anything.
    return not (isinstance(value, dict) and parameter.get("properties")) or _fits(value, parameter)
