"""The command line: find the verb, import only its module, turn a user's mistake into two clear lines.

Each verb is a module with `add_arguments(parser)` and `run(args) -> exit code`. Nothing else is imported for
`keepstep --help`, which is why the one-line helps stand here and not in the modules.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from typing import NoReturn

from keepstep import __version__
from keepstep.core.endings import AskedToEnd, ending_as_interrupt, exit_code_of
from keepstep.core.errors import EXIT_FAILED, KeepstepError
from keepstep.core.output import unbreakable_output

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("keepstep.cli.demo", "from raw text to a trained model on this machine, offline, in minutes"),
    "new": ("keepstep.cli.new", "write a commented run.yaml to start from"),
    "train": ("keepstep.cli.train", "train a model from a run.yaml and dotted overrides"),
    "finetune": ("keepstep.cli.finetune", "fine-tune a model on conversations, whole or with adapters"),
    "eval": ("keepstep.cli.eval", "perplexity on text, and whether tool calls are right"),
    "chat": ("keepstep.cli.chat", "talk to a checkpoint, with tools it may call"),
    "import": ("keepstep.cli.import_", "make a run from a Hugging Face model"),
    "export": ("keepstep.cli.export", "write a model that transformers and vLLM load"),
    "bench": ("keepstep.cli.bench", "measure a training step on this machine"),
    "ckpt": ("keepstep.cli.ckpt", "list, verify, repair, convert and compare checkpoints"),
    "config": ("keepstep.cli.config", "show, check and document configurations"),
    "plan": ("keepstep.cli.plan", "memory, speed, storage and goodput of a run on a cluster, before renting it"),
    "runs": ("keepstep.cli.runs", "list runs with their state, compare two, merge their logs"),
    "watch": ("keepstep.cli.watch", "follow one run in the terminal"),
    "ui": ("keepstep.cli.ui", "the live page: every run of a folder in your browser"),
    "report": ("keepstep.cli.report", "one file about a run, ready to share: HTML or Markdown"),
    "data": ("keepstep.cli.data", "prepare, check and look at training data"),
    "jobs": ("keepstep.cli.jobs", "list the jobs that were submitted with train --on"),
    "logs": ("keepstep.cli.logs", "print or follow the log of a submitted run"),
    "stop": ("keepstep.cli.stop", "ask a submitted run to save and stop"),
    "resume": ("keepstep.cli.resume", "submit a stopped run again; it goes on where it was"),
    "chaos": ("keepstep.cli.chaos", "rehearse faults on a run and get a verdict"),
    "doctor": ("keepstep.cli.doctor", "check this machine, or every node of a cluster"),
    "launch": ("keepstep.cli.launch", "what schedulers start on a node; profiles and environments"),
    "models": ("keepstep.cli.models", "list model presets with their sizes"),
}

_RUNS = ("train", "finetune", "demo", "launch")
"""Verbs that run for days: their work must outlive the terminal they were started from."""


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [
        "usage: keepstep VERB [options]",
        "",
        "Train large language models and lose no step on the way.",
        "",
        *(f"  {name:<{width}}  {summary}" for name, (_, summary) in VERBS.items()),
        "",
        "keepstep VERB --help explains one verb. New here? keepstep demo",
    ]
    return "\n".join(lines)


def _run_verb(verb: str, arguments: Sequence[str]) -> int:
    module_name, summary = VERBS[verb]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"keepstep {verb}", description=summary[0].upper() + summary[1:] + ".")
    module.add_arguments(parser)
    # argparse cannot mix options and positionals where a verb has actions of its own.
    parse = parser.parse_args if getattr(module, "HAS_ACTIONS", False) else parser.parse_intermixed_args
    code: int = module.run(parse(list(arguments)))
    return code


def _unknown(verb: str) -> KeepstepError:
    import difflib

    from keepstep.core.errors import UsageError

    near = difflib.get_close_matches(verb, VERBS, n=1)
    return UsageError(
        f"unknown verb {verb!r}", f"did you mean {near[0]}?" if near else "keepstep --help lists the verbs"
    )


def _answer(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"keepstep {__version__}")
        return 0
    if words[0] not in VERBS:
        raise _unknown(words[0])
    return _run_verb(words[0], words[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:
        _speak_utf8()
    _open_closed_streams()
    _print_what_can_be_printed()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Of one of a run's processes whoever watches it wants to know which signal it died of.
    one_of_many = "RANK" in os.environ
    interrupted = False
    with unbreakable_output() if words and words[0] in _RUNS else nullcontext():
        try:
            with nullcontext() if one_of_many else ending_as_interrupt(until_exit=arguments is None):
                code = _run_and_report(words)
        except KeyboardInterrupt as error:
            interrupted = True
            print(f"ended by {error}" if isinstance(error, AskedToEnd) else "interrupted", file=sys.stderr)
            code = exit_code_of(error)
    # Of one of many, too: torch's threads may abort as Python ends, and a run that is done would pass for failed.
    if arguments is None and (one_of_many or (interrupted and threading.active_count() > 1)):
        _leave(code)
    return code


def _run_and_report(words: Sequence[str]) -> int:
    try:
        try:
            return _answer(words)
        finally:
            # Here, and not when the interpreter ends: what fails there can only be complained about.
            sys.stdout.flush()
    except KeepstepError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `keepstep … | head` closed the pipe: nothing is wrong, and Python must not complain at exit.
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        if not _is_users_to_mend(error):
            raise
        if error.filename is None:
            _drop_output()
        what = error.filename or "what was to be written"
        print(f"error: {what}: {error.strerror}\n hint: {_MENDED_BY_USERS[error.errno or 0]}", file=sys.stderr)
        return EXIT_FAILED


_RIGHTS = "choose a place that you may write to, or mend its rights"
_KIND = "a file lies where a folder is needed, or a folder where a file is"
_MENDED_BY_USERS = {
    errno.ENOENT: "check the path",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOTDIR: _KIND,
    errno.EISDIR: _KIND,
    errno.EEXIST: _KIND,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOSPC: "make room on that disk, then start again",
    errno.EDQUOT: "make room in your quota, then start again",
}


def _is_users_to_mend(error: OSError) -> bool:
    """Whether path and reason say enough. A training process says all it knows: nobody sits in front of it."""
    known = error.errno in _MENDED_BY_USERS
    told = error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return known and told and "RANK" not in os.environ


def _leave(code: int) -> NoReturn:
    """End without waiting for threads: one inside a library stays there for minutes, or crashes as Python ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _drop_output() -> None:
    """Let what is still to be written to stdout go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _speak_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has another encoding.

    Names and texts are UTF-8 on the disks of a cluster, whatever the locale of a login says, and libraries that open
    files by name take them for that. Python does the same by itself for the plain C locale, and from 3.15 on always.
    """
    if sys.getfilesystemencoding() == "utf-8" or "utf8" in sys._xoptions or not sys.executable:
        return
    # For processes that this one starts, too.
    environment = {**os.environ, "PYTHONUTF8": "1"}
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environment)


def _open_closed_streams() -> None:
    """Give the standard streams that were closed before us (`>&-`) somewhere to go.

    Else the next file that is opened gets their number, and what is printed lands in it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        handle = os.open(os.devnull, os.O_RDWR)
        if handle != number:
            os.dup2(handle, number)
            os.close(handle)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _print_what_can_be_printed() -> None:
    """A terminal that knows less than Unicode, or a path that is none, costs a character and not the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
