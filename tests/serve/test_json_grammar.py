"""Grammars of JSON Schemas: every text that fits is accepted, and no beginning that cannot be continued."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from keepstep.serve.json_grammar import SchemaError, advance, any_json, compile_schema, may_end, must_end, start

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
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "without end"),
        ({"anyOf": [{"$ref": "#"}]}, "without end"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"type": "quux"}, "none of JSON's"),
        ({"enum": []}, "at least one value"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "no property"),
        (5, "not an object"),
    ],
)
def test_schema_that_cannot_be_followed_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        compile_schema(schema)
