"""The one way in which a verb reads its words: strict options, actions with options of their own, checked values.

A verb calls `parser.add_argument` as usual. A verb with actions calls `add_actions` once and `add_action` for each:

    actions = add_actions(parser)
    ls = add_action(actions, "ls", _ls, "committed steps, newest first")
    ls.add_argument("--json", action="store_true")

and needs no `run`. `args.action` holds the action's name.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from keepstep.core.errors import UsageError
from keepstep.core.messages import NOT_UTF8_HINT, suggestion
from keepstep.core.units import ByteSize

Actions = Any
"""What `add_actions` returns. argparse does not export the type."""

Call = Callable[[argparse.Namespace], int]

CONFIG_HELP = "config file and overrides"
"""Help of the words that `load_config(*split_words(words))` reads."""

_OPTION = re.compile(r"-(?![0-9.])[^\s=]+")
"""An option, and not a negative number or a sentence that begins with a dash."""


_VERBOSITIES = (
    ("-q", "quiet", "print results, warnings and errors only"),
    ("-v", "verbose", "also print debug lines, and where an error was raised"),
)


class StrictParser(argparse.ArgumentParser):
    """A parser without abbreviations, in which options and words may be mixed. A mistake raises `UsageError`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        # Also for a process that this command starts: see core/verbosity.py.
        amount = self.add_mutually_exclusive_group()
        for letter, word, what in _VERBOSITIES:
            amount.add_argument(letter, f"--{word}", dest="verbosity", action="store_const", const=word, help=what)
        self.actions: dict[str, StrictParser] = {}
        """The verb's actions, if this parser is the verb's."""
        self.default_action: str | None = None
        self.siblings: dict[str, StrictParser] = {}
        """The verb's actions, if this parser is that of one action."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of `args`: a word that is left over is an error here, where the nearest option is known."""
        words = self._action_first(args) if self.actions else self._options_first(args)
        namespace, left_over = super().parse_known_args(words, namespace)
        for word in left_over:
            if word != "--":
                self.error(f"unexpected word {word!r}")
        return namespace, []

    def error(self, message: str) -> NoReturn:
        """Report a mistake as every other mistake of a user is reported."""
        raise UsageError(f"{self.prog}: {message}", f"{self.prog} --help")

    def options(self) -> dict[str, argparse.Action]:
        """The options, by each of their names."""
        return self._option_string_actions

    def _action_first(self, words: Sequence[str]) -> list[str]:
        """Move the action to the front: argparse gives only what follows it to the action's parser."""
        option = ""
        for place, word in enumerate(words):
            if word in ("-h", "--help"):
                return [word]
            if word.startswith("-"):
                option = word
            elif any(option in each.options() and each.options()[option].nargs != 0 for each in self.actions.values()):
                option = ""
            elif word in self.actions:
                return [word, *words[:place], *words[place + 1 :]]
            elif self.default_action is None:
                hint = suggestion(word, list(self.actions), f"one of {', '.join(self.actions)}")
                raise UsageError(f"{self.prog}: unknown action {word!r}", hint)
            else:
                break
        if self.default_action is None:
            raise UsageError(f"{self.prog} needs an action", f"one of {', '.join(self.actions)}")
        return [self.default_action, *words]

    def _options_first(self, words: Sequence[str]) -> list[str]:
        """Move the words behind the options and a `--`: argparse does not take words on both sides of an option."""
        options: list[str] = []
        positionals: list[str] = []
        place = 0
        while place < len(words):
            word = words[place]
            place += 1
            if word == "--":
                positionals += words[place:]
                break
            match = _OPTION.match(word)
            if not match:
                positionals.append(word)
                continue
            options.append(word)
            values = self._value_count(match[0], word)
            while values and place < len(words) and not _OPTION.match(words[place]):
                options.append(words[place])
                place, values = place + 1, values - 1
        return [*options, "--", *positionals] if positionals else options

    def _value_count(self, option: str, word: str) -> int:
        """How many of the words after `word` may be values of `option`."""
        known = self.options()
        if option not in known:
            if option[:2] in known:
                return 0  # a short option with its value attached: -N4
            self._refuse(option)
        values = known[option].nargs
        if values is None or values == "?":
            return 0 if "=" in word else 1
        return values if isinstance(values, int) else sys.maxsize

    def _refuse(self, option: str) -> NoReturn:
        owners = [name for name, parser in self.siblings.items() if option in parser.options()]
        hint = suggestion(option, list(self.options()), f"{self.prog} --help lists the options")
        if owners:
            hint = f"{option} is an option of {self.prog.rpartition(' ')[0]} {', '.join(owners)}"
        raise UsageError(f"{self.prog}: unknown option {option}", hint)


def add_actions(parser: argparse.ArgumentParser, default: str | None = None) -> Actions:
    """Let a verb have actions; `default` is the one that is meant where the first word names none."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=StrictParser)
    if isinstance(parser, StrictParser):
        parser.actions = actions.choices
        parser.default_action = default
    return actions


def add_action(actions: Actions, name: str, call: Call, summary: str) -> argparse.ArgumentParser:
    """One action: `call(args)` does it, `summary` is its line in the verb's help."""
    parser: StrictParser = actions.add_parser(name, help=summary, description=as_sentence(summary))
    parser.siblings = actions.choices
    parser.set_defaults(call=call)
    return parser


def as_sentence(summary: str) -> str:
    """A summary as a help text: with a capital and a full stop."""
    return f"{summary[0].upper()}{summary[1:]}."


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def size(text: str) -> int:
    """Bytes from `64MiB`, for argparse."""
    try:
        return ByteSize.parse(text).bytes
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_name(text: str) -> str:
    """The name of a run, for argparse: it becomes a folder."""
    from keepstep.config.dump import written
    from keepstep.config.load import load_config

    load_config(None, [f"name={written(text)}"])
    return text


def new_folder(runs_dir: Path, name: str) -> Path:
    """The folder of a run that is made now: a name that a run has already is refused."""
    folder = runs_dir / name
    if folder.exists():
        raise UsageError(f"{folder} already exists", "choose another --name")
    return folder


def read_text(path: Path, flag: str) -> str:
    """The text of the file that was given with `flag`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}", "check the path") from None
    except UnicodeDecodeError as error:
        message = f"{flag} {path} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise UsageError(message, NOT_UTF8_HINT) from None


def writable(text: str) -> Path:
    """A file that can be written, for argparse: checked before hours of work that end in it."""
    path = Path(text)
    hint = "choose a file in a folder that you may write to"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint) from None
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder", hint)
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: you may not write to {path.parent}", hint)
    return path
