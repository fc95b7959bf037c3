"""The schema seen as a flat list: every dotted path with its type and default. All other parts read it from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from keepstep.config.schema import RunConfig
from keepstep.core.units import ByteSize, Duration


@dataclass(frozen=True)
class Field:
    """One setting: `path` is how the user writes it."""

    path: str
    type: Any
    default: Any

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]

    @property
    def is_mapping(self) -> bool:
        """Whether keys below this one are the user's own."""
        return get_origin(without_none(self.type)) is Mapping


@cache
def all_fields() -> Mapping[str, Field]:
    """Every setting by its dotted path, in the schema's order."""
    return {field.path: field for field in _walk(RunConfig, "")}


@cache
def all_sections() -> Mapping[str, Any]:
    """Every section's dataclass by its dotted path."""
    return dict(_walk_sections(RunConfig, ""))


def _typed(section: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    types = get_type_hints(section)
    for field in dataclasses.fields(section):
        yield field, types[field.name]


def _walk(section: Any, prefix: str) -> Iterator[Field]:
    for field, kind in _typed(section):
        if dataclasses.is_dataclass(kind) and kind not in (Duration, ByteSize):
            yield from _walk(kind, f"{prefix}{field.name}.")
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        yield Field(prefix + field.name, kind, default)


def _walk_sections(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field, kind in _typed(section):
        if dataclasses.is_dataclass(kind) and kind not in (Duration, ByteSize):
            yield prefix + field.name, kind
            yield from _walk_sections(kind, f"{prefix}{field.name}.")


def without_none(kind: Any) -> Any:
    """`X` for `X | None`, and any other type unchanged."""
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return members[0] if len(members) == 1 else kind
    return kind


def allows_none(kind: Any) -> bool:
    """Whether `null` is a value of this type."""
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def assemble(values: Mapping[str, Any]) -> RunConfig:
    """The frozen config made of a value for each dotted path; what is missing keeps its default."""
    config: RunConfig = _assemble(RunConfig, "", values)
    return config


def _assemble(section: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    for field, kind in _typed(section):
        path = prefix + field.name
        if path in all_sections():
            arguments[field.name] = _assemble(kind, f"{path}.", values)
        elif path in values:
            arguments[field.name] = values[path]
    return section(**arguments)


def value_at(config: Any, path: str) -> Any:
    """The value of a dotted path."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def type_name(kind: Any) -> str:
    """The type as the reference page writes it."""
    if allows_none(kind):
        return f"{type_name(without_none(kind))} or null"
    if get_origin(kind) is Literal:
        return ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "list of " + _tuple_shape(kind)
    if get_origin(kind) is Mapping:
        return "mapping"
    plain = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return plain.get(kind) or {Duration: "duration", ByteSize: "size"}[kind]


def _tuple_shape(kind: Any) -> str:
    members = get_args(kind)
    if Ellipsis in members:
        return f"{type_name(members[0])}s"
    return f"{len(members)} {type_name(members[0])}s"
