"""The fixtures of the data tests."""

from tests.data.conftest import corpus, texts, tokenizer

__all__ = ["corpus", "texts", "tokenizer"]
