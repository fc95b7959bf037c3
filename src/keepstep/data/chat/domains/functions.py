"""Functions of the domains set: written ones of 21 domains, and ones composed of quantities, lookups and code.

Whoever knows only the written ones could memorise them; the composed ones have to be read from the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from keepstep.data.chat.domains.code import as_text, draw_code, literal
from keepstep.data.chat.domains.parameters import (
    Action,
    Parameter,
    Slot,
    camel,
    grammar,
    parse_slot,
    spaced,
    spelled,
    value_of,
)
from keepstep.data.chat.generate import Split, split_of
from keepstep.data.chat.rows import Tool

_WRITTEN, _COMPUTED, _LOOKED_UP, _CODE = "written", "computed", "looked up", "code"
_FAMILIES, _WEIGHTS = (_WRITTEN, _COMPUTED, _LOOKED_UP, _CODE), (11, 5, 4, 3)
_OPTIONAL_SHARE, _EXTRAS_SHARE = 0.55, 0.3
"""Optional parameters that a prompt shows, and functions with further ones."""
_ANY_WORDS = ("any", "all", "dontcare", "unspecified")
_ARTICLES = {"a", "an", "the", "my", "me", "to", "of", "in", "is", "it", "for", "some", "this", "or"}
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


@dataclass(frozen=True)
class Function:
    """A function as one prompt shows it."""

    action: Action
    name: str
    tool: Tool
    parameters: tuple[Parameter, ...]

    @property
    def required(self) -> list[Parameter]:
        """Those that every call gives."""
        return [item for item in self.parameters if item.slot.required]


@cache
def written_actions(split: Split) -> tuple[Action, ...]:
    """The actions of the grammar that only this split uses."""
    found = [
        Action(domain, item["name"], item["does"], tuple(item["ask"].split("; ")), tuple(map(parse_slot, item["with"])))
        for domain, items in grammar()["actions"].items()
        for item in items
    ]
    return tuple(action for action in found if split_of(action.name) == split)


def draw_action(draw: Random, split: Split) -> Action:
    """Any action of a split."""
    family = draw.choices(_FAMILIES, _WEIGHTS)[0]
    if family == _WRITTEN:
        return draw.choice(written_actions(split))
    make = {_COMPUTED: _computed, _LOOKED_UP: _looked_up, _CODE: draw_code}[family]
    while True:
        action = make(draw)
        if split_of(action.name) == split:
            return action


def siblings(action: Action, draw: Random, split: Split) -> list[Action]:
    """Further actions of the same domain, in any order: functions for them are easily taken for this one."""
    written = [other for other in written_actions(split) if other.domain == action.domain]
    make = draw_code if action.language else _looked_up
    found = written or [other for other in (make(draw) for _ in range(20)) if split_of(other.name) == split]
    alike = {other.name: other for other in found if other.domain == action.domain and other.name != action.name}
    return draw.sample(list(alike.values()), len(alike))


def _computed(draw: Random) -> Action:
    """Something computed from one to four quantities."""
    known = grammar()
    subject, verb = draw.choice(known["subjects"]), draw.choice(known["verbs"])
    if draw.random() < 0.4:
        subject = f"{draw.choice(known['subjects']).split()[0]} {subject.split()[-1]}"
    drawn = draw.sample(known["quantities"], draw.choice((1, 2, 2, 3, 3, 4)))
    optional = draw.randint(1, len(drawn)) if len(drawn) > 1 and draw.random() < 0.5 else len(drawn)
    slots = tuple(_quantity(text, place < optional, draw) for place, text in enumerate(drawn))
    asks = (f"{verb} the {subject}", f"what is the {subject}?", f"{draw.choice(known['verbs'])} the {subject}")
    does = f"{draw.choice(('calculates', 'computes', 'estimates', 'predicts'))} the {subject}"
    return Action(
        draw.choice(("physics", "tools", "calculator", "science", "math")), f"{verb} {subject}", does, asks, slots
    )


def _quantity(text: str, required: bool, draw: Random) -> Slot:
    name, unit, low, high = re.fullmatch(r"(.+?) (\S+|per year|square meters) (-?\d+) (\d+)", text).groups()  # type: ignore[union-attr]
    kind = f"int {low} {high}" if draw.random() < 0.6 else f"float {low} {high}"
    said = (
        f"with a {name} of {{}} {unit}",
        f"given a {name} of {{}} {unit}",
        f"with {name} {{}}",
        f"and a {name} of {{}}",
    )
    names = (name.replace(" ", "_"), name.replace("number of ", "num_").replace(" ", "_"))
    return Slot(kind, names, said, required, unit=unit)


def _looked_up(draw: Random) -> Action:
    """A property of something."""
    attribute = draw.choice(list(grammar()["lookups"]))
    pool = draw.choice(grammar()["lookups"][attribute])
    thing = pool.lower().removesuffix("_known").removesuffix("_film")
    entity = Slot(pool, (thing, f"{thing}_name", "name", "query"), ("of {}", "for {}", "of {}"))
    extras = [parse_slot(text) for text in draw.sample(grammar()["lookup_extras"], draw.choice((0, 1, 1, 2)))]
    asks = (f"get the {attribute}", f"what is the {attribute}?", f"look up the {attribute}", f"tell me the {attribute}",
            f"find the {attribute}", f"I want to know the {attribute}")  # fmt: skip
    does = f"{draw.choice(('returns', 'finds', 'fetches', 'looks up'))} the {attribute} of a {thing}"
    return Action(thing, f"{thing} {attribute}", does, asks, (entity, *extras))


# ── as a prompt shows them ───────────────────────────────────────────────────────────────────────────────────────────


def show_function(action: Action, draw: Random) -> Function:
    """A function for an action: a spelling of its name, its parameters and their order."""
    named = camel if draw.random() < (0.8 if action.language.startswith("Java") else 0.2) else _snake
    slots = [slot for slot in action.slots if slot.required or draw.random() < _OPTIONAL_SHARE]
    if not action.language and draw.random() < _EXTRAS_SHARE:
        slots += map(parse_slot, draw.sample(grammar()["extras"], draw.randint(1, 5)))
    names: dict[str, Slot] = {}
    for slot in slots:
        name = next((name for name in draw.sample(slot.names, len(slot.names)) if named(name) not in names), "")
        if name:
            names[named(name)] = slot
    drawn = [_draw_parameter(slot, name, action.name, draw, named) for name, slot in names.items()]
    if action.language.startswith("Java"):
        drawn = [as_text(item, action.language, draw) for item in drawn]
    name = _function_name(action, draw, named)
    parameters = {
        "type": "object",
        "properties": {item.name: item.schema for item in drawn},
        "required": [item.name for item in drawn if item.slot.required],
    }
    tool = {"name": name, "description": _description(action, drawn, draw), "parameters": parameters}
    return Function(action, name, {"type": "function", "function": tool}, tuple(drawn))


def _snake(words: str) -> str:
    return re.sub(r"[\s-]+", "_", words)


def _function_name(action: Action, draw: Random, named: Callable[[str], str]) -> str:
    imperative = draw.choice([ask for ask in action.asks if not ask.startswith("I ") and not ask.endswith("?")])
    short = " ".join(word for word in re.findall(r"[A-Za-z]+", imperative) if word not in _ARTICLES).lower()
    words = draw.choice((action.name, short)) if len(short.split()) > 1 else action.name
    own, domain = named(words), named(action.domain)
    if action.language:
        return draw.choice((own, f"{domain[0].upper()}{domain[1:]}.{own}", f"{named(words.split()[-1])}.{own}"))
    method = draw.choice(("get", "run", "find", "calculate"))
    spelled = f"{domain}_{own}" if named is _snake else own
    return draw.choice((own, own, own, f"{domain}.{own}", spelled, f"{own}.{method}"))


def _description(action: Action, parameters: Sequence[Parameter], draw: Random) -> str:
    verb, _, rest = action.does.partition(" ")
    # Finds -> find, searches -> search.
    plain = verb.removesuffix("es") if re.search(r"(ch|sh|ss)es$", verb) else verb.removesuffix("s")
    does = draw.choice((f"{verb} {rest}", f"{plain} {rest}", f"{plain} {rest}"))
    names = [item.words for item in parameters]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
    endings = ["", "", ""] + ([f" based on {listed}", f" from the given {listed}", f" by {names[0]}"] if names else [])
    text = does[0].upper() + does[1:] + draw.choice(endings) + "."
    if action.language:
        text += draw.choice((f" Written in {action.language}.", f" A {action.language} function.", ""))
    return text


def argument(parameter: Parameter, value: Any) -> Any:
    """A value as a call writes it."""
    return literal(parameter, value) if parameter.form == "text" else value


# ── schemas, and descriptions that say how a value is written ─────────────────────────────────────────────────────────


def _draw_parameter(slot: Slot, name: str, subject: str, draw: Random, named: Callable[[str], str]) -> Parameter:
    """A slot with a name and a schema whose description fits it. `named` spells the names of an object's parts."""
    kind = slot.kind.partition(" ")[0]
    if kind == "object":
        parts = tuple(
            _draw_parameter(replace(part, required=True), named(draw.choice(part.names)), subject, draw, named)
            for part in slot.parts
        )
        properties = {part.name: part.schema for part in parts}
        told = f"The {spaced(name)} of the {subject}."
        return Parameter(slot, name, {"type": "object", "description": told, "properties": properties}, "", parts)
    form = _form(slot.kind, draw)
    schema = _typed(slot.kind, form, draw)
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
    if kind == "CITY":
        return draw.choice(("",) * 5 + ("City, ST",) * 4 + ("City, State",))
    if kind == "time":
        return draw.choice(("HH:MM",) * 4 + ("hh:mm AM",))
    if kind.startswith("choice") and kind.islower():
        return draw.choice(("",) * 4 + ("Title", "Title", "UPPER"))
    return draw.choice(("decimal",) * 4 + ("percent",)) if kind == "percent" else ""


def _typed(kind: str, form: str, draw: Random) -> dict[str, Any]:
    name, _, rest = kind.partition(" ")
    schema: dict[str, Any] = {"type": _TYPES.get(name, "string")}
    if name in _ITEMS:
        schema["items"] = _ITEMS[name]
    elif name == "list":
        schema["items"] = _typed(rest, "", draw)
    elif name == "choice" and draw.random() < 0.65:
        schema["enum"] = [spelled(value, form) for value in rest.split(",")]
    return schema


def _with_hints(text: str, slot: Slot, form: str, schema: Mapping[str, Any], draw: Random) -> str:
    kind, _, rest = slot.kind.partition(" ")
    if slot.unit and draw.random() < 0.8:
        text = f"{text.removesuffix('.')} in {slot.unit}."
    if kind == "choice" and "enum" not in schema:
        return f"{text} One of {', '.join(spelled(value, form) for value in rest.split(','))}."
    if slot.kind == "CITY" and form:
        example, told = value_of(slot.kind, form, draw).value, text.removesuffix(".")
        which = "state" if form == "City, State" else draw.choice(("state", "abbreviation of its state"))
        return draw.choice((f"{told}, with the {which}, e.g. {example}.", f"{told} in the format '{form}'.",
                            f"The city and {which}, such as {example}.",
                            f"{told} in the format of {form}, like {example}."))  # fmt: skip
    if kind == "percent" and (form == "percent" or draw.random() < 0.5):
        return f"{text.removesuffix('.')} {'in percent' if form == 'percent' else 'as a decimal'}."
    if slot.kind.endswith("date") and (form != "YYYY-MM-DD" or draw.random() < 0.7):
        return f"{text.removesuffix('.')} in the format {form}."
    if kind == "time" and form == "hh:mm AM":
        return f"{text.removesuffix('.')} with 12 hours, e.g. {value_of(slot.kind, form, draw).value}."
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
    if "enum" in schema and draw.random() < 0.3:
        default = draw.choice(_ANY_WORDS)
        schema["enum"] = list({**dict.fromkeys(schema["enum"]), default: None})
    if draw.random() < 0.25:
        schema["default"] = default
    return draw.choice((" Default is {d}.", " Defaults to {d}.", " If not given, {d} is used.")).format(d=default)
