"""The schema as a flat list: every dotted path with its type, range, default and help, for all other parts."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from keepstep.config import schema
from keepstep.config.ranges import Range
from keepstep.config.schema import RunConfig
from keepstep.core.units import ByteSize, Duration


@dataclass(frozen=True)
class Field:
    """One setting: `path` is how the user writes it."""

    path: str
    type: Any
    default: Any
    range: Range | None = None

    @property
    def shown_default(self) -> Any:
        """The default as a user writes it."""
        return (self.range or Range()).shown(self.default)

    @property
    def is_mapping(self) -> bool:
        """Whether the keys inside are chosen by the user."""
        return get_origin(without_none(self.type)) is Mapping


@cache
def all_sections() -> Mapping[str, Any]:
    """Every section's dataclass by its dotted path, each followed by the sections inside it."""
    return dict(_sections_of(RunConfig, ""))


def _sections_of(outer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(outer).items():
        if is_dataclass(kind) and kind not in (Duration, ByteSize):
            yield prefix + name, kind
            yield from _sections_of(kind, f"{prefix}{name}.")


@cache
def all_fields() -> Mapping[str, Field]:
    """Every setting by its dotted path, in the schema's order."""
    found = {}
    for section, kind in {"": RunConfig, **all_sections()}.items():
        defaults = kind()
        for name, hint in get_type_hints(kind, include_extras=True).items():
            path = f"{section}.{name}" if section else name
            if path not in all_sections():
                plain, bounds = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
                found[path] = Field(path, plain, getattr(defaults, name), bounds)
    return found


@cache
def field_help() -> Mapping[str, str]:
    """Help by dotted path, for fields and for sections, each as one line: the text below it in schema.py."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)}
    sections = {"": RunConfig, **all_sections()}
    texts = {path: kind.__doc__ or "" for path, kind in sections.items()}
    for path, kind in sections.items():
        for name, text in texts_below(classes[kind.__name__]):
            texts[f"{path}.{name}" if path else name] = text
    return {path: " ".join(texts.get(path, "").split()) for path in (*sections, *all_fields())}


def texts_below(section: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The fields of a class that have a text below them, each with its text."""
    for line, after in pairwise(section.body):
        match line, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, text


def without_none(kind: Any) -> Any:
    """`X` for `X | None`, and any other type unchanged."""
    members = [member for member in get_args(kind) if member is not NoneType]
    return members[0] if allows_none(kind) and len(members) == 1 else kind


def allows_none(kind: Any) -> bool:
    """Whether `null` is a value of this type."""
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def assemble(values: Mapping[str, Any]) -> RunConfig:
    """The frozen config with a value for each dotted path; missing ones keep their default."""
    given: dict[str, dict[str, Any]] = {section: {} for section in ("", *all_sections())}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        given[section][name] = value
    # Inner sections come after the one they are in.
    for path, kind in reversed(list(all_sections().items())):
        outer, _, name = path.rpartition(".")
        given[outer][name] = kind(**given[path])
    return RunConfig(**given[""])


def value_at(config: Any, path: str) -> Any:
    """The value of a dotted path."""
    return attrgetter(path)(config)


def shown_at(config: Any, path: str) -> Any:
    """The value of a dotted path as a user writes it: `auto` where a number stands for that."""
    return (all_fields()[path].range or Range()).shown(value_at(config, path))


def type_name(kind: Any) -> str:
    """The type as the reference page writes it."""
    if allows_none(kind):
        return f"{type_name(without_none(kind))} or null"
    if get_origin(kind) is Literal:
        return ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        members = get_args(kind)
        return f"list of {'' if Ellipsis in members else f'{len(members)} '}{type_name(members[0])}s"
    if get_origin(kind) is Mapping:
        return "mapping"
    plain = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return plain.get(kind) or {Duration: "duration", ByteSize: "size"}[kind]
