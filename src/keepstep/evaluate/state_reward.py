"""A reward for the state of a simulated API after several turns: a class of the user's stands in for the tools."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from keepstep.data.chat.rows import Message
from keepstep.evaluate.ast_check import Call, MalformedCall, parse_calls
from keepstep.evaluate.tool_calls import Reward, expected_calls


class FailedCall(Exception):  # noqa: N818 - the model's mistake, which costs it the reward
    """A call of something that the API does not have, or that raised."""


def state_reward(api: Callable[[], Any]) -> Reward:
    """A reward plug-in: 1 if an answer's calls leave `api()` in the state in which the expected calls leave it.

    The calls of earlier turns happen first. A tool is a method of the same name. Every call must succeed, and what the
    expected calls return must be among the results, so that questions that change nothing need the right calls too.
    """

    def reward(messages: Sequence[Message], answer: str, expected: Sequence[Mapping[str, Any]]) -> float:
        wanted = [(call["name"], call["arguments"]) for call in expected]
        try:
            calls = parse_calls(answer)
            if not wanted:
                return float(not calls)
            ours, our_results = _played(api, messages, calls)
        except (MalformedCall, FailedCall):
            return 0.0
        theirs, their_results = _played(api, messages, wanted)
        return float(ours == theirs and all(result in our_results for result in their_results))

    return reward


def _played(api: Callable[[], Any], messages: Sequence[Message], calls: Sequence[Call]) -> tuple[Any, list[Any]]:
    """The public attributes after the conversation and these calls, and what these calls returned."""
    instance = api()
    for message in messages:
        if message["role"] == "assistant":
            for call in _past_calls(message):
                # What failed in the conversation's past changed nothing then.
                with suppress(FailedCall):
                    _called(instance, *call)
    results = [_called(instance, *call) for call in calls]
    return {name: value for name, value in vars(instance).items() if not name.startswith("_")}, results


def _past_calls(message: Message) -> list[Call]:
    try:
        return expected_calls(message)
    except MalformedCall:
        return []


def _called(instance: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    method = None if name.startswith("_") else getattr(type(instance), name, None)
    if not callable(method):
        raise FailedCall(name)
    try:
        # A copy: what is returned may be a part of the state, and change with it.
        return copy.deepcopy(method(instance, **arguments))
    except Exception as error:  # the user's code says no with any exception
        raise FailedCall(name) from error
