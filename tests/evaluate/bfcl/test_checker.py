"""Verdicts equal those of the official checker, on every reference answer and on thousands of damaged ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.evaluate.bfcl.benchmark import language_of
from keepstep.evaluate.bfcl.checker import Call, Language, check_calls
from keepstep.evaluate.bfcl.literals import java_value, javascript_value
from tests.evaluate.bfcl.official import AST_CATEGORIES, module, rows
from tests.evaluate.bfcl.references import reference

CRASH = "the official checker raises an exception"


def damaged(calls: list[Call], draw: random.Random) -> list[Call]:
    """The calls with one to three mistakes, some of which do not matter."""
    made = [(name, dict(arguments)) for name, arguments in calls]
    for _ in range(draw.randint(1, 3)):
        kind = draw.randrange(9)
        if kind == 0 and made:
            made.pop(draw.randrange(len(made)))
        elif kind == 1 and made:
            made.append(draw.choice(made))
        elif kind == 2:
            draw.shuffle(made)
        elif made:
            place = draw.randrange(len(made))
            name, arguments = made[place]
            if kind == 3:
                name = draw.choice([name + "x", name.replace(".", "_"), name.upper(), ""])
            elif kind == 4:
                arguments["surplus"] = 1
            elif arguments:
                key = draw.choice(list(arguments))
                if kind == 5:
                    del arguments[key]
                else:
                    arguments[key] = changed(arguments[key], draw)
            made[place] = (name, arguments)
    return made


def changed(value: Any, draw: random.Random) -> Any:
    others: list[Any] = [
        None,
        "",
        0,
        1,
        -1.5,
        True,
        [],
        {},
        "x",
        (),
        [1, "a"],
        [{"a": 1}],
        {"a": [1]},
        str(value),
        [value],
    ]
    if isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        piece = draw.choice([*" .*^_/\t", "-", "'", '"', "z", ",", "]", "}", ")", "\n", "L", "f", "1", "{", "["])
        others += [value[:at] + piece + value[at:], value[:at] + value[at + 1 :], value.upper(), f'"{value}"'] * 4
    if isinstance(value, bool):
        others += [not value, int(value)] * 3
    elif isinstance(value, int | float):
        others += [float(value), value + 1, -value, int(value)] * 3
    if isinstance(value, list) and value:
        others += [value[:-1], value[::-1], [*value, value[0]], tuple(value), [changed(value[0], draw), *value[1:]]] * 3
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        others += [{**value, key: changed(value[key], draw)}, {**value, "more": 1}] * 4
        others += [{name: item for name, item in value.items() if name != key}] * 4
    return draw.choice(others)


def cases() -> Iterator[tuple[str, dict[str, Any], list[Any], list[Call]]]:
    draw = random.Random(11)
    for category in AST_CATEGORIES:
        rounds = 12 if category.startswith("simple_java") else 4
        for question, answer in zip(rows(category), rows(category, "possible_answer"), strict=True):
            for which in range(2):
                calls = reference(question, answer, language_of(category), which)
                yield category, question, answer["ground_truth"], calls
            for _ in range(rounds):
                yield category, question, answer["ground_truth"], damaged(calls, draw)


def compared_verdicts() -> Iterator[tuple[Any, str | None, str | None]]:
    """Cases with our verdict and the official one."""
    official = module("eval_checker.ast_eval.ast_checker")
    languages = module("constants.enums").Language
    for category, question, answers, calls in cases():
        target = language_of(category)
        ours = check_calls(question["function"], calls, answers, category, target)
        given = [{name: arguments} for name, arguments in calls]
        try:
            verdict = official.ast_checker(question["function"], given, answers, languages(target), category, "model")
            theirs = None if verdict["valid"] else verdict["error_type"]
        except (AttributeError, KeyError, TypeError, NotImplementedError):
            theirs = CRASH
        yield (category, question["id"], calls, answers), ours, theirs


@pytest.mark.slow
def test_verdicts_equal_the_official_ones() -> None:
    errors: Counter[str | None] = Counter()
    for case, ours, theirs in compared_verdicts():
        errors[theirs] += 1
        assert ours is not None if theirs == CRASH else ours == theirs, case
    assert errors.total() >= 14_000
    assert errors[None] >= 4_000
    assert errors.total() - errors[None] - errors[CRASH] >= 4_000
    assert errors[CRASH] <= 20
    assert len(errors) >= 16, "every kind of error occurs"


@pytest.mark.parametrize("target", ["java", "javascript"])
def test_literals_are_read_as_by_the_official_checker(target: Language) -> None:
    name = {"java": "java_type_converter", "javascript": "js_type_converter"}[target]
    official = getattr(module(f"eval_checker.ast_eval.type_convertor.{name}"), name)
    ours = java_value if target == "java" else javascript_value
    kinds = {
        "java": ("byte", "integer", "float", "double", "long", "boolean", "char", "String", "any", "HashMap"),
        "javascript": ("String", "integer", "float", "Bigint", "Boolean", "dict", "any"),
    }[target]
    lists = {"java": ("Array", "ArrayList"), "javascript": ("array",)}[target]
    texts = [
        "1",
        "-12L",
        "3.5f",
        "2e3F",
        "1e-2",
        "12n",
        "true",
        "false",
        "'a'",
        '"a"',
        "abc",
        "",
        "'",
        '"',
        "1\n",
        "7L\n",
        "null",
        "new int[]{1, 2,3}",
        'new String[] {"a", "b"}',
        "new ArrayList<>()",
        "new ArrayList<Integer>(Arrays.asList(1, 2))",
        'new ArrayList<String>() {{ add("x"); add("y"); }}',
        "new HashMap<>()",
        "new HashMap<String, Integer>() {{}}",
        'new HashMap<String, Object>() {{ put("k", 1); put("l", "v w"); put("m", 2L); put("n", false); }}',
        "[1, 2]",
        "['a', \"b\", true]",
        "[[1, 2], [3, x]]",
        "new Array(1, 2)",
        "new Array([1], [2, 3])",
        "[]",
        "{}",
        "{ }",
        "{a: 1, 'b': [1, 2], c: {d: true}, e: 'x y', f: 1.5}",
        "[{a: 1}, {b: 2}]",
        " [ 1 ] ",
        "[1, [2, 3]]",
        "{a: b: c}",
    ]
    draw = random.Random(5)
    texts += [changed(text, draw) for text in texts for _ in range(60)]
    checked = 0
    for text in (text for text in texts if isinstance(text, str)):
        for kind in (*kinds, *((outer, inner) for outer in lists for inner in (*kinds, ""))):
            outer, inner = kind if isinstance(kind, tuple) else (kind, "")
            found = ours(text, outer, inner)
            expected = official(text, outer, inner or None)
            assert (found, type(found)) == (expected, type(expected)), (text, kind)
            checked += 1
    assert checked > 20_000
