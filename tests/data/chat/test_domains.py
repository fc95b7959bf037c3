"""The generated set over many domains: calls that fit their functions, and every kind of conversation."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from keepstep.data.chat.domains.functions import draw_action, written_actions
from keepstep.data.chat.domains.parameters import parse_slot
from keepstep.data.chat.domains.rows import generate_row
from keepstep.data.chat.generated import DOMAINS, generate_rows
from keepstep.data.chat.rows import Conversation, calls_of
from keepstep.evaluate.ast_check import has_type

COUNT = 600


@pytest.fixture(scope="module")
def rows() -> list[Conversation]:
    return [row.conversation for row in generate_rows(DOMAINS, COUNT, 4, "train")]


def test_a_row_is_a_function_of_seed_split_and_number() -> None:
    once = [generate_row(number, 4, "train") for number in range(20)]
    assert once == [generate_row(number, 4, "train") for number in range(20)]
    assert once != [generate_row(number, 5, "train") for number in range(20)]


def problems(schema: dict[str, Any], value: Any) -> list[str]:
    """What is wrong with a value, by the types and enums of its schema."""
    if not has_type(value, schema["type"]) or ("enum" in schema and value not in schema["enum"]):
        return [f"{value!r} for {schema}"]
    if schema["type"] == "array":
        return [problem for item in value for problem in problems(schema["items"], item)]
    if schema["type"] == "object":
        return [problem for name, item in value.items() for problem in problems(schema["properties"][name], item)]
    return []


def test_every_call_names_a_shown_function_and_fits_its_schema(rows: list[Conversation]) -> None:
    seen = 0
    for row in rows:
        functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row.tools}
        assert len(functions) == len(row.tools)
        for message in row.messages:
            for name, given in calls_of(message):
                seen += 1
                assert set(functions[name]["required"]) <= set(given) <= set(functions[name]["properties"])
                properties = functions[name]["properties"]
                assert not [problem for key, value in given.items() for problem in problems(properties[key], value)]
    assert seen > COUNT / 2


def test_all_kinds_of_conversations_and_parameters_occur(rows: list[Conversation]) -> None:
    answers = [[calls_of(message) for message in row.messages if message["role"] == "assistant"] for row in rows]
    schemas = [
        schema for row in rows for tool in row.tools for schema in tool["function"]["parameters"]["properties"].values()
    ]
    assert {schema["type"] for schema in schemas} == {"string", "integer", "number", "boolean", "array", "object"}
    assert all(any(key in schema for schema in schemas) for key in ("enum", "default"))
    assert any("Java type" in schema["description"] for schema in schemas)
    assert any(not any(turns) for turns in answers), "a request that no function serves"
    assert any(not turns[0] and turns[1] for turns in answers if len(turns) == 2), "a missing value that is asked for"
    assert any(len(turns[0]) > 1 for turns in answers), "several calls"
    assert any(len({name for name, _ in turns[0]}) > 1 for turns in answers), "calls of several functions"
    assert any(row.messages[-1].get("tool_calls") and "tool" in {m["role"] for m in row.messages} for row in rows)


def test_the_splits_share_no_function() -> None:
    train, test = written_actions("train"), written_actions("test")
    assert len(train) > 5 * len(test) > 0
    assert not {action.name for action in train} & {action.name for action in test}
    draw = Random(1)
    drawn = {split: {draw_action(draw, split).name for _ in range(300)} for split in ("train", "test")}
    assert not drawn["train"] & drawn["test"]


def test_a_line_of_the_grammar() -> None:
    slot = parse_slot("?choice a,b c mode/kind: in {} mode; as {}")
    assert (slot.kind, slot.names, slot.phrases) == ("choice a,b c", ("mode", "kind"), ("in {} mode", "as {}"))
    assert not slot.required
    nested = parse_slot("object budget {int 1 2 min: from {}; int 3 4 max/most: to {}}: ")
    assert [part.names for part in nested.parts] == [("min",), ("max", "most")]
