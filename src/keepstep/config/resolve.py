"""Resolve each setting from the given values, the preset and the defaults, including `${…}` references.

Values are resolved on demand: a reference may name any other setting, and a preset's fields depend on `model.hidden`,
which may itself be a reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from keepstep.config.fields import Field, all_fields, all_sections
from keepstep.config.hf_config import find_model_file
from keepstep.config.hints import hint_for
from keepstep.config.parse import COMMAND_LINE, Node, Problems
from keepstep.config.presets import ALIASES, PRESETS, preset_fields
from keepstep.config.ranges import Range
from keepstep.config.schema import RENAMED
from keepstep.config.values import Misfit, convert
from keepstep.core.errors import KeepstepError
from keepstep.core.messages import brief, invalid_value, nearest, shown

_REFERENCE = re.compile(r"\$\$\{|\$\{([^${}]*)\}")


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    kind: Literal["default", "preset", "file", "command line", "interpolation"]
    place: str = ""
    """`run.yaml:14`, `command line` or a preset's name; empty for a default."""
    written: str = ""
    """The text there, if it is a reference: `${model.seq_len}`."""

    def __str__(self) -> str:
        if self.kind in ("default", "preset"):
            return f"{self.kind} {self.place}" if self.place else self.kind
        return f"{self.place} {self.written}" if self.written else self.place


class Unusable(Exception):  # noqa: N818 - control flow: the error is already on the list
    """The value is invalid; the reason is already reported."""


class Resolver:
    """Resolves `value(path)`. Errors are added to `problems`, once each."""

    def __init__(self, given: Mapping[str, Node], problems: Problems) -> None:
        self.given = given
        self.problems = problems
        self.values: dict[str, Any] = {}
        self.failed: set[str] = set()
        self.origins: dict[str, Origin] = {}
        self._open: list[str] = []

    def value(self, path: str) -> Any:
        """The typed value of one setting. Raises Unusable if it is invalid."""
        if path in self.values:
            return self.values[path]
        if path in self.failed:
            raise Unusable
        self._enter(path, self.given[path].place if path in self.given else "")
        try:
            self.values[path] = self._resolve(all_fields()[path])
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
            self.problems.add(place, message, "replace one of the references by a value")
            self.failed.update(name for name in circle if name in all_fields())
            raise Unusable
        self._open.append(key)

    def _resolve(self, field: Field) -> Any:
        node = self.given.get(field.path)
        if node is None:
            return self._not_given(field)
        bounds = field.range or Range()
        value = bounds.read(self._expand(node))
        self.origins[field.path] = _origin(node)
        try:
            result = convert(field.type, value, node.text if value == node.value else "")
        except Misfit as misfit:
            rule, hint = misfit.rule, misfit.hint
            if bounds.word:
                rule = f"{rule}, or {bounds.word}"
                hint = hint or (f"did you mean {bounds.word}?" if nearest(str(value), [bounds.word]) else None)
            self.problems.add(node.place, invalid_value(field.path, value, rule), hint)
            raise Unusable from None
        return self._known_preset(result, node) if field.path == "model.preset" else result

    def _not_given(self, field: Field) -> Any:
        section, _, name = field.path.partition(".")
        outer, _, inner = name.partition(".")
        if section == "model" and name != "preset" and outer in self._preset:
            self.origins[field.path] = Origin("preset", self.value("model.preset"))
            return getattr(self._preset[outer], inner) if inner else self._preset[outer]
        self.origins[field.path] = Origin("default")
        return field.default

    @cached_property
    def _preset(self) -> dict[str, Any]:
        name = self.value("model.preset")
        try:
            return preset_fields(name, self._given_model)
        except KeepstepError as error:
            message = error.message if name in error.message else f"{name}: {error.message}"
            self.problems.add(self.given["model.preset"].place, message, error.hint)
            raise Unusable from None

    def _given_model(self, name: str, default: Any) -> Any:
        path = f"model.{name}"
        return self.value(path) if path in self.given else default

    def _known_preset(self, name: str, node: Node) -> str:
        if name == "custom" or name in PRESETS or name in ALIASES:
            return name
        # A file's place is `run.yaml:14`.
        path = find_model_file(name, Path(node.place.rpartition(":")[0]).parent)
        if path is not None:
            return path
        near = nearest(name, [*PRESETS, *ALIASES, "custom"])
        hint = f"did you mean {near}?" if near else "keepstep models lists the presets; a path has a / in it"
        self.problems.add(node.place, invalid_value("model.preset", name, "must be a preset's name or custom"), hint)
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
                message = f"{match[0]} is {brief(value)}, which cannot be part of a text"
                self.problems.add(place, message, "use the reference as the whole value")
                raise Unusable
            return value if isinstance(value, str) else shown(value)

        if "${" in _REFERENCE.sub("", text):
            self.problems.add(
                place, f"{text!r} has a ${{ without a closing }}", "write ${section.field}, or $${ for a plain ${"
            )
            raise Unusable
        return _REFERENCE.sub(part, text)

    def _refer(self, reference: str, place: str) -> Any:
        words = reference.split(".")
        for end in range(len(words), 0, -1):
            path = RENAMED.get(".".join(words[:end]), ".".join(words[:end]))
            field = all_fields().get(path)
            if field is None or (end < len(words) and not field.is_mapping):
                continue
            if end == len(words):
                return self.value(path)
            return self._inside(path, words[end:], reference, place)
        if reference in all_sections():
            first = next(name for name in all_fields() if name.startswith(f"{reference}."))
            hint = f"name one of its fields: ${{{first}}}"
            self.problems.add(place, f"${{{reference}}} names a section, not a value", hint)
        else:
            self.problems.add(place, f"${{{reference}}} names a key that does not exist", hint_for(reference))
        raise Unusable

    def _inside(self, path: str, keys: list[str], reference: str, place: str) -> Any:
        """A value inside a free mapping. Only this one is resolved, so that variables may refer to each other."""
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


def _origin(node: Node) -> Origin:
    if isinstance(node.value, str) and _REFERENCE.sub("", node.value) != node.value:
        return Origin("interpolation", node.place, node.value)
    return Origin("command line" if node.place == COMMAND_LINE else "file", node.place)
