"""Simple quality filters: pure functions of one text; the report counts dropped texts by filter."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from keepstep.core.errors import UsageError

_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class FilterOptions:
    """Limits that a document must respect; 0 switches a limit off."""

    min_chars: int = 0
    max_chars: int = 0
    min_words: int = 0
    min_mean_word: float = 0.0
    """Shortest mean word, in characters."""
    max_mean_word: float = 0.0
    """Longest mean word."""
    max_symbol_share: float = 0.0
    """Largest share of characters that are neither letters, digits nor white space."""
    min_alpha_share: float = 0.0
    """Smallest share of letters among all characters."""
    max_repeated_lines: float = 0.0
    """Largest share of lines that repeat an earlier line."""

    @property
    def any(self) -> bool:
        """Whether a limit is set."""
        return any(getattr(self, one.name) for one in fields(self))


def parse_filters(words: list[str]) -> FilterOptions:
    """Read `name=value` pairs."""
    known: dict[str, Any] = {one.name: type(one.default) for one in fields(FilterOptions)}
    values: dict[str, int | float] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known:
            raise UsageError(f"unknown filter {name!r}", f"filters are {', '.join(known)}")
        try:
            values[name] = known[name](value)
        except ValueError as error:
            raise UsageError(f"filter {word!r} needs a number", f"for example {name}=1") from error
    return FilterOptions(**values)  # type: ignore[arg-type]


def failed_filter(text: str, options: FilterOptions) -> str:
    """The first limit that a text violates; empty if it passes."""
    if options.min_chars and len(text) < options.min_chars:
        return "min_chars"
    if options.max_chars and len(text) > options.max_chars:
        return "max_chars"
    if options.min_words or options.min_mean_word or options.max_mean_word:
        words = _WORD.findall(text)
        mean = sum(map(len, words)) / max(1, len(words))
        if len(words) < options.min_words:
            return "min_words"
        if mean < options.min_mean_word:
            return "min_mean_word"
        if options.max_mean_word and mean > options.max_mean_word:
            return "max_mean_word"
    size = max(1, len(text))
    letters = sum(map(str.isalpha, text)) if options.min_alpha_share else 0
    if letters / size < options.min_alpha_share:
        return "min_alpha_share"
    if options.max_symbol_share:
        plain = sum(character.isalnum() or character.isspace() for character in text)
        if 1 - plain / size > options.max_symbol_share:
            return "max_symbol_share"
    if options.max_repeated_lines:
        lines = [line for line in text.splitlines() if line.strip()]
        if lines and 1 - len(set(lines)) / len(lines) > options.max_repeated_lines:
            return "max_repeated_lines"
    return ""


def apply_filters(texts: list[str], options: FilterOptions, dropped: Counter[str]) -> list[str]:
    """The texts that pass; the others are counted by the limit they violate."""
    reasons = [failed_filter(text, options) for text in texts]
    dropped.update(filter(None, reasons))
    return [text for text, reason in zip(texts, reasons, strict=True) if not reason]
