"""Functions that are methods of a program. Values of Java and JavaScript are text: literals of their types."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from keepstep.data.chat.domains.parameters import Action, Parameter, Slot, grammar

_LANGUAGES = ("Java", "Java", "JavaScript", "JavaScript", "Python")
_KINDS = ("identifier", "identifier", "identifier", "int 0 500", "int 0 500", "flag", "flag", "word", "word",
          "int 1000 9000000", "float 0 9", "float 0 900", "list int 0 500", "list int 1000 9000000", "list word",
          "settings")  # fmt: skip
_LONG_FROM = 100_000
"""Java's type of a parameter whose values get as large as this is `long`."""
_TYPES = {
    "Java": {"int": "integer", "long": "long", "float": "float", "double": "double", "flag": "boolean",
             "array": "Array", "list": "ArrayList", "settings": "HashMap", "identifier": "any"},
    "JavaScript": {"int": "integer", "long": "integer", "float": "float", "double": "float", "flag": "Boolean",
                   "array": "array", "list": "array", "settings": "dict", "identifier": "any"},
}  # fmt: skip
_TOLD = ("{d} {l} type {t}, in string representation.", "{d} This is {l} {t} type parameter in string representation.",
         "{d} Text of a {l} value of type {t}.")  # fmt: skip


def draw_code(draw: Random) -> Action:
    """A method with one to three parameters."""
    verb, nouns = draw.choice(grammar()["code_verbs"]), draw.sample(grammar()["code_nouns"], 5)
    language = draw.choice(_LANGUAGES)
    slots = []
    for noun in nouns[2 : draw.randint(3, 5)]:
        kind = draw.choice(_KINDS)
        names = (noun, f"{noun}_{draw.choice(('name', 'value', 'ref', 'size'))}", noun[:4])
        slots.append(Slot(kind, names, _phrases(kind, noun), unit=language))
    subject = f"{nouns[0]} {nouns[1]}"
    asks = (f"{verb} the {subject}", f"{verb} a {subject}", f"{verb} a {subject} of the program")
    return Action(subject, f"{verb} {nouns[1]}", f"{verb}s the {subject}", asks, tuple(slots), language)


def _phrases(kind: str, noun: str) -> tuple[str, ...]:
    match kind.partition(" ")[0]:
        case "flag":
            return (f"with the {noun} switched on", f"with the {noun} switched off")
        case "word":
            return (f"with the {noun} '{{}}'", f'and the {noun} "{{}}"')
        case "int" | "float":
            return (f"with a {noun} of {{}}", f"and {{}} as the {noun}")
        case "list" | "settings":
            return (f"with the {noun} {{}}", f"for the {noun} {{}}", f"using {{}} as the {noun}")
    return (f"with the {noun} `{{}}`", f"using {{}} as the {noun}", f"for a {noun} named '{{}}'")


def _type(kind: str) -> str:
    """Of a kind of parameter: its name in `_TYPES`; any other is a string."""
    name, *bounds = kind.split()
    if name == "list":
        return "array" if _type(" ".join(bounds)) == "int" else "list"
    if name in ("int", "float") and float(bounds[-1]) >= {"int": _LONG_FROM, "float": 100}[name]:
        return {"int": "long", "float": "double"}[name]
    return name


def as_text(parameter: Parameter, language: str, draw: Random) -> Parameter:
    """A parameter of a typed language, whose value is given as text."""
    kind = parameter.slot.kind
    written = _TYPES[language].get(_type(kind), "String")
    told = draw.choice(_TOLD).format(d=f"The {parameter.words}.", l=language, t=written)
    if kind.startswith("list "):
        told += f" The elements are of type {_TYPES[language].get(_type(kind.removeprefix('list ')), 'String')}."
    return Parameter(parameter.slot, parameter.name, {"type": "string", "description": told}, "text")


def literal(parameter: Parameter, value: Any) -> str:
    """The text of a value as the parameter's language writes it."""
    kind, is_java = parameter.slot.kind, parameter.slot.unit == "Java"
    if isinstance(value, list):
        parts = ", ".join(_element(item, kind.removeprefix("list "), is_java) for item in value)
        if not is_java:
            return f"[{parts}]"
        return f"new int[]{{{parts}}}" if _type(kind) == "array" else f"new ArrayList<>(Arrays.asList({parts}))"
    if isinstance(value, dict):
        if is_java:
            puts = " ".join(f'put("{name}", {_element(item, "", is_java)});' for name, item in value.items())
            return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
        return "{" + ", ".join(f"'{name}': {_element(item, '', is_java)}" for name, item in value.items()) + "}"
    return value if isinstance(value, str) else _element(value, kind, is_java)


def _element(value: Any, kind: str, is_java: bool) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if is_java else f"'{value}'"
    if isinstance(value, bool):
        return str(value).lower()
    ending = {"long": "L", "float": "f"}.get(_type(kind), "") if is_java and kind else ""
    return f"{value}{ending}"
