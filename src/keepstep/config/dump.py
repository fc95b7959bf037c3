"""A config as YAML text that loads back to an equal config: what is saved with every run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from keepstep import __version__
from keepstep.config.fields import all_fields, value_at
from keepstep.config.parse import read_scalar
from keepstep.config.schema import RunConfig
from keepstep.core.units import ByteSize, Duration

# Text that YAML reads as itself without quotes, in block and in flow style alike.
_PLAIN = re.compile(r"[A-Za-z0-9_./+-](?:[A-Za-z0-9_./+ -]*[A-Za-z0-9_./+-])?")


def dump_config(config: RunConfig) -> str:
    """Every field, references resolved, in the schema's order."""
    lines = [text for text, _ in yaml_lines(config)]
    return "\n".join([f"# Every setting of this run, as keepstep {__version__} resolved it.", *lines, ""])


def yaml_lines(config: RunConfig) -> Iterator[tuple[str, str]]:
    """One line a field, and one a section, each with its dotted path."""
    opened: set[str] = set()
    for path, field in all_fields().items():
        section = path.rpartition(".")[0]
        if section and section not in opened:
            opened.add(section)
            yield f"{'  ' * section.count('.')}{section.rpartition('.')[2]}:", section
        yield f"{'  ' * path.count('.')}{field.name}: {written(value_at(config, path))}", path


def written(value: Any) -> str:
    """A value on one line of YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        case int() | float():
            return repr(value)
        case Duration() | ByteSize():
            return str(value)
        case Mapping():
            return "{" + ", ".join(f"{_text(key)}: {written(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(written(item) for item in value) + "]"
        case _:
            # A saved text must not be taken for a reference when it is read again.
            return _text(str(value).replace("${", "$${"))


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text[:1] not in "-" and text[:3] != "..." and isinstance(read_scalar(text), str):
        return text
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def plain_value(value: Any) -> Any:
    """One value as JSON holds it: durations and sizes as text, tuples as lists."""
    match value:
        case Duration() | ByteSize():
            return str(value)
        case Mapping():
            return {key: plain_value(item) for key, item in value.items()}
        case list() | tuple():
            return [plain_value(item) for item in value]
        case _:
            return value
