"""From a run.yaml and `a.b=value` words to one frozen config: defaults → preset → YAML → overrides → checks.

All problems are collected and raised together, each with its place, the value, the rule and a hint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.config.check import broken_rules
from keepstep.config.fields import all_fields, all_sections, assemble, value_at
from keepstep.config.hints import hint_for, hint_for_section
from keepstep.config.parse import COMMAND_LINE, Node, Problems, read_word, read_yaml
from keepstep.config.resolve import Origin, Resolver, Unusable
from keepstep.config.schema import SHORT_FORMS, RunConfig
from keepstep.config.values import brief, plain
from keepstep.core.errors import ConfigError, UsageError

_OVERRIDE = re.compile(r"[A-Za-z_<$][^=/\\]*=")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config, and for each dotted field where its value came from."""

    config: RunConfig
    origins: dict[str, Origin]


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The words after a verb: at most one file, and the overrides."""
    overrides = [word for word in words if _OVERRIDE.match(word)]
    files = [word for word in words if not _OVERRIDE.match(word)]
    if len(files) > 1:
        hint = (
            f"write {files[1]}=VALUE to set it"
            if files[1] in all_fields()
            else "one file; the rest is section.field=value"
        )
        raise UsageError(f"{files[1]!r} is neither the run's file nor an override", hint)
    return (Path(files[0]) if files else None), overrides


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, resolve and check a configuration; a ConfigError names everything that is wrong with it."""
    problems = Problems()
    given: dict[str, Node] = {}
    root = _read_file(path, problems) if path is not None else None
    if root is not None:
        _collect(root, "", given, problems)
    for word in overrides:
        read = read_word(word, problems)
        if read is not None:
            _collect(_nested(*read), "", given, problems)

    resolver = Resolver(given, problems)
    for field_path in all_fields():
        try:
            resolver.value(field_path)
        except Unusable:
            continue
    config = assemble(resolver.values)
    _check_rules(config, resolver, problems)
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: _order(problem.message)))
    return LoadedConfig(config, {name: resolver.origins[name] for name in all_fields()})


def _read_file(path: Path, problems: Problems) -> Node | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = (
            f"write {path}=VALUE to set it"
            if str(path) in all_fields()
            else "keepstep new NAME writes a run.yaml to start from"
        )
        problems.add("", f"there is no file {path}", hint)
        return None
    except UnicodeDecodeError as error:
        problems.add(str(path), f"is not UTF-8 text: {error.reason} at byte {error.start}", "is this the right file?")
        return None
    except OSError as error:
        problems.add("", f"cannot read {path}: {error.strerror}", "give the path of a run.yaml")
        return None
    root = read_yaml(text, str(path), problems)
    if root is not None and root.value is not None and not isinstance(root.value, Mapping):
        problems.add(
            root.place, f"the file is {brief(plain(root))}, but it must be keys and values", "write name: value"
        )
        return None
    return root


def _nested(path: str, node: Node) -> Node:
    """`a.b` and a node as the mapping that a file would hold."""
    for key in reversed(path.split(".")):
        node = Node({key: node}, node.place)
    return node


def _collect(node: Node, prefix: str, given: dict[str, Node], problems: Problems) -> None:
    """Put every known field below `node` into `given`; a later layer replaces an earlier one."""
    if not isinstance(node.value, Mapping):
        return
    for key, child in node.value.items():
        path = prefix + key
        if "." in key:
            _unknown(path, child, problems)  # two spellings of one key could disagree in silence
        elif path in all_sections():
            _collect_section(path, child, given, problems)
        elif path in all_fields():
            below = all_fields()[path].is_mapping
            given[path] = _merged(given[path], child) if below and path in given else child
        else:
            _unknown(path, child, problems)


def _collect_section(path: str, node: Node, given: dict[str, Node], problems: Problems) -> None:
    if isinstance(node.value, Mapping):
        _collect(node, f"{path}.", given, problems)
    elif path in SHORT_FORMS and isinstance(node.value, str | int | float | bool):
        given[f"{path}.{SHORT_FORMS[path]}"] = node
    elif node.value is not None:  # a section whose every line is commented out is no mistake
        first = next(name for name in all_fields() if name.startswith(f"{path}."))
        hint = f"set one of its fields, for example {first}"
        problems.add(node.place, f"{path} is {brief(plain(node))}, but it is a section", hint)


def _merged(first: Node, second: Node) -> Node:
    if not isinstance(first.value, Mapping) or not isinstance(second.value, Mapping):
        return second
    merged: dict[str, Node] = dict(first.value)
    for key, node in second.value.items():
        merged[key] = _merged(merged[key], node) if key in merged else node
    return Node(merged, second.place)


def _unknown(path: str, node: Node, problems: Problems) -> None:
    # One key inside an unknown section is named whole: `optimzer.lr` says more than `optimzer`.
    while isinstance(node.value, Mapping) and len(node.value) == 1:
        ((key, node),) = node.value.items()
        path = f"{path}.{key}"
    if isinstance(node.value, Mapping) and node.value:
        problems.add(node.place, f"unknown section {path}", hint_for_section(path))
    else:
        problems.add(node.place, f"unknown key {path}", hint_for(path))


def _check_rules(config: RunConfig, resolver: Resolver, problems: Problems) -> None:
    for broken in broken_rules(config):
        if resolver.failed.intersection(broken.fields):
            continue  # a stand-in for a value that is already reported proves nothing
        if config.finetune.start_from and any(_is_open(name, resolver) for name in broken.fields):
            continue  # the shape follows from what training starts from, and is checked once that is read
        subject = broken.fields[0]
        written = (
            resolver.origins[name] for name in broken.fields if resolver.origins[name].kind not in ("default", "preset")
        )
        place = next((origin.place for origin in written), "")
        problems.add(place, f"{subject} is {brief(value_at(config, subject))}, but it {broken.rule}", broken.hint)


def _is_open(name: str, resolver: Resolver) -> bool:
    return name.startswith("model.") and resolver.origins[name].kind in ("default", "preset")


def _order(message: str) -> tuple[int, int]:
    """Problems of the file by line, then those of the command line, each in the order found."""
    line = re.match(rf"(?!{COMMAND_LINE}: ).+?:([0-9]+) ", message)
    return (0, int(line[1])) if line else (1, 0)
