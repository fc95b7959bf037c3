"""Words that error messages share: how a value, a list of choices and a broken rule are written."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.core.units import ByteSize, Duration

NOT_UTF8_HINT = "save it as UTF-8, for example with iconv -f LATIN1 -t UTF-8"
_LONGEST_SHOWN = 80


def invalid_value(name: str, value: Any, rule: str) -> str:
    """The one sentence for a value that breaks a rule: `parallel.tensor is 3, but it must divide model.heads (8)`."""
    return f"{name} is {brief(value)}, but it {rule}"


def listed(choices: Sequence[Any]) -> str:
    """`a, b or c`."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def nearest(word: str, choices: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The choice most like `word`, if any is like it at all."""
    found = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=cutoff)
    return found[0] if found else None


def suggestion(word: str, choices: Sequence[str], otherwise: str) -> str:
    """The hint that names the choice most like `word`; `otherwise` where none is."""
    near = nearest(word, choices)
    return f"did you mean {near}?" if near else otherwise


def shown(value: Any) -> str:
    """A value as a message names it: text in quotes, YAML's names for null and booleans."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case Duration() | ByteSize():
            return str(value)
        case Mapping():
            return "a mapping" if value else "{}"
        case list() | tuple():
            return f"[{', '.join(shown(item) for item in value)}]"
        case _:
            return repr(value)


def brief(value: Any) -> str:
    """`shown`, shortened to fit on one line of a report."""
    text = shown(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
