"""Load a run.yaml and `a.b=value` overrides: defaults → preset → YAML → overrides → checks → one frozen config.

All errors are collected and raised together, each with its place, the value, the rule and a hint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.config.check import broken_rules
from keepstep.config.fields import all_fields, all_sections, assemble
from keepstep.config.hints import hint_for, hint_for_section
from keepstep.config.parse import COMMAND_LINE, Node, Problems, read_word, read_yaml
from keepstep.config.presets import PRESETS
from keepstep.config.resolve import Origin, Resolver, Unusable
from keepstep.config.schema import RENAMED, SHORT_FORMS, RunConfig
from keepstep.config.values import plain
from keepstep.core.errors import ConfigError, UsageError
from keepstep.core.messages import invalid_value
from keepstep.core.units import Duration
from keepstep.core.verbosity import debug

_OVERRIDE = re.compile(r"[A-Za-z_<$][^=/\\]*=")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config, and the origin of each value by dotted path."""

    config: RunConfig
    origins: dict[str, Origin]


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split the arguments of a command into at most one file and the overrides."""
    overrides = [word for word in words if _OVERRIDE.match(word)]
    files = [word for word in words if not _OVERRIDE.match(word)]
    if len(files) > 1:
        hint = _hint_to_set(files[1], "give one file and section.field=value overrides")
        raise UsageError(f"{files[1]!r} is neither the config file nor an override", hint)
    return (Path(files[0]) if files else None), overrides


def _hint_to_set(word: str, otherwise: str) -> str:
    if word in PRESETS:
        return f"write model={word} to choose this preset"
    return f"write {word}=VALUE to set it" if word in all_fields() else otherwise


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, resolve and check a configuration. A ConfigError reports all its errors."""
    problems = Problems()
    given: dict[str, Node] = {}
    root = _read_file(path, problems) if path is not None else None
    if root is not None:
        _collect(root, "", given, problems)
    for word in overrides:
        read = read_word(word, problems)
        if read is not None:
            _collect(_nested(*read), "", given, problems)

    debug(f"config file {path or 'none'}; set in it or by overrides: {', '.join(given)}")
    resolver = Resolver(given, problems)
    for field_path in all_fields():
        try:
            resolver.value(field_path)
        except Unusable:
            continue
    _resolve_shares(resolver, problems)
    config = assemble(resolver.values)
    _check_rules(config, resolver, problems)
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: _order(problem.message)))
    return LoadedConfig(config, {name: resolver.origins[name] for name in all_fields()})


def _resolve_shares(resolver: Resolver, problems: Problems) -> None:
    """Replace shares of the run (`0.02dur`) by lengths, so that everything below sees steps, tokens or time."""
    whole = resolver.values.get("max_duration")
    if whole is None:
        return  # it is wrong, and reported already
    if whole.unit == "dur":
        message = invalid_value("max_duration", str(whole), "is the whole run, of which dur is a share")
        problems.add(resolver.origins["max_duration"].place, message, "max_duration=1000ba, 2ep, 1e9tok or 10h")
        return
    for name, value in resolver.values.items():
        if isinstance(value, Duration):
            resolver.values[name] = value.share_of(whole)


def _read_file(path: Path, problems: Problems) -> Node | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = _hint_to_set(str(path), "keepstep new NAME writes a run.yaml to start from")
        problems.add("", f"there is no file {path}", hint)
    except UnicodeDecodeError as error:
        problems.add(str(path), f"is not UTF-8 text: {error.reason} at byte {error.start}", "is this the right file?")
    except OSError as error:
        problems.add("", f"cannot read {path}: {error.strerror}", "give the path of a run.yaml")
    else:
        root = read_yaml(text, str(path), problems)
        if root is None or root.value is None or isinstance(root.value, Mapping):
            return root
        problems.add(root.place, invalid_value("the file", plain(root), "must be keys and values"), "write name: value")
    return None


def _nested(path: str, node: Node) -> Node:
    """`a.b` and a node as nested mappings, as in a file."""
    for key in reversed(path.split(".")):
        node = Node({key: node}, node.place)
    return node


def _collect(node: Node, prefix: str, given: dict[str, Node], problems: Problems) -> None:
    """Put every known field inside `node` into `given`; a later layer replaces an earlier one."""
    if not isinstance(node.value, Mapping):
        return
    for key, child in node.value.items():
        path = RENAMED.get(prefix + key, prefix + key)
        if path != prefix + key and path.removeprefix(prefix) in node.value:
            problems.add(child.place, f"{prefix}{key} is the old name of {path}, which is given too", f"keep {path}")
        elif "." in key:
            _unknown(path, child, problems)  # `a.b:` next to `a: {b:}` could be two values of one key
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
    elif node.value is not None:  # all lines of a section may be commented out
        first = next(name for name in all_fields() if name.startswith(f"{path}."))
        hint = f"set one of its fields, for example {first}"
        problems.add(node.place, invalid_value(path, plain(node), "is a section"), hint)


def _merged(first: Node, second: Node) -> Node:
    # {} clears what an earlier layer gave: it could not mean anything else.
    if not isinstance(first.value, Mapping) or not isinstance(second.value, Mapping) or not second.value:
        return second
    merged: dict[str, Node] = dict(first.value)
    for key, node in second.value.items():
        merged[key] = _merged(merged[key], node) if key in merged else node
    return Node(merged, second.place)


def _unknown(path: str, node: Node, problems: Problems) -> None:
    # Report a single key inside an unknown section by its full path: `optimzer.lr`, not `optimzer`.
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
            continue  # the value is already reported, and a default stands in for it
        open_fields = [name for name in broken.fields if resolver.origins[name].kind in ("default", "preset")]
        if config.finetune.start_from and any(name.startswith("model.") for name in open_fields):
            continue  # the shape comes from start_from, and is checked once that is read
        place = next((resolver.origins[name].place for name in broken.fields if name not in open_fields), "")
        problems.add(place, broken.message, broken.hint)


def _order(message: str) -> tuple[int, int]:
    """Errors of the file by line, then those of the command line, in the order found."""
    line = re.match(rf"(?!{COMMAND_LINE}: ).+?:([0-9]+) ", message)
    return (0, int(line[1])) if line else (1, 0)
