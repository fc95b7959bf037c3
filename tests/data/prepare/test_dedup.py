"""Duplicates: the same ones however many documents there are, in the memory that docs/data.md promises."""

from __future__ import annotations

import random
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from keepstep.data.prepare.dedup import BANDS, HASHES, Deduplicator, signature

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def documents(count: int, seed: int = 3) -> list[str]:
    """Random documents; every third is one before it with a few words changed."""
    chance = random.Random(seed)
    made: list[list[str]] = []
    for number in range(count):
        words = [f"w{chance.randrange(10_000)}" for _ in range(24)]
        if number % 3 == 2:
            words = list(made[chance.randrange(number)])
            for _ in range(chance.randrange(1, 4)):
                words[chance.randrange(24)] = f"v{chance.randrange(10_000)}"
        made.append(words)
    return [" ".join(words) for words in made]


@pytest.mark.slow
def test_a_document_is_a_duplicate_of_any_before_it_that_shares_a_band_and_enough() -> None:
    texts, threshold = documents(1800), 0.6
    seen, kept, count = Deduplicator(threshold), np.zeros((len(texts), HASHES), np.uint64), 0
    for text in texts:
        mine = signature(text)
        equal = kept[:count] == mine
        banded = equal.reshape(count, BANDS, HASHES // BANDS).all(axis=2).any(axis=1)
        expected = bool((banded & (equal.mean(axis=1) >= threshold)).any())
        assert seen.classify(text) == ("near" if expected else "")
        kept[count] = mine
        count += not expected
    # Enough for the arrays to have grown, and enough that went.
    assert 1200 < count < 1700


@pytest.mark.slow
def test_memory_is_what_the_page_says() -> None:
    told = re.search(r"about ([0-9.]+) KB a\s+document", PAGE.read_text())
    assert told is not None
    count = 2500
    texts = [" ".join(f"{n}x{word}" for word in range(12)) for n in range(count)]
    tracemalloc.start()
    try:
        seen = Deduplicator(0.9)
        assert not any(map(seen.classify, texts))
        assert tracemalloc.get_traced_memory()[0] / count < 1024 * float(told[1])
    finally:
        tracemalloc.stop()


def test_texts_without_a_word_are_not_all_the_same() -> None:
    seen = Deduplicator(0.8)
    assert [seen.classify(text) for text in ("→ ∀ ∈ ∅", "⠓⠑⠇⠇⠕", "+--+\n|  |\n+--+", "⠓⠑⠇⠇⠕ ")] == [
        "",
        "",
        "",
        "exact",
    ]
