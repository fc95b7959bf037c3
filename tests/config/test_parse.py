"""Plain scalars mean what people think they mean."""

from __future__ import annotations

import pytest
import yaml

from keepstep.config.parse import Problems, load_yaml, read_scalar, read_word, read_yaml
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


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
        "a: " + "[" * 5000 + "]" * 5000,
    ],
    ids=["aliases", "merge keys", "nesting"],
)
@pytest.mark.slow
def test_load_yaml_refuses_exploding_files_quickly(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="too large or too deeply nested"):
        load_yaml(text)


def test_load_yaml_reads_what_pyyaml_reads() -> None:
    assert load_yaml("a: &a {x: 1}\nb: {<<: *a, y: no}\nc: *a\n") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": False},
        "c": {"x": 1},
    }
    assert load_yaml("") is None


def test_read_yaml_reports_a_bounded_number_of_problems() -> None:
    """Comparing each with all others took minutes for a file of 100,000."""
    problems = Problems()
    read_yaml("".join(f"k{number}: !x 1\n" for number in range(3000)), "run.yaml", problems)
    assert len(problems) == 1000
