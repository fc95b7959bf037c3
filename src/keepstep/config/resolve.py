"""Each setting's value from what was given, the preset and the defaults, with `${…}` followed wherever it leads.

Values are worked out on demand: a reference may name any other setting, given or not, and a preset's fields follow
from `model.hidden`, which may itself be a reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keepstep.config.fields import Field, all_fields, all_sections
from keepstep.config.hints import hint_for
from keepstep.config.parse import COMMAND_LINE, Node, Problems
from keepstep.config.presets import ALIASES, PRESETS, preset_fields
from keepstep.config.values import Misfit, brief, convert, nearest, shown

_REFERENCE = re.compile(r"\$\$\{|\$\{([^${}]*)\}")


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    kind: Literal["default", "preset", "file", "command line", "interpolation"]
    place: str = ""
    """`run.yaml:14`, `command line` or a preset's name; empty for a default."""
    written: str = ""
    """What stands there when it is a reference: `${model.seq_len}`."""

    def __str__(self) -> str:
        match self.kind:
            case "default":
                return "default"
            case "preset":
                return f"preset {self.place}"
            case "interpolation":
                return f"{self.place} {self.written}"
            case _:
                return self.place


class Unusable(Exception):  # noqa: N818 - control flow: the problem itself is already on the list
    """The value cannot be had; why is already reported."""


class Resolver:
    """Answers `value(path)`; everything that goes wrong lands in `problems`, once."""

    def __init__(self, given: Mapping[str, Node], problems: Problems) -> None:
        self.given = given
        self.problems = problems
        self.values: dict[str, Any] = {}
        self.failed: set[str] = set()
        self.origins: dict[str, Origin] = {}
        self._open: list[str] = []
        self._preset: dict[str, Any] | None = None

    def value(self, path: str) -> Any:
        """The typed value of one setting; raises Unusable when it has none."""
        if path in self.values:
            return self.values[path]
        if path in self.failed:
            raise Unusable
        self._enter(path, self.given[path].place if path in self.given else "")
        try:
            self.values[path] = self._work_out(all_fields()[path])
        except Unusable:
            self.failed.add(path)
            raise
        finally:
            self._open.pop()
        return self.values[path]

    def _enter(self, key: str, place: str) -> None:
        if key in self._open:
            circle = [*self._open[self._open.index(key) :], key]
            message = f"{key} refers to itself: {' → '.join(circle)}"
            self.problems.add(place, message, "give one of them a value of its own")
            self.failed.update(name for name in circle if name in all_fields())
            raise Unusable
        self._open.append(key)

    def _work_out(self, field: Field) -> Any:
        node = self.given.get(field.path)
        if node is None:
            return self._not_given(field)
        value = self._expand(node)
        self.origins[field.path] = _origin(node)
        try:
            result = convert(field.type, value, node.text if value == node.value else "")
        except Misfit as misfit:
            self.problems.add(node.place, f"{field.path} is {brief(value)}, but it {misfit.rule}", misfit.hint)
            raise Unusable from None
        if field.path == "model.preset":
            self._check_preset(result, node)
        return result

    def _not_given(self, field: Field) -> Any:
        section, _, name = field.path.partition(".")
        if section == "model" and name != "preset":
            fields = self._preset_fields()
            if name in fields:
                self.origins[field.path] = Origin("preset", self.value("model.preset"))
                return fields[name]
        self.origins[field.path] = Origin("default")
        return field.default

    def _preset_fields(self) -> dict[str, Any]:
        if self._preset is None:
            self._preset = preset_fields(self.value("model.preset"), _GivenModel(self))
        return self._preset

    def _check_preset(self, name: str, node: Node) -> None:
        if name == "custom" or name in PRESETS or name in ALIASES:
            return
        near = nearest(name, [*PRESETS, *ALIASES, "custom"])
        hint = f"did you mean {near}?" if near else "keepstep models lists the presets"
        self.problems.add(node.place, f"model.preset is {name!r}, but it must be a preset's name or custom", hint)
        raise Unusable

    def _expand(self, node: Node) -> Any:
        """The node's plain value with every reference in it replaced."""
        match node.value:
            case Mapping():
                return {key: self._expand(item) for key, item in node.value.items()}
            case list() | tuple():
                return [self._expand(item) for item in node.value]
            case str(text) if "${" in text:
                return self._interpolate(text, node.place)
            case scalar:
                return scalar

    def _interpolate(self, text: str, place: str) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole and whole[1] is not None:
            return self._refer(whole[1].strip(), place)

        def part(match: re.Match[str]) -> str:
            if match[1] is None:
                return "${"
            value = self._refer(match[1].strip(), place)
            if isinstance(value, Mapping | list | tuple) or value is None:
                message = f"{match[0]} is {brief(value)}, which cannot stand inside a text"
                self.problems.add(place, message, "let the reference be the whole value")
                raise Unusable
            return value if isinstance(value, str) else shown(value)

        if "${" in _REFERENCE.sub("", text):
            self.problems.add(
                place, f"{text!r} has a ${{ that does not end", "write ${section.field}, or $${ for a plain ${"
            )
            raise Unusable
        return _REFERENCE.sub(part, text)

    def _refer(self, reference: str, place: str) -> Any:
        words = reference.split(".")
        for end in range(len(words), 0, -1):
            path = ".".join(words[:end])
            field = all_fields().get(path)
            if field is None or (end < len(words) and not field.is_mapping):
                continue
            if end == len(words):
                return self.value(path)
            return self._inside(path, words[end:], reference, place)
        if reference in all_sections():
            hint = f"name one of its fields: ${{{reference}.{_first_field(reference)}}}"
            self.problems.add(place, f"${{{reference}}} names a section, not a value", hint)
        else:
            self.problems.add(place, f"${{{reference}}} names a key that does not exist", hint_for(reference))
        raise Unusable

    def _inside(self, path: str, keys: list[str], reference: str, place: str) -> Any:
        """A value below a free mapping; only that one is worked out, so that variables may refer to one another."""
        node: Node | None = self.given.get(path)
        for key in keys:
            node = node.value.get(key) if node is not None and isinstance(node.value, Mapping) else None
        if node is None:
            there = self.given.get(path)
            names = list(there.value) if there is not None and isinstance(there.value, Mapping) else []
            near = nearest(keys[0], names)
            hint = f"did you mean ${{{path}.{near}}}?" if near else f"add {keys[0]} to {path}"
            self.problems.add(place, f"${{{reference}}} names a key that does not exist", hint)
            raise Unusable
        self._enter(reference, place)
        try:
            return self._expand(node)
        finally:
            self._open.pop()


class _GivenModel(Mapping[str, Any]):
    """The model fields that were given, worked out only when the preset asks for them."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    def __getitem__(self, name: str) -> Any:
        path = f"model.{name}"
        if path not in self._resolver.given:
            raise KeyError(name)
        return self._resolver.value(path)

    def __iter__(self) -> Iterator[str]:
        return (path.removeprefix("model.") for path in self._resolver.given if path.startswith("model."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _origin(node: Node) -> Origin:
    if isinstance(node.value, str) and _REFERENCE.sub("", node.value) != node.value:
        return Origin("interpolation", node.place, node.value)
    return Origin("command line" if node.place == COMMAND_LINE else "file", node.place)


def _first_field(section: str) -> str:
    return next(path for path in all_fields() if path.startswith(f"{section}.")).removeprefix(f"{section}.")
