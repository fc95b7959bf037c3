"""Answers are decoded as the official handlers decode them."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

from keepstep.evaluate.ast_check import MalformedCall
from keepstep.evaluate.bfcl.benchmark import language_of
from keepstep.evaluate.bfcl.checker import Language
from keepstep.evaluate.bfcl.decode import Mode, decode_calls, expressions
from tests.evaluate.bfcl.official import AST_CATEGORIES, module, rows
from tests.evaluate.bfcl.references import reference, written

ODD = [
    "f()",
    "f(a=1)",
    "[f(a=1), g(b='x')]",
    "```\n[f(a=1)]\n```",
    "'[f(a=1)]'",
    "I cannot do that.",
    "",
    "[]",
    "[f]",
    "[f(1, a=2)]",
    "[a.b.c(x=-1, y=+2, z=~3, w=not True)]",
    "[f(a=1 + 2 * 3)]",
    "[f(a=2 ** 3, b=-(1))]",
    "[f(a=x, b=g(1), c=g(y=1))]",
    "[f(a=(1, 2), b={'k': [1]}, c=..., d=None)]",
    "[f(a=x[0], b=x['y'], c=x[1:2])]",
    "[f(a=lambda x: x)]",
    "[f(a={1, 2})]",
    "[f(a=x.y)]",
    "[f(a=f'{x}')]",
    "[f(**k)]",
    "[f(a='\\d')]",
    "f(a=1) and g()",
    "[f(a=1)](b=2)",
    "f()(a=1)",
    "f().g(a=1)",
    "[f(a=[x, 1, 'y', True])]",
    "[[f(a=1)]]",
    "f(a=1), g(b=2)",
    "[f(a=1]",
    "[f(a=1))",
    "[f(a='x)]",
    "[f(a=1.5e3, b=0x1f)]",
    "[f(a=b'x')]",
    "[f(a=1 if x else 2)]",
    "[f(a=[*x])]",
    "[f(a={**x})]",
    "[f(a={[1]: 2})]",
    "[f(a=-'x')]",
    "<tool_call>",
]


def official() -> Any:
    for needed in ("tenacity", "tree_sitter", "tree_sitter_java", "tree_sitter_javascript"):
        pytest.importorskip(needed)
    return module("model_handler.utils")


def decoded(text: str, target: Language) -> Any:
    try:
        return [{name: arguments} for name, arguments in decode_calls(text, "prompt", target)]
    except MalformedCall:
        return None


def officially(utils: Any, text: str, target: Language) -> Any:
    return_format = module("constants.enums").ReturnFormat(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = utils.default_decode_ast_prompting(text, return_format, False)
            return found if isinstance(found, list) else None
        except Exception:
            return None


@pytest.mark.parametrize("category", AST_CATEGORIES)
def test_reference_answers_are_decoded_as_officially(category: str) -> None:
    utils, target = official(), language_of(category)
    for question, answer in zip(rows(category), rows(category, "possible_answer"), strict=True):
        text = written(reference(question, answer, target, 0), target)
        # Java's official decoder cuts text by bytes, so it is wrong after a letter outside ASCII.
        if target != "java" or text.isascii():
            assert decoded(text, target) == officially(utils, text, target), text


def test_odd_python_is_decoded_as_officially() -> None:
    utils, draw = official(), random.Random(3)
    texts = [*ODD]
    for text in ODD:
        for _ in range(150):
            at = draw.randrange(len(text) + 1)
            texts.append(
                text[:at] + draw.choice(["(", ")", "[", "]", "'", "=", ",", " ", "-", "1", "x", ""]) + text[at + 1 :]
            )
    found = [(text, decoded(text, "python"), officially(utils, text, "python")) for text in texts]
    # Expressions with names and calls in them are evaluated officially, and refused here.
    assert [
        item for item in found if repr(item[1]) != repr(item[2]) and "+" not in item[0] and "*" not in item[0]
    ] == []
    for text, ours, theirs in found:
        if theirs is not None and ours is not None:
            assert repr(ours) == repr(theirs), text
            given = [(name, arguments) for call in ours for name, arguments in call.items()]
            try:
                expected = utils.decoded_output_to_execution_list(theirs)
            except Exception:
                continue
            assert expressions(given) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[a.f(x="b c", y=new int[]{1, 2}, z=Foo.BAR, w=-3)]',
            {"x": "b c", "y": "new int[]{1,2}", "z": "Foo.BAR", "w": "-3"},
        ),
        (
            '[f(m=new HashMap<String, Object>() {{ put("k", 1); }}, t=a + b)]',
            {"m": "new HashMap<String,Object>()", "t": "a+b"},
        ),
        ("[f(a=1), g(b=2)]", None),
        ('[f(a="x" b=1)]', None),
        ("[f(a=[1, 2])]", None),
        ("[f(a=1]", None),
    ],
)
def test_java_calls_are_read_as_text(text: str, expected: Any) -> None:
    calls = decoded(text, "java")
    assert (next(iter(calls[0].values())) if calls else None) == expected


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "native", [("f", {"a": 1})]),
        ("f(a=1)", "prompt", [("f", {"a": 1})]),
        ("f(a=1)", "native", []),
    ],
)
def test_each_mode_has_its_format(text: str, mode: Mode, expected: Any) -> None:
    assert decode_calls(text, mode) == expected


def test_nothing_in_an_answer_is_executed() -> None:
    for text in ("[f(a=__import__('os').getpid() + 1)]", "[f(a=9 ** 9 ** 9 ** 9)]", "[f(a='x' * 10 ** 12)]"):
        with pytest.raises(MalformedCall):
            decode_calls(text, "prompt")
