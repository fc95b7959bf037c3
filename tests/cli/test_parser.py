"""Strict options, actions with options of their own, and hints that name the nearest option."""

from __future__ import annotations

import argparse
import re

import pytest

from keepstep.cli.main import VERBS, load_verb, main
from keepstep.cli.parser import StrictParser, add_action, add_actions
from keepstep.core.errors import UsageError


def tool(default: str | None = None) -> StrictParser:
    parser = StrictParser(prog="tool")
    actions = add_actions(parser, default)
    ls = add_action(actions, "ls", lambda _: 0, "list things")
    ls.add_argument("places", nargs="*")
    ls.add_argument("--json", action="store_true")
    ls.add_argument("--under")
    convert = add_action(actions, "convert", lambda _: 1, "convert things")
    convert.add_argument("place")
    convert.add_argument("--shards", type=int, required=True)
    return parser


def refused(words: str, default: str | None = None) -> tuple[str, str | None]:
    with pytest.raises(UsageError) as error:
        tool(default).parse_args(words.split())
    assert error.value.exit_code == 2
    return error.value.message, error.value.hint


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("ls a --shards 3", "tool ls: unknown option --shards", "--shards is an option of tool convert"),
        ("ls --jsno", "tool ls: unknown option --jsno", "did you mean --json?"),
        ("ls --js", "tool ls: unknown option --js", "did you mean --json?"),
        ("convert a --shrads=3", "tool convert: unknown option --shrads", "did you mean --shards?"),
        ("convert a b --shards 3", "tool convert: unexpected word 'b'", "tool convert --help"),
        ("covnert a", "tool: unknown action 'covnert'", "did you mean convert?"),
        ("", "tool needs an action", "one of ls, convert"),
        ("--json", "tool needs an action", "one of ls, convert"),
    ],
)
def test_parser_names_the_mistake_and_the_remedy(words: str, message: str, hint: str) -> None:
    assert refused(words) == (message, hint)


def test_parser_reports_a_missing_option() -> None:
    message, _ = refused("convert a")
    assert message == "tool convert: the following arguments are required: --shards"


@pytest.mark.parametrize(
    "words",
    ["ls a b --json --under ls", "--json --under ls ls a b", "ls a --json b --under ls", "--under ls ls a --json b"],
)
def test_parser_takes_options_and_words_in_any_order(words: str) -> None:
    args = tool().parse_args(words.split())
    assert (args.action, args.places, args.json, args.under) == ("ls", ["a", "b"], True, "ls")
    assert args.call(args) == 0


def test_parser_keeps_words_after_two_dashes() -> None:
    assert tool().parse_args(["ls", "--json", "--", "a", "--shards"]).places == ["a", "--shards"]


def test_parser_takes_negative_numbers_as_values_and_words() -> None:
    parser = StrictParser(prog="tool")
    parser.add_argument("sizes", nargs="*")
    parser.add_argument("--shift", type=float)
    parser.add_argument("-N", type=int)
    parser.add_argument("--names", nargs="*")
    args = parser.parse_args(["-2", "--shift", "-0.5", "- a sentence", "-N4", "--names", "a", "b"])
    assert (args.sizes, args.shift, args.N, args.names) == (["-2", "- a sentence"], -0.5, 4, ["a", "b"])


def test_parser_falls_back_to_the_default_action() -> None:
    assert tool("ls").parse_args(["--json", "convert-me"]).places == ["convert-me"]
    assert tool("ls").parse_args([]).action == "ls"
    assert tool("ls").parse_args(["convert", "a", "--shards", "2"]).action == "convert"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_an_option_it_does_not_have(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [verb, *_first_action(verb), "--no-such-option"]
    assert main(words) == 2
    assert "unknown option --no-such-option" in capsys.readouterr().err


def _first_action(verb: str) -> list[str]:
    _, parser = load_verb(verb)
    if parser.actions:
        return [next(iter(parser.actions))]
    choices = [action.choices for action in parser._actions if not action.option_strings and action.choices]
    return [next(iter(choices[0]))] if choices else []


def test_help_lists_every_action() -> None:
    text = tool().format_help()
    assert re.search(r"ls +list things", text)
    assert re.search(r"convert +convert things", text)
    assert isinstance(tool(), argparse.ArgumentParser)
