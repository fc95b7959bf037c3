"""Grammars of JSON Schemas: every text that fits is accepted, and no beginning that cannot be continued."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from keepstep.serve.json_grammar import Free, advance, any_json, may_end, must_end, start
from keepstep.serve.json_schema import SchemaError, compile_schema

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "kinds": {"type": "array", "items": {"enum": ["x", "y z", 3]}, "minItems": 1, "maxItems": 2},
        "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["count"],
    "$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}, "weight": {"type": ["number", "boolean"]}}}},
}


def fits(schema: Any, text: str) -> bool:
    return must_end(advance(start("<", compile_schema(schema), ">"), f"<{text}>"))


@pytest.mark.parametrize(
    "text",
    [
        '{"count": 1}',
        '{"count":-12,"kinds":["x", 3]}',
        '{"note": "h\\u00e9\\n\\"", "count": 0}',
        '{"tree": {"left": {"weight": -1.5e-3}}, "count": 10}',
        '{"tree": {"weight": true}, "note": null, "count": 7}',
    ],
)
def test_fitting_text_is_accepted(text: str) -> None:
    assert fits(SCHEMA, text)
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"count": 1, }',
        '{"count": 01}',
        '{"count": 1.0}',
        '{"count": 1, "count": 2}',
        '{"count": 1, "kinds": []}',
        '{"count": 1, "kinds": [3, 3, 3]}',
        '{"count": 1, "other": 2}',
        '{"count": 1, "note": "\n"}',
        '{"count": 1, "note": "\\x"}',
    ],
)
def test_other_text_is_refused(text: str) -> None:
    assert not fits(SCHEMA, text)


@pytest.mark.parametrize(
    ("text", "accepted", "may_stop"),
    [
        ("any text, also {", True, True),
        ("a <ca<call>", True, False),
        ('a <ca<call>{"count": 1}', True, False),
        ('a <call>{"count": 1}; b <call>{"count": 2};', True, True),
        ('a <call>{"count": "x', False, False),
        ('a <call>{"count": 1}; b <call> ', False, False),
    ],
)
def test_free_text_is_bound_from_an_opening_on(text: str, accepted: bool, may_stop: bool) -> None:
    states = advance(start(Free("<call>", start(compile_schema(SCHEMA), ";"))), text)
    assert (bool(states), bool(states) and may_end(states)) == (accepted, may_stop)


def test_opening_counts_at_the_beginning_alone_if_it_must() -> None:
    first = start(Free("{", start('"a"}'), only_first=True))
    assert may_end(advance(first, ' \n{"a"} and {b'))
    assert not advance(first, ' {"b')
    assert may_end(advance(first, "so {b"))


def test_no_accepted_beginning_is_a_dead_end() -> None:
    """Whatever characters are drawn among those that fit, valid JSON comes out."""
    alphabet = [chr(code) for code in range(32, 127)]
    for seed in range(30):
        draws, states, text = random.Random(seed), start(compile_schema(SCHEMA)), ""
        while not must_end(states):
            # Closing characters first from some length on, as nothing else ends a random text.
            choices = draws.sample(alphabet, len(alphabet))
            choices = ['"', "}", "]", *choices] if len(text) > 60 else choices
            character = next(one for one in choices if advance(states, one))
            states, text = advance(states, character), text + character
        jsonschema.validate(json.loads(text), SCHEMA)


def test_numbers_may_end_or_go_on() -> None:
    states = advance(start(any_json()), "12")
    assert may_end(states)
    assert not must_end(states)
    assert not may_end(advance(start(any_json()), "12."))


@pytest.mark.parametrize(
    ("text", "fitting"),
    [("-18446744073709551615", True), ("1" * 21, False), (f"0.{'3' * 20}e-99", True), (f"0.{'3' * 21}", False),
     ("1e100", False)],
)  # fmt: skip
def test_numbers_do_not_go_on_without_end(text: str, fitting: bool) -> None:
    assert fits({"type": "array", "items": {"type": "number"}}, f"[{text}, 1]") == fitting


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "without end"),
        ({"anyOf": [{"$ref": "#"}]}, "without end"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"type": "quux"}, "none of JSON's"),
        ({"enum": []}, "at least one value"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "no property"),
        (5, "not an object"),
        ({"items": {}, "minItems": 2, "maxItems": 1}, "no list fits"),
        ({"anyOf": []}, "nothing fits"),
        ({"$ref": "elsewhere.json"}, "leads nowhere"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "different type"),
        ({"allOf": [{"$ref": "#"}]}, "without end"),
        (
            {"properties": {"a": True}, "anyOf": [{"properties": {"b": True}, "additionalProperties": False}]},
            "one part",
        ),
    ],
)
def test_schema_that_cannot_be_followed_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        compile_schema(schema)


PAIR: dict[str, Any] = {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ['{"a": 1}']),
        ({"additionalProperties": {"type": "null"}}, ["{}", '{"x": null, "y": null}'], ['{"x": 1}']),
        ({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}"]),
        (PAIR | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": null}', '{"b": null}'], ["{}", "1"]),
        (PAIR | {"type": ["object", "null"], "required": ["a"]}, ["null", '{"a": null}'], ["{}", "1"]),
        ({"allOf": [PAIR, {"required": ["a"]}, {"required": ["b"]}]}, ['{"b": null, "a": null}'], ['{"a": null}', "1"]),
        (
            {"allOf": [{"$ref": "#/$defs/pair"}], "required": ["a"], "$defs": {"pair": PAIR}},
            ['{"a": null}'],
            ['{"b": null}', "1"],
        ),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ["null"], ["1"]),
    ],
)
def test_parts_of_a_schema_hold_together(schema: Any, accepted: list[str], refused: list[str]) -> None:
    assert [fits(schema, text) for text in accepted] == [True] * len(accepted)
    assert [fits(schema, text) for text in refused] == [False] * len(refused)


@pytest.mark.parametrize(
    "part",
    [
        {"minimum": 1},
        {"type": "string", "pattern": "^a$"},
        {"not": {"type": "null"}},
        {"uniqueItems": True},
        {"if": {}},
    ],
)
def test_key_that_cannot_be_enforced_is_refused_where_it_must_be(part: Any) -> None:
    schema = {"type": "object", "properties": {"a": part}}
    with pytest.raises(SchemaError, match=f"{list(part)[-1]} = .* cannot be enforced; leave it out"):
        compile_schema(schema, strict=True)
    compile_schema(schema)
    described = {"title": "A", "description": "a", "default": 1, "format": "date", "type": "string"}
    compile_schema({"properties": {"a": described}}, strict=True)


def test_choices_inside_choices_cost_no_time() -> None:
    """Each part offers the next one twice: as many ways as 2 to the power of 60, and one text."""
    parts: dict[str, Any] = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
    schema = {"$ref": "#/$defs/0", "$defs": {**parts, "60": {"type": "null"}}}
    assert fits(schema, "null")
