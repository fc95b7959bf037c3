"""`keepstep eval`: perplexity on any text, and how right a model's tool calls are."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.cli.arguments import check_place, positive
from keepstep.core.errors import UsageError
from keepstep.core.files import write_atomic

_ACTIONS = {
    "ppl": "perplexity on held-out text",
    "tools": "are its tool calls right? by category, with BFCL's error names",
    "lm": "tasks of lm-evaluation-harness (pip install 'keepstep[lm-eval]')",
}

_OWN: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "data": (("tools", "ppl"), ""),
    "tasks": (("lm",), ""),
    "limit": (("lm",), 0),
    "rows": (("tools",), 400),
    "windows": (("ppl",), 256),
    "length": (("ppl",), 0),
    "field": (("ppl",), "text"),
    "max_new_tokens": (("tools",), 256),
    "answers": (("tools",), None),
}
"""Options that not every action takes: which do, and what holds where none is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    listed = "; ".join(f"{name}: {text}" for name, text in _ACTIONS.items())
    parser.add_argument("action", choices=tuple(_ACTIONS), help=listed)
    parser.add_argument("model", type=Path, help="a run's folder or a Hugging Face folder")
    parser.add_argument("--data", help="tools: conversations (default: generated ones); ppl: text or tokens")
    parser.add_argument("--tasks", help="lm: tasks by name, with commas between them")
    parser.add_argument("--limit", type=int, help="lm: questions of each task (default: all)")
    parser.add_argument("--rows", type=positive, help="tools: questions to ask (default: 400)")
    parser.add_argument("--windows", type=positive, help="ppl: windows of text (default: 256)")
    parser.add_argument("--length", type=int, help="ppl: tokens in a window (default: the model's seq_len)")
    parser.add_argument("--field", help="ppl: the JSON field or column that holds the text (default: text)")
    parser.add_argument("--batch", type=positive, default=32, help="rows at a time (default: 32)")
    parser.add_argument("--max-new-tokens", type=positive, help="tools: longest answer (default: 256)")
    parser.add_argument("--start", action="store_true", help="the weights the run started from, not those it trained")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="tools: write every answer as a JSON line")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON, beside what is printed")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, where the model's folder has none")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    _take_own(args)
    for path in (args.answers, args.out):
        check_place(path)
    match args.action:
        case "tools":
            return _tools(args)
        case "lm":
            return _lm(args)
        case _:
            return _ppl(args)


def _take_own(args: argparse.Namespace) -> None:
    """Fill in what was not given; raise for what was and would be ignored."""
    for name, (actions, default) in _OWN.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.action not in actions:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} means nothing to eval {args.action}", f"it is for eval {' and '.join(actions)}")


def _tools(args: argparse.Namespace) -> int:
    from keepstep.data.chat_loader import GENERATED
    from keepstep.evaluate.toolcalls import table
    from keepstep.train.speaker import Sampling, open_speaker
    from keepstep.train.tooltest import ask, load_questions, write_answers

    speaker = open_speaker(args.model, args.device, args.tokenizer, start=args.start)
    questions = load_questions(args.data or GENERATED, args.rows)

    def progress(done: int) -> None:
        print(f"answered {done} of {len(questions)}", file=sys.stderr)

    answered = ask(speaker, questions, Sampling(max_new_tokens=args.max_new_tokens), args.batch, progress)
    if args.answers:
        write_answers(answered.lines, args.answers)
    facts = {"model": str(args.model), "step": speaker.step, **answered.report.as_json()}
    _report(args, facts, f"{table(answered.report)}\nnext: keepstep chat {args.model}")
    return 0


def _ppl(args: argparse.Namespace) -> int:
    from keepstep.train.texttest import text_perplexity

    result = text_perplexity(
        args.model,
        args.data,
        windows=args.windows,
        length=args.length,
        batch=args.batch,
        tokenizer=args.tokenizer,
        device=args.device,
        start=args.start,
        field=args.field,
    )
    facts = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
    told = f"perplexity {result.perplexity:.3f}   loss {result.loss:.4f}   {result.tokens:,} tokens"
    _report(args, {"model": str(args.model), **facts}, f"{told}\nnext: keepstep chat {args.model}")
    return 0


def _lm(args: argparse.Namespace) -> int:
    from keepstep.train.harness import run_tasks
    from keepstep.train.speaker import open_speaker

    speaker = open_speaker(args.model, args.device, args.tokenizer, start=args.start)
    results = run_tasks(speaker, [name for name in args.tasks.split(",") if name], args.batch, args.limit)
    lines = (
        f"{task:<24}" + "   ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        for task, numbers in results.items()
    )
    _report(args, results, "\n".join(lines))
    return 0


def _report(args: argparse.Namespace, facts: Mapping[str, Any], told: str) -> None:
    """Print for people or as JSON, and keep the JSON where `--out` says."""
    report = json.dumps(facts, indent=2)
    if args.out:
        write_atomic(args.out, report + "\n")
    print(report if args.json else told)
