"""The generated conversation sets by name: what `data.path` may say instead of a file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

from keepstep.data.chat import generate
from keepstep.data.chat.domains import rows as domains
from keepstep.data.chat.generate import CATEGORIES, GeneratedRow, Split

SMALL = "toolcalls"
"""Short rows, made to be learnt from random weights."""
DOMAINS = "toolcalls-domains"
"""Many domains and kinds of parameters, for models that know a language already."""

GENERATED: Mapping[str, Callable[[int, int, Split], GeneratedRow]] = {
    SMALL: generate.generate_row,
    DOMAINS: domains.generate_row,
}


def generate_rows(
    name: str, count: int, seed: int, split: Split, categories: Collection[str] = CATEGORIES
) -> Iterator[GeneratedRow]:
    """The first rows of an endless set, of these categories alone."""
    rows = (GENERATED[name](index, seed, split) for index in itertools.count())
    return itertools.islice((row for row in rows if row.category in categories), count)
