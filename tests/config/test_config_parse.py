"""Plain scalars mean what people think they mean."""

from __future__ import annotations

import pytest

from keepstep.config.parse import Problems, read_scalar, read_word, read_yaml
from keepstep.config.values import plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("1_000", 1000), ("-3", -3), ("+3", 3), (".5", 0.5), ("1.", 1.0), ("0x10", 16),
        ("0o10", 8), ("010", 10), ("-.inf", float("-inf")), ("true", True), ("False", False),
        ("null", None), ("~", None), ("", None),
    ],
)  # fmt: skip
def test_numbers_booleans_and_null(text: str, value: object) -> None:
    found = read_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["no", "yes", "on", "off", "Y", "1:30", "1e", "e5", "1.2.3", "12ba", "2024-01-01", "_1"]
)
def test_all_else_is_text(text: str) -> None:
    assert read_scalar(text) == text


def test_more_digits_than_python_reads_are_text_not_a_crash() -> None:
    assert read_scalar("9" * 5000) == "9" * 5000


def test_quotes_make_text_and_so_does_the_str_tag() -> None:
    node = read_yaml("a: '1'\nb: \"no\"\nc: !!str 5\nd: 5\non: yes\n", "run.yaml", Problems())
    assert node is not None
    assert plain(node) == {"a": "1", "b": "no", "c": "5", "d": 5, "on": "yes"}


def test_anchors_and_aliases_are_read() -> None:
    node = read_yaml("a: &x {b: 1}\nc: *x\n", "run.yaml", Problems())
    assert node is not None
    assert plain(node) == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize("word", ["seed", "=1", "a..b=1", ".a=1", "x=[1"])
def test_words_that_are_no_overrides_are_problems(word: str) -> None:
    problems = Problems()
    assert read_word(word, problems) is None
    assert len(problems) == 1
