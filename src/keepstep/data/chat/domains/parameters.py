"""Parameters of generated functions: how the grammar describes them, their schemas, and values as called and as said.

A kind is a list of the grammar in CAPITALS, or one of `_KINDS`. `choice a,b`, `int 1 9`, `float 1 9` and `list KIND`
take arguments; `object NAME {PARAMETER; PARAMETER}` has parameters of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

_COMPOSED_SHARE, _INVENTED_SHARE = 0.5, 0.15
"""Of the values of lists that have further ones: a list that is known by heart is not copied from the request."""
_SYNONYM_SHARE = 0.3
"""Of the choices that have other words."""
_STARTS = ("b", "br", "ch", "d", "dr", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "st", "t",
           "v", "z")  # fmt: skip
_ENDS = ("", "", "l", "n", "r", "s", "th", "x", "ck", "nd", "rt", "m")
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


@cache
def grammar() -> Mapping[str, Any]:
    """What `domains.yaml` holds."""
    loaded: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("domains.yaml").read_text(encoding="utf-8"))
    return loaded


@dataclass(frozen=True)
class Slot:
    """A parameter as the grammar describes it."""

    kind: str
    names: tuple[str, ...]
    phrases: tuple[str, ...]
    """How a request says it; {} is the value. Of a flag: the words for true and for false."""
    required: bool = True
    parts: tuple[Slot, ...] = ()
    unit: str = ""
    seldom: bool = False
    """Whether few requests give it a value."""


@dataclass(frozen=True)
class Action:
    """What a function is for: its words, how people ask for it, and its parameters."""

    domain: str
    name: str
    does: str
    asks: tuple[str, ...]
    slots: tuple[Slot, ...]
    language: str = ""
    """Of code: whose types the values have, written as text."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of one drawn function."""

    slot: Slot
    name: str
    schema: dict[str, Any]
    form: str = ""
    """How a value of several spellings is written in calls."""
    parts: tuple[Parameter, ...] = ()

    @property
    def words(self) -> str:
        """The name as people write it."""
        return spaced(self.name)


@dataclass(frozen=True)
class Said:
    """A value in a call, and in a request."""

    value: Any
    text: str


@cache
def parse_slot(text: str) -> Slot:
    """A slot from its line in the grammar."""
    required, seldom, text = not text.startswith("?"), text.startswith("??"), text.lstrip("?")
    if found := re.fullmatch(r"object (\S+) \{(.*)\}: ?", text):
        parts = tuple(parse_slot(part) for part in found[2].split("; "))
        return Slot("object", tuple(found[1].split("/")), ("{}",), required, parts, seldom=seldom)
    head, _, phrases = text.partition(": ")
    kind, _, names = head.rpartition(" ")
    separator = "|" if kind == "flag" else "; "
    return Slot(kind, tuple(names.split("/")), tuple(phrases.split(separator)), required, seldom=seldom)


def spaced(name: str) -> str:
    """Words of a name in snake or camel case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.replace("_", " ").replace(".", " ")).lower()


def camel(words: str) -> str:
    """Words in camel case, the first one small."""
    first, *rest = re.split(r"[\s_-]+", words)
    return first + "".join(word.capitalize() for word in rest)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def one_of(draw: Random, pool: str) -> str:
    """A value of a list of the grammar, in small letters if its name is; PERSON is a first and a last name."""
    if pool == "PERSON":
        return f"{one_of(draw, 'FIRST')} {one_of(draw, 'LAST')}"
    if pool.islower():
        return one_of(draw, pool.upper()).lower()
    templates, share = grammar()["composed"].get(pool, ()), draw.random()
    if pool in ("FIRST", "LAST", "PLACE") or templates:
        if share < _INVENTED_SHARE:
            return invented(draw) if draw.random() < 0.7 else f"{invented(draw)} {invented(draw)}"
        if templates and share < _INVENTED_SHARE + _COMPOSED_SHARE:
            return filled(draw.choice(templates), draw)
    value = str(draw.choice(grammar()["values"][pool]))
    return value.capitalize() if pool in ("NOUN", "ADJECTIVE") else value


def filled(text: str, draw: Random) -> str:
    """A sentence of the grammar with values for its {LISTS}."""

    def value(found: re.Match[str]) -> str:
        return str(draw.randint(10, 9999)) if found[1] == "number" else one_of(draw, found[1])

    return re.sub(r"\{(\w+)\}", value, text)


def invented(draw: Random) -> str:
    """A name that nobody has, from two or three syllables: it can only be copied."""
    syllables = (
        "".join((draw.choice(_STARTS), draw.choice("aeiou"), draw.choice(_ENDS))) for _ in range(draw.randint(1, 3))
    )
    return "".join(syllables).capitalize()


def drawn_value(parameter: Parameter, draw: Random) -> Said:
    """A value that fits a parameter."""
    if parameter.slot.kind == "object":
        said = [(part, drawn_value(part, draw)) for part in parameter.parts]
        text = " ".join(phrase(part, each, draw) for part, each in said)
        return Said({part.name: each.value for part, each in said}, text)
    return value_of(parameter.slot.kind, parameter.form, draw)


def phrase(parameter: Parameter, said: Said, draw: Random) -> str:
    """What a request says of a parameter."""
    phrases = parameter.slot.phrases
    if parameter.slot.kind == "flag":
        return phrases[0 if said.value else -1]
    return draw.choice(phrases).replace("{}", said.text)


def value_of(kind: str, form: str, draw: Random) -> Said:
    """A value of a kind."""
    name, _, rest = kind.partition(" ")
    if name == "CURRENCY":
        code, _, words = one_of(draw, name).partition("=")
        return Said(code, draw.choice((code, words)))
    if kind == "CITY" and form:
        return _town(form, draw)
    if name == "PERSON" or name in grammar()["values"]:
        text = one_of(draw, name)
        return Said(text.removeprefix("the "), text)
    return _KINDS[name](rest, form, draw)


def _town(form: str, draw: Random) -> Said:
    """A town with its state, as the form has both. Most requests name the town alone."""
    state, towns = draw.choice(list(grammar()["towns"].items()))
    name, _, code = state.rpartition(" ")
    town = draw.choice(towns)
    value = form.replace("City", town).replace("State", name).replace("ST", code)
    return Said(value, draw.choice((town, town, town, town, value, f"{town}, {name}", f"{town} in {name}")))


def spelled(value: str, form: str) -> str:
    """A value of a choice as its schema writes it."""
    return {"Title": value.replace("_", " ").title(), "UPPER": value.upper()}.get(form, value)


def _choice(rest: str, form: str, draw: Random) -> Said:
    options = rest.split(",")
    value = draw.choice(options)
    others = [word for word in grammar()["synonyms"].get(value, ()) if word not in options]
    text = draw.choice(others) if others and draw.random() < _SYNONYM_SHARE else value.replace("_", " ")
    return Said(spelled(value, form), text)


def _int(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    low, high = map(int, rest.split())
    value = draw.randint(low, high)
    if value > 200 and draw.random() < 0.6:
        value = value // 50 * 50
    if 0 <= value < len(NUMBER_WORDS) and draw.random() < 0.2:
        return Said(value, NUMBER_WORDS[value])
    return Said(value, f"{value:,}" if value > 999 and draw.random() < 0.4 else str(value))


def _float(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    low, high = map(float, rest.split())
    value = round(draw.uniform(low, high), draw.choice((1, 1, 2)))
    if high > 5 and draw.random() < 0.4:
        return Said(float(round(value)), str(round(value)))
    return Said(value, str(value))


def _percent(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    percent = draw.choice((draw.randint(1, 15), draw.randint(2, 30) / 2, draw.randint(1, 40) / 4))
    text = f"{percent:g}"
    said = draw.choice((f"{text}%", f"{text} percent", f"{text}%"))
    return Said(percent if form == "percent" else round(percent / 100, 5), said)


def _money(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    value = draw.choice((draw.randint(1, 99) * 10_000, draw.randint(1, 99) * 1000, draw.randint(2, 99) * 100,
                         draw.randint(20, 999)))  # fmt: skip
    number = f"{value:,}" if draw.random() < 0.5 else str(value)
    if draw.random() < 0.1:
        millions = draw.choice((draw.randint(1, 40), draw.randint(2, 60) / 4))
        return Said(
            round(millions * 1_000_000), draw.choice((f"${millions:g} million", f"{millions:g} million dollars"))
        )
    return Said(value, draw.choice((f"${number}", f"{number} dollars", number, f"{number} euros")))


def _date(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    year, month, day = draw.randint(2019, 2027), draw.randint(1, 12), draw.randint(1, 28)
    name = grammar()["values"]["MONTH"][month - 1]
    iso = f"{year}-{month:02}-{day:02}"
    value = form.replace("YYYY", f"{year}").replace("MM", f"{month:02}").replace("DD", f"{day:02}")
    ending = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    spoken = (value, value, iso, f"{name} {day}, {year}", f"{day} {name} {year}", f"{name} {day}{ending}, {year}")
    return Said(value, draw.choice(spoken))


def _time(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    hour, minute = draw.randint(0, 23), draw.choice((0, 0, 15, 30, 45))
    value = f"{hour:02}:{minute:02}"
    half = f"{(hour - 1) % 12 + 1}{f':{minute:02}' if minute else ''} {'AM' if hour < 12 else 'PM'}"
    if form == "hh:mm AM":
        return Said(f"{(hour - 1) % 12 + 1:02}:{minute:02} {half[-2:]}", draw.choice((value, half)))
    return Said(value, draw.choice((value, value, half)))


def _list(rest: str, form: str, draw: Random) -> Said:
    said = [value_of(rest, form, draw) for _ in range(draw.choice((2, 2, 3, 3, 4, 5, 7)))]
    values = list({repr(each.value): each for each in said}.values())
    # In a list, 1,250 would be two numbers.
    texts = [str(each.value) if isinstance(each.value, int) and "," in each.text else each.text for each in values]
    plain = f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]
    listed = ", ".join(texts)
    spoken = draw.choice((plain, plain, listed, f"[{listed}]"))
    return Said([each.value for each in values], spoken)


def _quoted(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    pools = draw.choice(("TASK", "TITLE", "TOPIC", "WORD", "FOOD", "SONG", "TASK"))
    text = one_of(draw, pools)
    value = draw.choice(
        (
            text.capitalize() if pools == "TASK" else text,
            f"{one_of(draw, 'WORD')} {one_of(draw, 'WORD')}".title(),
            f"Please {one_of(draw, 'TASK')} before {one_of(draw, 'DAY')}",
            f"Talk about {one_of(draw, 'TOPIC')}",
            f"{one_of(draw, 'FIRST')} wants to {one_of(draw, 'TASK')}",
            f"{draw.randint(1, 99)} {one_of(draw, 'WORD').capitalize()} Street, {one_of(draw, 'CITY')}",
        )
    )
    mark = draw.choice("'\"")
    return Said(value, f"{mark}{value}{mark}")


def _formula(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    a, b, power = draw.randint(2, 9), draw.randint(1, 20), draw.randint(2, 4)
    value = draw.choice((f"{a}*x**{power} + {b}*x", f"x**{power} - {b}", f"{a}*x + {b}", f"{a}*x**{power}", "sin(x)"))
    return Said(value, draw.choice((value, value.replace("**", "^").replace("*", ""))))


def _items(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    items = [{"name": one_of(draw, "PRODUCT"), "price": draw.randint(5, 900)} for _ in range(draw.randint(1, 3))]
    return Said(items, " and ".join(f"a {item['name']} at {item['price']} dollars" for item in items))


def _settings(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
    names = draw.sample(grammar()["code_nouns"], draw.randint(1, 3))
    settings = {name: draw.choice((draw.randint(1, 99), one_of(draw, "word"), draw.random() < 0.5)) for name in names}
    said = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    listed = " and ".join(f"{name} set to {value}" for name, value in said.items())
    return Said(settings, draw.choice((json.dumps(settings), json.dumps(settings).replace('"', "'"), listed)))


def _same(make: Callable[[Random], Any]) -> Callable[[str, str, Random], Said]:
    """A kind whose values are said as they are written."""

    def drawn(rest: str, form: str, draw: Random) -> Said:  # noqa: ARG001
        value = make(draw)
        return Said(value, str(value))

    return drawn


def _id(draw: Random) -> str:
    letters = "".join(draw.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=3))
    number = draw.randint(100, 999999)
    return draw.choice((f"{letters}-{number}", f"{letters}{number}", str(number), f"{letters.lower()}_{number}"))


def _email(draw: Random) -> str:
    return f"{one_of(draw, 'FIRST')}.{one_of(draw, 'LAST')}@{_words(draw, 1, '')}.com".lower().replace(" ", "")


def _words(draw: Random, count: int, joined: str) -> str:
    return joined.join(one_of(draw, "WORD").lower().replace(" ", "-") for _ in range(count))


_KINDS: Mapping[str, Callable[[str, str, Random], Said]] = {
    "choice": _choice, "int": _int, "float": _float, "percent": _percent, "money": _money, "date": _date, "time": _time,
    "list": _list, "quoted": _quoted, "formula": _formula, "items": _items, "settings": _settings,
    "flag": _same(lambda draw: draw.random() < 0.7),
    "count": _same(lambda draw: draw.randint(1, 9)),
    "year": _same(lambda draw: draw.randint(1950, 2026)),
    "fraction": _same(lambda draw: round(draw.uniform(0.01, 0.95), 2)),
    "id": _same(_id),
    "email": _same(_email),
    "phone": _same(lambda draw: f"+{draw.randint(1, 98)}-{draw.randint(200, 999)}-{draw.randint(1000, 9999)}"),
    "url": _same(lambda draw: f"https://{_words(draw, 1, '')}.example.com/{_words(draw, 2, '/')}"),
    "path": _same(lambda draw: f"/{_words(draw, 2, '/')}{draw.choice(('', '.csv', '.txt', '.pdf', '.png'))}"),
    "word": _same(lambda draw: f"{_words(draw, 1, '')}{draw.choice(('', '', str(draw.randint(1, 99))))}"),
    "identifier": _same(lambda draw: camel(_code_words(draw))),
    "dna": _same(lambda draw: "".join(draw.choices("ACGT", k=draw.randint(6, 14)))),
    "point": _same(lambda draw: [draw.randint(-20, 40), draw.randint(-20, 40)]),
    "matrix": _same(lambda draw: [[draw.randint(0, 9) for _ in range(2)] for _ in range(2)]),
}  # fmt: skip


def _code_words(draw: Random) -> str:
    nouns = grammar()["code_nouns"]
    return " ".join(draw.sample(nouns, 2)) if draw.random() < 0.7 else f"my {draw.choice(nouns)}"
