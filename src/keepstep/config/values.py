"""Convert parsed values to the types of their fields. A value of the wrong type raises `Misfit` with the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from keepstep.config.fields import allows_none, without_none
from keepstep.config.parse import Node
from keepstep.core.messages import listed, nearest, shown
from keepstep.core.units import ByteSize, Duration


class Misfit(Exception):  # noqa: N818 - it becomes a line of the user's report
    """The value breaks `rule` (read after "but it")."""

    def __init__(self, rule: str, hint: str | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.hint = hint


def plain(node: Node) -> Any:
    """The node's value without places: scalars, lists and dicts."""
    match node.value:
        case Mapping():
            return {key: plain(item) for key, item in node.value.items()}
        case list() | tuple():
            return [plain(item) for item in node.value]
        case scalar:
            return scalar


def convert(kind: Any, value: Any, text: str = "") -> Any:
    """`value` as the field's type; `text` is the original text, where it says more than the value."""
    if allows_none(kind):
        return None if value is None or value == "" else convert(without_none(kind), value, text)
    origin = get_origin(kind)
    if origin is Literal:
        return _choice(get_args(kind), value, text)
    if origin is tuple:
        return _tuple(get_args(kind), value)
    if origin is Mapping:
        return _mapping(value)
    return _CONVERTERS[kind](value, text)


def _whole(value: Any, _text: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)  # large whole numbers are often written as `1e5`
    raise Misfit("must be a whole number")


def _number(value: Any, _text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misfit("must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Misfit("must be a finite number")
    return number


def _boolean(value: Any, _text: str) -> bool:
    if isinstance(value, bool):
        return value
    meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
    word = meant.get(str(value).lower())
    raise Misfit("must be true or false", f"write {word}" if word else None)


def _string(value: Any, text: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise Misfit("must be text", 'write "" for an empty text')
    if isinstance(value, bool | int | float | Duration | ByteSize):
        return text or shown(value)
    raise Misfit("must be text")


def _measure(parse: Callable[[str], Any]) -> Callable[[Any, str], Any]:
    def read(value: Any, text: str) -> Any:
        try:
            return parse(value if isinstance(value, str) else text or shown(value))
        except ValueError as error:
            raise Misfit(str(error)) from None
        except OverflowError:
            raise Misfit("must be a finite number with its unit") from None

    return read


def _duration(text: str) -> Duration:
    duration = Duration.parse(text)
    if not math.isfinite(duration.value):
        raise ValueError("must be finite")
    return duration


def _choice(choices: tuple[Any, ...], value: Any, text: str) -> Any:
    for choice in choices:
        if value == choice or (text and text == choice):
            return choice
    near = nearest(text or str(value), [str(choice) for choice in choices])
    raise Misfit(f"must be {listed(choices)}", f"did you mean {near}?" if near else None)


def _tuple(members: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Misfit("must be a list, written [a, b]")
    if Ellipsis in members:
        members = (members[0],) * len(value)
    if len(value) != len(members):
        raise Misfit(f"must be a list of {len(members)} values")
    try:
        return tuple(convert(kind, item) for kind, item in zip(members, value, strict=True))
    except Misfit as misfit:
        raise Misfit(f"is a list where each value {misfit.rule}", misfit.hint) from None


def _mapping(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Misfit("must be a mapping, written {name: value}")
    return dict(value)


_CONVERTERS: Mapping[Any, Callable[[Any, str], Any]] = {
    int: _whole,
    float: _number,
    bool: _boolean,
    str: _string,
    Duration: _measure(_duration),
    ByteSize: _measure(ByteSize.parse),
}
