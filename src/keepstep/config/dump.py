"""A config as YAML that loads back to an equal config: saved with every run, and shown with each value's origin."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from string import Template
from typing import Any

from keepstep import __version__
from keepstep.config.fields import all_fields, all_sections, shown_at, value_at
from keepstep.config.hf_config import is_model_file
from keepstep.config.load import LoadedConfig
from keepstep.config.parse import read_scalar
from keepstep.config.schema import RunConfig
from keepstep.core.units import ByteSize, Duration

_WIDEST_ALIGNED = 48
# Text that needs no quotes, in block and flow style.
_PLAIN = re.compile(r"[A-Za-z0-9_./+-](?:[A-Za-z0-9_./+ -]*[A-Za-z0-9_./+-])?")


def dump_config(config: RunConfig) -> str:
    """Every field, references resolved, in the schema's order. A model from a file is `custom`: no file is needed."""
    if is_model_file(config.model.preset):
        config = replace(config, model=replace(config.model, preset="custom"))
    lines = [text for text, _ in _yaml_lines(config)]
    return "\n".join([f"# Every setting of this run, as keepstep {__version__} resolved it.", *lines, ""])


def model_overrides(config: RunConfig) -> list[str]:
    """A model from a file as overrides, for restarts and jobs: the file may change, or be missing there."""
    given = [path for path in all_fields() if path.startswith("model.") and is_model_file(config.model.preset)]
    return [f"{path}={written(value_at(config, path))}" for path in given]


def show_config(loaded: LoadedConfig, changed_only: bool = False) -> str:
    """The effective config with origins as comments, which can be loaded again; `changed_only` leaves out defaults."""
    kept = {path for path, origin in loaded.origins.items() if not changed_only or origin.kind != "default"}
    sections = {path for path in all_sections() if any(field.startswith(f"{path}.") for field in kept)}
    lines = [(text, path) for text, path in _yaml_lines(loaded.config) if path in kept or path in sections]
    width = max((len(text) for text, _ in lines if len(text) <= _WIDEST_ALIGNED), default=0)
    return "\n".join(
        # A reference may span several lines, a comment may not.
        text if path in sections else f"{text:<{width}}  # {' '.join(str(loaded.origins[path]).split())}"
        for text, path in lines
    )


def show_as_json(loaded: LoadedConfig, changed_only: bool = False) -> dict[str, Any]:
    """Each dotted field with its value and origin; `changed_only` leaves out defaults."""
    return {
        path: {"value": plain_value(shown_at(loaded.config, path)), "origin": str(loaded.origins[path])}
        for path in all_fields()
        if not changed_only or loaded.origins[path].kind != "default"
    }


def _yaml_lines(config: RunConfig) -> Iterator[tuple[str, str]]:
    """One line per field and section, each with its dotted path."""
    opened = ""
    for path in all_fields():
        section, _, name = path.rpartition(".")
        if section != opened:
            opened = section
            outer, _, last = section.rpartition(".")
            yield f"{_indent(outer)}{last}:", section
        yield f"{_indent(section)}{name}: {written(shown_at(config, path))}", path


def _indent(section: str) -> str:
    return "  " * len(section.split(".")) if section else ""


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
            # A saved text must not be read as a reference.
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


NEW_RUN_BATCH = 16
"""Rows per step of `keepstep new`: for a laptop, so a cluster may choose its own."""


def run_yaml(name: str, path: str, steps: int = 300) -> str:
    """The commented run.yaml that `keepstep new` writes and the demo trains."""
    text = (resources.files("keepstep.config") / "new_run.yaml").read_text(encoding="utf-8")
    return Template(text).substitute(name=name, path=path, steps=steps, half=steps // 2, rows=NEW_RUN_BATCH)
