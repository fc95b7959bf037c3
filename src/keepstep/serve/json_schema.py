"""A JSON Schema as a grammar for constrained decoding.

Objects get no other than their declared properties. A key that constrains a value and cannot be enforced is refused
where the client asks for a strict schema, and left out otherwise. Keys that only describe are left out always.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keepstep.serve.json_grammar import Array, Choice, Literal, Node, Number, Object, Text, any_json

_MAX_NODES = 10_000
_ENFORCED = frozenset({
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "anyOf", "oneOf", "allOf", "$ref",
})  # fmt: skip
_NOT_ENFORCED = frozenset({
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern", "minLength", "maxLength",
    "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
    "dependencies", "dependentRequired", "dependentSchemas", "not", "if", "then", "else",
    "$dynamicRef", "$recursiveRef",
})  # fmt: skip
"""Keys that constrain a value. `format` is none of them: in JSON Schema it describes, and validators may ignore it."""
_ANY = any_json()


class SchemaError(ValueError):
    """A schema that cannot be followed; the text says why."""


def compile_schema(schema: Any, *, strict: bool = False) -> Node:
    """The grammar of a JSON Schema; with `strict`, one with a key that cannot be enforced is refused.

    Raises SchemaError.
    """
    compiler = _Compiler(schema, strict)
    try:
        node = compiler.node(schema)
    except RecursionError:
        raise SchemaError("the schema is nested too deeply, or refers to itself without end") from None
    compiler.flatten_choices()
    return node


class _Compiler:
    """One schema; references lead to parts of it."""

    def __init__(self, root: Any, strict: bool) -> None:
        self._root, self._strict = root, strict
        self._referred: dict[str, Choice] = {}
        self._choices: list[Choice] = []
        self._made = 0

    def node(self, schema: Any) -> Node:
        self._made += 1
        if self._made > _MAX_NODES:
            raise SchemaError(f"the schema has more than {_MAX_NODES:,} parts")
        asked = {} if schema is True else self._constraints(schema)
        if asked.keys() == {"$ref"}:
            return self._reference(str(asked["$ref"]))
        if "$ref" in asked or "allOf" in asked:
            return self.node(self._without_references(asked))
        if "const" in asked or "enum" in asked:
            values = [asked["const"]] if "const" in asked else asked["enum"]
            if not isinstance(values, list) or not values:
                raise SchemaError("enum is not a list with at least one value")
            return Literal(tuple(json.dumps(value, ensure_ascii=False) for value in values))
        for key in ("anyOf", "oneOf"):
            if key in asked:
                return self._choice(_list(asked.pop(key), key), asked)
        if isinstance(asked.get("type"), list):
            return self._choice([{"type": kind} for kind in asked.pop("type")], asked)
        return self._typed(asked)

    def _constraints(self, schema: Any) -> dict[str, Any]:
        """The keys that constrain a value."""
        if not isinstance(schema, Mapping):
            raise SchemaError(f"a schema is {type(schema).__name__}, not an object")
        unknown = sorted(_NOT_ENFORCED & schema.keys())
        if unknown and self._strict:
            raise SchemaError(
                f"{unknown[0]} = {schema[unknown[0]]!r} cannot be enforced; leave it out, or ask without strict"
            )
        return {key: value for key, value in schema.items() if key in _ENFORCED}

    def _choice(self, options: Sequence[Any], shared: Mapping[str, Any]) -> Choice:
        """Any of these, each together with what all of them share."""
        if not options:
            raise SchemaError("anyOf, oneOf or type is an empty list: nothing fits")
        parts = [_merged([shared, self._without_references(option)]) for option in options] if shared else options
        made = Choice([self.node(part) for part in parts])
        self._choices.append(made)
        return made

    def _without_references(self, schema: Any) -> dict[str, Any]:
        """The same schema with what $ref and allOf lead to in their place, as far as other keys stand next to them."""
        asked = {} if schema is True else self._constraints(schema)
        parts = _list(asked.pop("allOf", []), "allOf")
        parts += [self._target(str(asked.pop("$ref")))] if "$ref" in asked else []
        return _merged([asked, *(self._without_references(part) for part in parts)])

    def _typed(self, schema: Mapping[str, Any]) -> Node:
        keys = {"properties": "object", "required": "object", "additionalProperties": "object", "items": "array"}
        match schema.get("type") or next((kind for key, kind in keys.items() if key in schema), None):
            case None:
                return _ANY
            case "string":
                return Text()
            case "integer" | "number" as kind:
                return Number(kind == "integer")
            case "boolean":
                return Literal(("true", "false"))
            case "null":
                return Literal(("null",))
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
            case unknown:
                raise SchemaError(f"type {unknown!r} is none of JSON's")

    def _array(self, schema: Mapping[str, Any]) -> Node:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(fewest, int) or not isinstance(most, int | None):
            raise SchemaError("minItems and maxItems must be whole numbers")
        if most is not None and fewest > most:
            raise SchemaError(f"minItems is {fewest}, but maxItems is {most}: no list fits")
        return Array(self.node(schema.get("items", True)), fewest, most)

    def _object(self, schema: Mapping[str, Any]) -> Node:
        properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = _list(schema.get("required", []), "required")
        if not isinstance(properties, Mapping):
            raise SchemaError("properties must be an object")
        if not properties and other is not False:
            # Without declared properties, those that are required are as the others.
            properties = {str(name): other for name in required}
        missing = [name for name in required if name not in properties]
        if missing:
            raise SchemaError(f"required names {missing[0]!r}, which is no property")
        made = {str(name): self.node(part) for name, part in properties.items()}
        return Object(made, frozenset(required), None if made or other is False else self.node(other))

    def _reference(self, pointer: str) -> Node:
        if pointer not in self._referred:
            # Known before it is compiled: it may refer to itself.
            choice = self._referred[pointer] = Choice()
            self._choices.append(choice)
            choice.options.append(self.node(self._target(pointer)))
        return self._referred[pointer]

    def _target(self, pointer: str) -> Any:
        part = self._root
        try:
            if not pointer.startswith("#"):
                raise KeyError(pointer)
            for name in pointer.removeprefix("#").split("/")[1:]:
                part = part[name.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError):
            raise SchemaError(f"$ref {pointer!r} leads nowhere") from None
        return part

    def flatten_choices(self) -> None:
        """Put what a choice inside a choice leads to in its place, once each."""
        for choice in self._choices:
            leaves: dict[int, Node] = {}
            seen, ahead = {id(choice)}, list(choice.options)
            while ahead:
                node = ahead.pop()
                if id(node) in seen:
                    continue
                seen.add(id(node))
                if isinstance(node, Choice):
                    ahead += node.options
                else:
                    leaves[id(node)] = node
            if not leaves:
                raise SchemaError("the schema refers to itself without end")
            choice.options = list(leaves.values())


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(f"{key} must be a list")
    return list(value)


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One schema that asks for what all of these ask for. Raises SchemaError where they say different things."""
    found: dict[str, Any] = {}
    with_properties = 0
    for part in parts:
        with_properties += "properties" in part
        for key, value in part.items():
            if key == "required":
                found[key] = [*found.get(key, []), *_list(value, key)]
            elif key == "properties" and isinstance(value, Mapping):
                known = found.get(key, {})
                twice = [name for name in value if name in known and known[name] != value[name]]
                if twice:
                    raise SchemaError(f"two parts of the schema describe {twice[0]!r}; write one of them")
                found[key] = {**known, **value}
            elif key in found and found[key] != value:
                raise SchemaError(f"two parts of the schema have different {key}; write one of them")
            else:
                found[key] = value
    if with_properties > 1 and found.get("additionalProperties", True) is not True:
        raise SchemaError("additionalProperties cannot be enforced for properties of several parts; write one part")
    return found
