"""Python values as the overrides of the command line, so that files, shell and library share one reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keepstep.config.dump import written
from keepstep.config.fields import all_fields, all_sections
from keepstep.core.errors import ConfigError, KeepstepError, UsageError


def words_of(overrides: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> list[str]:
    """`section.field=value` for nested mappings, dotted keys and short names; `fields` replace `overrides`."""
    pairs = (pair for given in (overrides or {}, fields) for pair in _flat(given, ""))
    return [f"{path}={written(_plain(value))}" for path, value in pairs]


def _flat(given: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        path = prefix + key if prefix else _full_name(key)
        known = all_fields().get(path)
        if isinstance(value, Mapping) and not (known and known.is_mapping):
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _full_name(key: str) -> str:
    """`lr` is `optimizer.lr`: the only field with this last part. Unknown names are left to the reader's own error."""
    if "." in key or key in all_fields() or key in all_sections():
        return key
    places = [path for path in all_fields() if path.endswith(f".{key}")]
    if len(places) > 1:
        first = places[0].partition(".")[0]
        hint = f'write one of them in full, for example {first}={{"{key}": …}}'
        raise UsageError(f"{key} is a field of several sections: {', '.join(places)}", hint)
    return places[0] if places else key


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own."""
    return value.item() if hasattr(value, "item") else value


@contextmanager
def hints_in_traceback() -> Iterator[None]:
    """Add the hint of an error to its traceback, which is what a script or a notebook shows."""
    try:
        yield
    except KeepstepError as error:
        if not getattr(error, "__notes__", ()):
            several = isinstance(error, ConfigError) and len(error.problems) > 1
            for line in error.lines():
                # Python prints the message itself; of several problems each needs its own hint.
                if several or line.startswith(" hint: "):
                    error.add_note(line)
        raise
