"""Parse YAML and `a.b=value` overrides into nodes that remember their file and line.

Plain scalars follow YAML 1.2, not PyYAML's 1.1: `1e-4` and `1_000` are numbers, `no` and `on` are text, only true and
false are booleans. Tags, merge keys and duplicate keys are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from keepstep.core.errors import KeepstepError

COMMAND_LINE = "command line"

# More than any real configuration has: a few nested aliases can expand to billions of nodes.
_MAX_NODES, _MAX_DEPTH, _MAX_PROBLEMS = 100_000, 100, 1000

_NULL = re.compile(r"(?:~|null|Null|NULL)?")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_BASED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Node:
    """A value as written: a scalar, a list of nodes or a mapping to nodes."""

    value: Scalar | Sequence[Node] | Mapping[str, Node]
    place: str
    """`run.yaml:14` or `command line`."""
    text: str = field(default="", compare=False)
    """The text of a scalar, before it was read as a number or a boolean."""


class Problems(list[KeepstepError]):
    """The errors found so far; reading continues after each."""

    def add(self, place: str, message: str, hint: str | None = None) -> None:
        """Add one error with its place in front. Duplicates are dropped."""
        separator = ": " if place == COMMAND_LINE else " "
        text = f"{place}{separator}{message}" if place else message
        if len(self) < _MAX_PROBLEMS and all(text != problem.message for problem in self):
            self.append(KeepstepError(text, hint))


def read_scalar(text: str) -> Scalar:
    """The value of a plain (unquoted) scalar."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    try:
        if _INT.fullmatch(text):
            return int(text)
        if _BASED.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            return float(text)
    except ValueError:
        return text  # `1__0`, or more digits than Python reads
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """Composes nodes only. Without constructors, no tag can create an object."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def resolve(self, kind: Any, _value: Any, implicit: Any) -> str:
        # Only called for nodes without a tag, so explicit tags can be recognized.
        if kind is yaml.ScalarNode:
            return "plain" if implicit[0] else "quoted"
        return "collection"


class _Converter:
    """Converts PyYAML's nodes to ours, with guards against recursive and exploding aliases."""

    def __init__(self, name: str, problems: Problems) -> None:
        self.name = name
        self.problems = problems
        self.open: set[int] = set()
        self.count = 0

    def place(self, node: yaml.Node) -> str:
        return COMMAND_LINE if self.name == COMMAND_LINE else f"{self.name}:{node.start_mark.line + 1}"

    def convert(self, node: yaml.Node, place: str) -> Node:
        self.count += 1
        if self.count > _MAX_NODES or len(self.open) > _MAX_DEPTH:
            raise RecursionError
        if node.tag not in ("plain", "quoted", "collection", "tag:yaml.org,2002:str"):
            self.problems.add(place, f"the tag {node.tag} is not supported", "write the plain value without a tag")
        if id(node) in self.open:
            self.problems.add(place, "this alias contains itself", "use the alias outside of its own anchor")
            return Node(None, place)
        if isinstance(node, yaml.ScalarNode):
            value = read_scalar(node.value) if node.tag == "plain" else node.value
            return Node(value, place, node.value)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return Node([self.convert(item, self.place(item)) for item in node.value], place)
            return Node(self.mapping(node), place)
        finally:
            self.open.remove(id(node))

    def mapping(self, node: yaml.Node) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            key = key_node.value
            if not isinstance(key, str) or key == "":
                self.problems.add(place, "a key must be plain text", "write name: value")
            elif key == "<<" and key_node.tag == "plain":
                self.convert(value_node, place)
                self.problems.add(
                    place, "merge keys (<<) are not supported", "share values with variables: and ${variables.name}"
                )
            elif key in entries:
                self.problems.add(
                    place, f"the key {key} is given twice, first at {entries[key].place}", "keep one of them"
                )
            else:
                entries[key] = self.convert(value_node, place)
        return entries


def read_yaml(text: str, name: str, problems: Problems) -> Node | None:
    """One document as nodes; None if it is empty or invalid (then `problems` says why)."""
    try:
        root = _Loader(text).get_single_node()
        if root is None:
            return None
        converter = _Converter(name, problems)
        return converter.convert(root, converter.place(root))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = name if mark is None or name == COMMAND_LINE else f"{name}:{mark.line + 1}"
        problems.add(place, f"is not valid YAML: {error.problem or error.context}", _syntax_hint(text, mark))
    except yaml.YAMLError as error:
        problems.add(name, f"is not valid YAML: {str(error).splitlines()[0]}")
    except RecursionError:
        problems.add(
            name, "is too large or too deeply nested for a configuration", "look for aliases (*) that multiply"
        )
    return None


def load_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """What PyYAML reads from a file of settings; aliases that multiply and deep nesting are a YAMLError."""
    try:
        _Converter("", Problems()).convert(_Loader(text).get_single_node() or yaml.ScalarNode("plain", ""), "")
        return yaml.load(text, loader)
    except RecursionError:
        raise yaml.YAMLError("it is too large or too deeply nested: look for aliases (*) that multiply") from None


def load_own_yaml(text: str) -> Any:
    """A file of this package: libyaml reads it ten times faster, where PyYAML has it."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _syntax_hint(text: str, mark: Any) -> str | None:
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines):
        return None
    line = lines[mark.line]
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "indent with spaces: YAML does not allow tabs"
    if ":" in line and ": " not in line and not line.rstrip().endswith(":"):
        return "add a space after the colon"
    return f"column {mark.column + 1} of: {line.strip()}"


def read_word(word: str, problems: Problems) -> tuple[str, Node] | None:
    """The path and node of one `a.b=value` override. A value that starts with a bracket or a quote is read as YAML."""
    path, equals, text = word.partition("=")
    path, text = path.strip(), text.strip()
    if not equals or not path or "" in path.split("."):
        problems.add(
            COMMAND_LINE, f"{word!r} is not an override", "write section.field=value, for example optimizer.lr=3e-4"
        )
        return None
    if text[:1] in ("[", "{", '"', "'") and not text.startswith("{{"):
        before = len(problems)
        node = read_yaml(text, COMMAND_LINE, problems)
        return (path, node) if node is not None and len(problems) == before else None
    # An empty value is an empty text: a shell has no other way to write one.
    return path, Node(read_scalar(text) if text else "", COMMAND_LINE, text)
