"""The generated set over many domains: calls that fit their functions, and every kind of conversation."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest

from keepstep.data.chat.domains.code import draw_code
from keepstep.data.chat.domains.functions import argument, draw_action, show_function, siblings, written_actions
from keepstep.data.chat.domains.parameters import drawn_value, parse_slot, value_of
from keepstep.data.chat.domains.rows import generate_row
from keepstep.data.chat.generated import DOMAINS, generate_rows
from keepstep.data.chat.rows import Conversation, calls_of
from keepstep.evaluate.ast_check import has_type
from keepstep.evaluate.bfcl.literals import java_value, javascript_value

COUNT = 600
TYPES = r"\b(integer|long|float|double|[Bb]oolean|ArrayList|Array|array|HashMap|dict)\b"


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
        known = schema.get("properties", {})
        assert known or all(isinstance(item, str | int) for item in value.values())
        return [problem for name in known if name in value for problem in problems(known[name], value[name])]
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


@pytest.mark.parametrize("language", ["Java", "JavaScript"])
def test_literals_of_typed_languages_have_the_value_that_a_request_says(language: str) -> None:
    read = java_value if language == "Java" else javascript_value
    draw, seen = Random(3), set()
    for _ in range(2000):
        action = draw_code(draw)
        if action.language != language:
            continue
        for parameter in show_function(action, draw).parameters:
            description = parameter.schema["description"]
            found = re.search(
                r"\b(integer|long|float|double|[Bb]oolean|ArrayList|Array|array|HashMap|dict)\b", description
            )
            kind = found[1] if found else ""
            elements = re.search(r"elements are of type (\w+)", description)
            value = drawn_value(parameter, draw).value
            assert read(argument(parameter, value), kind, elements[1] if elements else "") == value, description
            seen.add(kind)
    assert len(seen) == {"Java": 9, "JavaScript": 6}[language]


def test_a_town_is_called_with_its_state_where_the_format_has_both() -> None:
    draw = Random(2)
    drawn = [value_of("CITY", "City, ST", draw) for _ in range(200)]
    assert all(re.fullmatch(r"[A-Z][A-Za-z ]+, [A-Z]{2}", said.value) for said in drawn)
    assert sum(said.value.startswith(f"{said.text}, ") for said in drawn) > 50, "requests that name the town alone"
    assert all(re.fullmatch(r".+, [A-Z][a-z].+", value_of("CITY", "City, State", draw).value) for _ in range(50))


def test_choices_are_called_as_the_schema_spells_them_and_asked_for_in_other_words() -> None:
    draw = Random(3)
    drawn = [value_of("choice cheap,gluten_free", form, draw) for form in ("", "Title", "UPPER") for _ in range(100)]
    assert {said.value for said in drawn} == {"cheap", "gluten_free", "Cheap", "Gluten Free", "CHEAP", "GLUTEN_FREE"}
    assert {"cheap", "affordable", "gluten free"} < {said.text for said in drawn}
    assert {value_of("choice low,minor", "", draw).text for _ in range(200)} == {"low", "little", "minor"}


def test_times_have_the_format_of_the_description() -> None:
    draw = Random(4)
    assert all(re.fullmatch(r"(0[1-9]|1[0-2]):\d\d [AP]M", value_of("time", "hh:mm AM", draw).value) for _ in range(50))
    assert {value_of("time", "HH:MM", draw).value[2] for _ in range(50)} == {":"}


def test_requests_seldom_speak_of_the_further_parameters_of_a_function(rows: list[Conversation]) -> None:
    further = {"page_size", "per_page", "offset", "timeout", "max_retries", "dry_run", "webhook"}
    shown = sum(
        name in tool["function"]["parameters"]["properties"] for row in rows for tool in row.tools for name in further
    )
    given = sum(name in values for row in rows for m in row.messages for _, values in calls_of(m) for name in further)
    assert shown > 50
    assert given < 0.2 * shown


def test_functions_to_choose_from_are_of_the_same_domain_at_times() -> None:
    draw = Random(5)
    playback = next(action for action in written_actions("train") if action.domain == "music")
    near = siblings(playback, draw, "train")
    assert near
    assert {action.domain for action in near} == {"music"}
    assert playback.name not in {action.name for action in near}
