"""JSON Schema (draft 2020-12) of a run.yaml, for editors that complete and check while one types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from keepstep.config.check import ABOVE_ZERO, ZERO_OR_MORE
from keepstep.config.dump import plain_value
from keepstep.config.fields import Field, all_fields, all_sections, allows_none, without_none
from keepstep.config.help import field_help
from keepstep.config.presets import ALIASES, PRESETS
from keepstep.config.schema import SHORT_FORMS
from keepstep.core.units import ByteSize, Duration

_NUMBER = r"[0-9][0-9_]*(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_PATTERNS: Mapping[Any, str] = {
    Duration: rf"^\s*{_NUMBER}\s*(ba|ep|tok|sp|s|min|h|d)\s*$",
    ByteSize: rf"^\s*{_NUMBER}\s*(B|[kKMGTP]B|[KMGTP]iB|[KMGTP]i)\s*$",
}
_REFERENCE = {"$ref": "#/$defs/reference"}


def json_schema() -> dict[str, Any]:
    """The schema as plain dicts."""
    reference = {"type": "string", "pattern": r"\$\{[^${}]+\}", "description": "A reference to another value."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "keepstep run",
        "description": field_help()[""],
        **_properties(""),
        "$defs": {"reference": reference},
    }


def _properties(section: str) -> dict[str, Any]:
    prefix = f"{section}." if section else ""
    properties = {}
    for path in all_fields():
        name = path.removeprefix(prefix).partition(".")[0]
        if path.startswith(prefix) and name not in properties:
            inner = prefix + name
            properties[name] = _section(inner) if inner in all_sections() else _field(all_fields()[inner])
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _section(path: str) -> dict[str, Any]:
    # `null` is a section whose lines are all commented out.
    forms = [_properties(path), {"type": "null"}]
    if path in SHORT_FORMS:
        short = all_fields()[f"{path}.{SHORT_FORMS[path]}"]
        forms.append(_kind(short.path, short.type))
    return {"description": field_help()[path], "oneOf": forms}


def _field(field: Field) -> dict[str, Any]:
    about = {"description": field_help()[field.path], "default": plain_value(field.default)}
    return {**about, **_kind(field.path, field.type)}


def _kind(path: str, kind: Any) -> dict[str, Any]:
    if path == "model.preset":
        return {"anyOf": [{"enum": ["custom", *PRESETS, *ALIASES]}, _REFERENCE]}
    schema = _plain_kind(path, without_none(kind))
    if allows_none(kind):
        return {"anyOf": [schema, {"type": "null"}, _REFERENCE]}
    return schema if "string" in schema.get("type", ()) and "pattern" not in schema else {"anyOf": [schema, _REFERENCE]}


def _plain_kind(path: str, kind: Any) -> dict[str, Any]:
    origin = get_origin(kind)
    if origin is Literal:
        return {"enum": list(get_args(kind))}
    if origin is tuple:
        return _list(path, get_args(kind))
    if origin is Mapping:
        return {"type": "object"}
    if kind in _PATTERNS:
        return {"type": "string", "pattern": _PATTERNS[kind]}
    if kind in (int, float):
        return {"type": "integer" if kind is int else "number", **_bounds(path)}
    # The loader takes a bare `125` or `true` as the text it is where a text belongs.
    return {"type": "boolean"} if kind is bool else {"type": ["string", "number", "boolean"]}


def _list(path: str, members: tuple[Any, ...]) -> dict[str, Any]:
    if Ellipsis in members:
        return {"type": "array", "items": _kind(path, members[0])}
    items = [_kind(path, member) for member in members]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _bounds(path: str) -> dict[str, Any]:
    if path in ABOVE_ZERO:
        return {"exclusiveMinimum": 0}
    return {"minimum": 0} if path in ZERO_OR_MORE or path == "seed" else {}
