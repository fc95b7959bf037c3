"""`keepstep completion`: a script for bash, zsh or fish with every verb, option, preset and config key in it.

The man page is made from the same parsers.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import get_args

from keepstep import __version__
from keepstep.cli.main import VERBS, load_verb
from keepstep.cli.parser import CONFIG_HELP, StrictParser, as_sentence
from keepstep.config.fields import all_fields, without_none
from keepstep.config.presets import ALIASES, PRESETS
from keepstep.config.schema import SHORT_FORMS
from keepstep.core.errors import UsageError
from keepstep.core.messages import suggestion
from keepstep.plan.cluster import read_profiles

SHELLS = ("bash", "zsh", "fish", "man")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("shell", help="bash, zsh or fish; man prints the man page")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    if args.shell not in SHELLS:
        hint = suggestion(args.shell, SHELLS, "keepstep completion bash, zsh, fish or man")
        raise UsageError(f"there is no completion for {args.shell!r}", hint)
    made = {"fish": _fish, "man": man_page}.get(args.shell, lambda: _sh(args.shell))
    print(made(), end="")
    return 0


def _sh(shell: str) -> str:
    folder = resources.files("keepstep.cli")
    common = (folder / "completion.sh").read_text(encoding="utf-8")
    values = {option: _print(words) for option, words in _option_values().items()}
    filled = {
        "VERBS": shlex.join(VERBS),
        "VALUES": "\n    ".join(f"{option}) {line}; return ;;" for option, line in values.items()),
        "CASES": "\n    ".join(line for verb in VERBS for line in _cases(verb)),
    }
    for name, text in filled.items():
        common = common.replace(f"@{name}@", text)
    return common + (folder / f"completion_{shell}.sh").read_text(encoding="utf-8")


def _cases(verb: str) -> Iterator[str]:
    """The branches of one verb: after a dash its options, after `key=` values, else actions, keys and runs."""
    yield f"{verb}:-*) {_print(_options(verb))} ;;"
    if _takes_config(verb):
        yield f"{verb}:*=*) {_print(_assignments())} ;;"
    first, others = _actions(verb), _keys() if _takes_config(verb) else []
    # Only the folders know the runs: they are listed at each Tab.
    runs = {"name": "command ls runs 2>/dev/null", "path": "command ls -d runs/*/ 2>/dev/null"}.get(
        _run_kind(verb), ":"
    )
    action = f"[ $# -gt 2 ] || {_print(first)}; " if first else ""
    yield f"{verb}:*) {action}{_print(others) if others else ':'}; {runs} ;;"


def _print(words: Iterable[str]) -> str:
    return f"printf '%s\\n' {shlex.join(words)}"


def _parsers(verb: str) -> list[StrictParser]:
    _, parser = load_verb(verb)
    return [parser, *parser.actions.values()]


def _options(verb: str) -> list[str]:
    shown = {name: None for each in _parsers(verb) for name, option in each.options().items() if _is_shown(option)}
    return list(shown)


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS


def _actions(verb: str) -> list[str]:
    return list(load_verb(verb)[1].actions)


def _positionals(verb: str) -> list[argparse.Action]:
    return [each for parser in _parsers(verb) for each in parser._actions if not each.option_strings]


def _takes_config(verb: str) -> bool:
    return any(str(each.help).startswith(CONFIG_HELP) for each in _positionals(verb))


def _run_kind(verb: str) -> str:
    """Whether the verb takes a run by its name or by its folder; empty where it takes none."""
    texts = [str(each.help) for each in _positionals(verb)]
    if any(text in ("the run", "the name or folder of a run") for text in texts):
        return "name"
    return "path" if any("folder of a run" in text for text in texts) else ""


def _keys() -> list[str]:
    return [f"{name}=" for name in (*SHORT_FORMS, *all_fields())]


def _assignments() -> list[str]:
    """`key=value` for every key whose values are known."""
    presets = [f"{key}={name}" for key in ("model", "model.preset") for name in (*PRESETS, *ALIASES)]
    kinds = {name: without_none(field.type) for name, field in all_fields().items()}
    kinds |= {short: kinds[f"{short}.{field}"] for short, field in SHORT_FORMS.items()}
    chosen = {name: ("true", "false") if kind is bool else get_args(kind) for name, kind in kinds.items()}
    return presets + [
        f"{name}={value}" for name, values in chosen.items() for value in values if isinstance(value, str)
    ]


def _option_values() -> dict[str, list[str]]:
    """Values by `verb:option`: some verbs have a flag of the same name."""
    profiles = read_profiles()
    clusters = ["list", *(f"{name}:" for name in (*profiles.clusters, *profiles.gpus))]
    targets = {f"{verb}:--on": ["local", "slurm:", "k8s:"] for verb in ("train", "finetune", "doctor")}
    return {"plan:--cluster": clusters, **targets}


def _fish() -> str:
    lines = ["# Completion of keepstep for fish: keepstep completion fish | source"]
    for verb, (_, summary) in VERBS.items():
        lines.append(f"complete -c keepstep -n __fish_use_subcommand -a {verb} -d {shlex.quote(summary)}")
        seen = f"complete -c keepstep -n '__fish_seen_subcommand_from {verb}'"
        for option in _options(verb):
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = shlex.quote(" ".join(_option_values().get(f"{verb}:{option}", [])))
            lines.append(f"{seen} {flag}" + (f" -x -a {values}" if values != "''" else ""))
        words = [*_actions(verb), *([*_keys(), *_assignments()] if _takes_config(verb) else [])]
        runs = {"name": "(command ls runs 2>/dev/null)", "path": "(command ls -d runs/*/ 2>/dev/null)"}
        words += [runs[kind]] if (kind := _run_kind(verb)) else []
        if words:
            lines.append(f"{seen} -a {shlex.quote(' '.join(words))}")
    return "\n".join(lines) + "\n"


_OF_EVERY_VERB = ("help", "verbosity")


def man_page() -> str:
    """keepstep.1: every verb with its actions and options."""
    lines = [f'.TH KEEPSTEP 1 "" "keepstep {__version__}"', ".SH NAME"]
    lines += ["keepstep \\- train large language models and lose no step on the way", ".SH SYNOPSIS"]
    lines += [".B keepstep", "VERB [options] [run.yaml] [section.field=value ...]", ".SH OPTIONS OF EVERY VERB"]
    lines += [line for each in StrictParser()._actions if each.dest == "verbosity" for line in _man_entry(each)]
    lines.append(".SH VERBS")
    for verb, (_, summary) in VERBS.items():
        lines += [f".SS {verb}", _roff(as_sentence(summary))]
        for parser in _parsers(verb):
            shown = {id(each): each for each in parser._actions if _is_shown(each) and each.dest not in _OF_EVERY_VERB}
            if parser.prog != f"keepstep {verb}":
                lines += [".P", f".B {_roff(parser.prog)}", ".br", _roff(parser.description or "")]
            for each in shown.values():
                if not isinstance(each, argparse._SubParsersAction):
                    lines += _man_entry(each)
    codes = (
        "0 done, 1 failed, 2 usage or configuration, 3 preflight, 4 data, 5 hardware or network, 75 saved and stopped"
    )
    return "\n".join([*lines, ".SH EXIT STATUS", codes + "."]) + "\n"


def _man_entry(each: argparse.Action) -> list[str]:
    name = ", ".join(each.option_strings) or str(each.metavar or each.dest)
    return [".TP", f".B {_roff(name)}", _roff(str(each.help or "").replace("%%", "%"))]


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped
