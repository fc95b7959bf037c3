"""Schemas of generated parameters: types, enums, defaults, and descriptions that say how a value is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from keepstep.data.chat.domains.parameters import Parameter, Slot, spaced, value_of

_TYPES = {
    "int": "integer", "money": "integer", "year": "integer", "count": "integer", "float": "number", "percent": "number",
    "fraction": "number", "flag": "boolean", "list": "array", "point": "array", "matrix": "array", "items": "array",
    "object": "object", "settings": "object",
}  # fmt: skip
_ITEMS: Mapping[str, dict[str, Any]] = {
    "point": {"type": "number"},
    "matrix": {"type": "array", "items": {"type": "integer"}},
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "price": {"type": "number"}}},
}
_TEXTS = ("The {w}.", "The {w} of the {o}.", "{W}.", "The {w} to use.", "{W} for the {o}.", "The {w} that is wanted.")
_EXAMPLES = (". For example: {e}.", ", e.g. {e}.", ", such as {e}.", " (for example {e}).")


def draw_parameter(slot: Slot, name: str, subject: str, draw: Random, named: Callable[[str], str]) -> Parameter:
    """A slot with a name and a schema whose description fits it. `named` spells the names of an object's parts."""
    kind = slot.kind.partition(" ")[0]
    if kind == "object":
        parts = tuple(
            draw_parameter(replace(part, required=True), named(draw.choice(part.names)), subject, draw, named)
            for part in slot.parts
        )
        properties = {part.name: part.schema for part in parts}
        told = f"The {spaced(name)} of the {subject}."
        return Parameter(slot, name, {"type": "object", "description": told, "properties": properties}, "", parts)
    form = _form(slot.kind, draw)
    schema = _typed(slot.kind, draw)
    words = spaced(name)
    text = draw.choice(_TEXTS).format(w=words, W=words.capitalize(), o=subject)
    if kind == "flag":
        text = draw.choice(("Whether to use {w}.", "If true, {w} is on.", "Whether {w} is wanted.")).format(w=words)
    text = _with_hints(text, slot, form, schema, draw)
    if not slot.required:
        text += _optional(slot, form, schema, draw)
    return Parameter(slot, name, {**schema, "description": text}, form)


def _form(kind: str, draw: Random) -> str:
    if kind.endswith("date"):
        return draw.choice(("YYYY-MM-DD",) * 6 + ("MM/DD/YYYY", "DD-MM-YYYY", "MM-DD-YYYY", "DD/MM/YYYY"))
    return draw.choice(("decimal",) * 4 + ("percent",)) if kind == "percent" else ""


def _typed(kind: str, draw: Random) -> dict[str, Any]:
    name, _, rest = kind.partition(" ")
    schema: dict[str, Any] = {"type": _TYPES.get(name, "string")}
    if name in _ITEMS:
        schema["items"] = _ITEMS[name]
    elif name == "list":
        schema["items"] = _typed(rest, draw)
    elif name == "choice" and draw.random() < 0.65:
        schema["enum"] = rest.split(",")
    return schema


def _with_hints(text: str, slot: Slot, form: str, schema: Mapping[str, Any], draw: Random) -> str:
    kind, _, rest = slot.kind.partition(" ")
    if slot.unit and draw.random() < 0.8:
        text = f"{text.removesuffix('.')} in {slot.unit}."
    if kind == "choice" and "enum" not in schema and draw.random() < 0.7:
        return f"{text} One of {', '.join(rest.split(','))}."
    if kind == "percent" and (form == "percent" or draw.random() < 0.5):
        return f"{text.removesuffix('.')} {'in percent' if form == 'percent' else 'as a decimal'}."
    if slot.kind.endswith("date") and (form != "YYYY-MM-DD" or draw.random() < 0.7):
        return f"{text.removesuffix('.')} in the format {form}."
    if kind == "time" and draw.random() < 0.6:
        return f"{text.removesuffix('.')} in the format HH:MM, with 24 hours."
    if kind == "CURRENCY":
        return f"{text} {draw.choice(('A code of three letters.', 'As an ISO 4217 code.', 'The code, e.g. ZAR.'))}"
    if kind == "formula" or draw.random() < 0.3:
        example = value_of(slot.kind, form, draw).value
        return text.removesuffix(".") + draw.choice(_EXAMPLES).format(e=example)
    return text


def _optional(slot: Slot, form: str, schema: dict[str, Any], draw: Random) -> str:
    """How a description says that the parameter may be left out; a default may stand in the schema as well."""
    if draw.random() < 0.35:
        return draw.choice((" Optional.", " (optional)", " May be left out.", ""))
    default = value_of(slot.kind, form, draw).value
    if draw.random() < 0.25:
        schema["default"] = default
    return draw.choice((" Default is {d}.", " Defaults to {d}.", " If not given, {d} is used.")).format(d=default)
