"""The generated conversation sets by name: what `data.path` may say instead of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from keepstep.data.chat import generate
from keepstep.data.chat.domains import rows as domains
from keepstep.data.chat.generate import GeneratedRow, Split

SMALL = "toolcalls"
"""Short rows, made to be learnt from random weights."""
DOMAINS = "toolcalls-domains"
"""Many domains and kinds of parameters, for models that know a language already."""

GENERATED: Mapping[str, Callable[[int, int, Split], GeneratedRow]] = {
    SMALL: generate.generate_row,
    DOMAINS: domains.generate_row,
}


def generate_rows(name: str, count: int, seed: int, split: Split) -> Iterator[GeneratedRow]:
    """The first rows of an endless set."""
    return (GENERATED[name](index, seed, split) for index in range(count))
