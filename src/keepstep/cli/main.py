"""The command line: find the verb, import only its module, print a user's mistake as an error and a hint.

Each verb is a module with `add_arguments(parser)` and `run(args) -> exit code`. Where several verbs share a module, the
table names the function that adds the arguments of one (`module:function`). A module without `run` sets `call` in
its parsers. `keepstep --help` imports none of them, which is why their one-line summaries are here.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import os
import platform
import shlex
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from keepstep import __version__
from keepstep.core.errors import EXIT_FAILED, KeepstepError, UsageError
from keepstep.core.interrupts import TerminationRequested, exit_code_of, termination_as_interrupt
from keepstep.core.proc import set_thread_defaults
from keepstep.core.terminal import unbreakable_output
from keepstep.core.verbosity import debug, verbosity

if TYPE_CHECKING:
    from keepstep.cli.parser import StrictParser

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("keepstep.cli.demo", "train a small model from raw text on this machine, offline, in minutes"),
    "new": ("keepstep.cli.config:add_new", "write a run.yaml with comments to start from"),
    "train": ("keepstep.cli.train", "train a model from a run.yaml and dotted overrides"),
    "finetune": ("keepstep.cli.train:add_finetune", "fine-tune a model on conversations, all weights or LoRA adapters"),
    "eval": ("keepstep.cli.model", "measure perplexity on text and the accuracy of tool calls"),
    "chat": ("keepstep.cli.model:add_chat", "chat with a checkpoint, with tools that it may call"),
    "serve": ("keepstep.cli.serve", "serve a checkpoint to OpenAI clients: chat, tools, streaming"),
    "import": ("keepstep.cli.exchange:add_import", "create a run from a Hugging Face model"),
    "export": ("keepstep.cli.exchange:add_export", "write a model that transformers and vLLM load"),
    "bench": ("keepstep.cli.bench", "measure a training step on this machine"),
    "ckpt": ("keepstep.cli.ckpt", "list, verify, repair, rescue, convert and compare checkpoints"),
    "config": ("keepstep.cli.config", "show, check and document configurations"),
    "plan": ("keepstep.cli.plan", "predict memory, speed, storage and goodput of a run on a cluster"),
    "runs": ("keepstep.cli.runs", "list runs with their state, compare two, merge their logs"),
    "watch": ("keepstep.cli.runs:add_watch", "follow one run in the terminal"),
    "ui": ("keepstep.cli.runs:add_ui", "serve the live page: every run of a folder in your browser"),
    "report": ("keepstep.cli.runs:add_report", "write one file about a run, HTML or Markdown, to share"),
    "data": ("keepstep.cli.data.data", "prepare, check and look at training data"),
    "jobs": ("keepstep.cli.jobs:add_jobs", "list the jobs that were submitted with train --on"),
    "logs": ("keepstep.cli.jobs:add_logs", "print or follow the log of a submitted run"),
    "stop": ("keepstep.cli.jobs:add_stop", "ask a submitted run to save and stop"),
    "resume": ("keepstep.cli.jobs:add_resume", "submit a stopped run again; it continues where it stopped"),
    "chaos": ("keepstep.cli.chaos", "inject faults into a run and get a verdict"),
    "doctor": ("keepstep.cli.doctor", "check this machine, or every node of a cluster"),
    "launch": ("keepstep.cli.jobs:add_launch", "run a node of a job (for schedulers); print profiles"),
    "completion": ("keepstep.cli.completion", "print a completion script for bash, zsh or fish, or the man page"),
    "models": ("keepstep.cli.config:add_models", "list model presets with their sizes"),
}

_VERBOSITY = ("-q", "--quiet", "-v", "--verbose")
"""Options of every verb, which may also stand before it."""
_LONG_VERBS = ("train", "finetune", "demo", "launch")
"""Verbs that run for days: they must outlive the terminal that they were started from."""


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


def load_verb(verb: str) -> tuple[ModuleType, StrictParser]:
    """The module of a verb, and the verb's parser."""
    from keepstep.cli.parser import StrictParser, as_sentence

    place, summary = VERBS[verb]
    module_name, _, add = place.partition(":")
    module = importlib.import_module(module_name)
    parser = StrictParser(prog=f"keepstep {verb}", description=as_sentence(summary))
    getattr(module, add or "add_arguments")(parser)
    return module, parser


def _answer(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"keepstep {__version__}")
        return 0
    if words[0] in _VERBOSITY and len(words) > 1:
        words = [words[1], words[0], *words[2:]]
    if words[0] not in VERBS:
        from keepstep.core.messages import suggestion

        hint = suggestion(words[0], list(VERBS), "keepstep --help lists the commands")
        raise UsageError(f"unknown command {words[0]!r}", hint)
    module, parser = load_verb(words[0])
    args = parser.parse_args(list(words[1:]))
    with verbosity(args.verbosity):
        debug(f"keepstep {__version__}, Python {platform.python_version()}: {shlex.join(words)}")
        code: int = module.run(args) if hasattr(module, "run") else args.call(args)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:
        # The last search for garbage takes a second after torch was imported, and all memory is about to go.
        atexit.register(gc.freeze)
        set_thread_defaults()
        _use_utf8()
    _open_closed_streams()
    _replace_unprintable()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The agent of a run wants to see which signal ended a worker: a worker leaves its signals alone.
    one_of_many = "RANK" in os.environ
    interrupted = False
    with unbreakable_output() if words and words[0] in _LONG_VERBS else nullcontext():
        try:
            with nullcontext() if one_of_many else termination_as_interrupt(until_exit=arguments is None):
                code = _run_and_report(words)
        except KeyboardInterrupt as error:
            interrupted = True
            print(f"ended by {error}" if isinstance(error, TerminationRequested) else "interrupted", file=sys.stderr)
            code = exit_code_of(error)
    # Workers, too: torch's threads may abort while Python exits, and a finished run would look failed.
    if arguments is None and (one_of_many or (interrupted and threading.active_count() > 1)):
        _leave(code)
    return code


def _run_and_report(words: Sequence[str]) -> int:
    try:
        try:
            return _answer(words)
        finally:
            # Not at interpreter exit: an error there could not be handled any more.
            sys.stdout.flush()
    except KeepstepError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `keepstep … | head` closed the pipe: nothing is wrong, and Python must not complain at exit.
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        if not _user_can_fix(error):
            raise
        if error.filename is None:
            _drop_output()
        what = error.filename or "the output cannot be written"
        print(f"error: {what}: {error.strerror}\n hint: {_REMEDIES[error.errno or 0]}", file=sys.stderr)
        return EXIT_FAILED


_RIGHTS = "choose a path that you may write to, or change its permissions"
_KIND = "there is a file where a folder is needed, or a folder where a file is needed"
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOTDIR: _KIND,
    errno.EISDIR: _KIND,
    errno.EEXIST: _KIND,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "the disk or its mount fails: check it, or choose another path",
    errno.ENOSPC: "free some space on that disk, then start again",
    errno.EDQUOT: "free some space in your quota, then start again",
}


def _user_can_fix(error: OSError) -> bool:
    """Whether path and reason are enough. A worker prints its traceback: nobody watches it, and it fails once."""
    located = error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return error.errno in _REMEDIES and located and "RANK" not in os.environ


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads: one inside a library may stay there for minutes, or crash at exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _drop_output() -> None:
    """Discard what is still to be written to stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode if the locale has another encoding.

    File names and texts on a cluster are UTF-8, whatever the locale of a login shell is, and libraries that open files
    by name expect it. Python does the same for the C locale, and always from 3.15 on.
    """
    if sys.getfilesystemencoding() == "utf-8" or "utf8" in sys._xoptions or not sys.executable:
        return
    # The variable is for the processes that this one starts.
    environment = {**os.environ, "PYTHONUTF8": "1"}
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environment)


def _open_closed_streams() -> None:
    """Open the standard streams that are closed (`>&-`) on /dev/null.

    Otherwise the next file that is opened gets their number, and what is printed is written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        handle = os.open(os.devnull, os.O_RDWR)
        if handle != number:
            os.dup2(handle, number)
            os.close(handle)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _replace_unprintable() -> None:
    """Print `?` for a character that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
