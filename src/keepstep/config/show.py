"""The effective config for people: YAML with the origin of each value beside it."""

from __future__ import annotations

from typing import Any

from keepstep.config.dump import plain_value, yaml_lines
from keepstep.config.fields import all_fields, all_sections, value_at
from keepstep.config.load import LoadedConfig

_WIDEST_ALIGNED = 48


def show_config(loaded: LoadedConfig, changed_only: bool = False) -> str:
    """YAML text, loadable as it is; `changed_only` leaves out what is at its default."""
    kept = {path for path, origin in loaded.origins.items() if not changed_only or origin.kind != "default"}
    sections = {path for path in all_sections() if any(field.startswith(f"{path}.") for field in kept)}
    lines = [(text, path) for text, path in yaml_lines(loaded.config) if path in kept or path in sections]
    width = max((len(text) for text, _ in lines if len(text) <= _WIDEST_ALIGNED), default=0)
    return "\n".join(
        text if path in sections else f"{text:<{width}}  # {_comment(str(loaded.origins[path]))}"
        for text, path in lines
    )


def _comment(text: str) -> str:
    # A reference may be written over several lines, and a comment may not.
    return " ".join(text.split())


def show_as_json(loaded: LoadedConfig, changed_only: bool = False) -> dict[str, Any]:
    """Each dotted field with its value and origin; `changed_only` leaves out what is at its default."""
    return {
        path: {"value": plain_value(value_at(loaded.config, path)), "origin": str(loaded.origins[path])}
        for path in all_fields()
        if not changed_only or loaded.origins[path].kind != "default"
    }
