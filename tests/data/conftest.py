"""A small tokenizer and a small corpus for the data tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from keepstep.data import tokenization
from keepstep.data.corpus import read_texts, standard_library_files


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenization.train_bpe(read_texts(standard_library_files()[:25]), 500, path)
    return path


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Short documents of code, with some that are not ASCII."""
    generator = random.Random(3)
    whole = "\n".join(read_texts(standard_library_files()[:40]))
    found = []
    for number in range(400):
        start = generator.randrange(len(whole) - 3000)
        found.append(whole[start : start + generator.randrange(20, 2500)] + ("é→🙂" if number % 7 == 0 else ""))
    return found


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
