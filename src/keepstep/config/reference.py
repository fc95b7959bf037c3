"""The reference page: every section and field with type, default and help, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepstep.config.dump import written
from keepstep.config.fields import Field, all_fields, all_sections, type_name
from keepstep.config.help import field_help
from keepstep.config.hints import hint_for
from keepstep.config.schema import SHORT_FORMS
from keepstep.core.errors import UsageError

_INTRODUCTION = """\
# Configuration reference

Made by `keepstep config reference` from the schema; [configuration.md](configuration.md) explains how the pieces fit.
A duration is a number with a unit: `ba` (steps), `ep` (epochs), `tok` (tokens), `sp` (samples), `s`, `min`, `h`, `d`.
"""


def reference_page() -> str:
    """The whole page."""
    top = [field for path, field in all_fields().items() if "." not in path]
    parts = [_INTRODUCTION, f"## The run\n\n{_table(top)}"]
    parts += [_section(path) for path in all_sections()]
    return "\n".join(parts)


def reference_of(names: Sequence[str]) -> str:
    """The entries of the sections and fields named."""
    return "\n".join(_entry(name) for name in names)


def _entry(name: str) -> str:
    if name in all_sections():
        return _section(name)
    if name in all_fields():
        field = all_fields()[name]
        return f"{name}: {type_name(field.type)}, default {_default(field)}\n  {field_help()[name]}\n"
    raise UsageError(f"there is no section or field {name!r}", hint_for(name))


def _section(path: str) -> str:
    text = field_help()[path]
    if path in SHORT_FORMS:
        text += f" `{path}: VALUE` is short for `{path}.{SHORT_FORMS[path]}: VALUE`."
    fields = [field for name, field in all_fields().items() if name.rpartition(".")[0] == path]
    return f"## {path}\n\n{text}\n\n{_table(fields)}"


def _table(fields: Sequence[Field]) -> str:
    return "\n".join(_rows(fields)) + "\n"


def _rows(fields: Sequence[Field]) -> Iterator[str]:
    yield "| Field | Type | Default | Help |"
    yield "|---|---|---|---|"
    for field in fields:
        cells = (f"`{field.path}`", type_name(field.type), f"`{_default(field)}`", field_help()[field.path])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: Field) -> str:
    return written(field.default)
