"""`keepstep eval` and `chat`: measure a model (perplexity, tool calls, BFCL, lm-eval tasks), and chat with it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.cli.parser import add_action, add_actions, positive, read_text, writable
from keepstep.core.errors import DataError, UsageError
from keepstep.core.files import write_atomic
from keepstep.core.plugins import load_plugin
from keepstep.core.verbosity import progress

_MODEL = "the folder of a run or of a Hugging Face model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = add_actions(parser)
    ppl = add_action(actions, "ppl", _ppl, "perplexity on held-out text")
    _add_common(ppl)
    ppl.add_argument("--data", default="", help="text or tokens, or c4:SPLIT (default: the run's validation data)")
    ppl.add_argument("--windows", type=positive, default=256, help="windows of text (default: 256)")
    ppl.add_argument("--length", type=int, default=0, help="tokens in a window (default: the model's seq_len)")
    ppl.add_argument("--field", default="text", help="the JSON field or column that holds the text (default: text)")
    tools = add_action(actions, "tools", _tools, "accuracy of tool calls by category, with BFCL's error names")
    _add_common(tools, or_url=True)
    tools.add_argument("--data", default="", help="conversations (default: generated ones)")
    tools.add_argument("--rows", type=positive, default=400, help="questions to ask (default: 400)")
    tools.add_argument("--max-new-tokens", type=positive, default=256, help="longest answer (default: 256)")
    tools.add_argument("--answers", type=writable, metavar="FILE", help="write every answer as a JSON line")
    wrong = "write the conversations that were answered wrongly, to train on"
    tools.add_argument("--wrong", type=writable, metavar="FILE", help=wrong)
    several = "answers to each question, drawn at temperature 1 (default: the likeliest one)"
    tools.add_argument("--attempts", type=positive, default=1, metavar="N", help=several)
    mixed = "write the conversations that only some of the --attempts answered rightly, for reinforcement learning"
    tools.add_argument("--mixed", type=writable, metavar="FILE", help=mixed)
    _add_dtype(tools)
    tools.add_argument("--reward", metavar="NAME", help="also score answers with this plug-in (keepstep.rewards)")
    bfcl = add_action(actions, "bfcl", _bfcl, "the Berkeley Function Calling Leaderboard (questions: pip's bfcl-eval)")
    _add_common(bfcl, or_url=True)
    bfcl.add_argument("--data", type=Path, help="the folder bfcl_eval (default: the installed package)")
    bfcl.add_argument("--categories", default="all", metavar="A,B", help="categories, live, non_live, … (default: all)")
    bfcl.add_argument("--limit", type=positive, default=0, help="questions of each category (default: all)")
    how = "BFCL's system prompt or the chat template's own tools (default: by the template)"
    bfcl.add_argument("--mode", choices=("auto", "prompt", "native"), default="auto", help=how)
    bfcl.add_argument("--max-new-tokens", type=positive, default=512, help="longest answer (default: 512)")
    to = "append answers here and continue from it (default: MODEL/bfcl/…)"
    _add_dtype(bfcl)
    bfcl.add_argument("--answers", type=writable, metavar="FILE", help=to)
    lm = add_action(actions, "lm", _lm, "tasks of lm-evaluation-harness (pip install 'keepstep[lm-eval]')")
    _add_common(lm)
    lm.add_argument("--tasks", default="", metavar="A,B", help="names of the tasks")
    lm.add_argument("--limit", type=int, default=0, help="questions of each task (default: all)")


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    how = "of weights and answers; bf16 is several times as fast on a GPU (default: fp32)"
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help=how)


def _folder_or_url(text: str) -> Path | str:
    return text if text.startswith(("http://", "https://")) else Path(text)


def _open_model(args: argparse.Namespace) -> Any:
    """The model of a folder, or the one behind a URL."""
    start, dtype = getattr(args, "start", False), getattr(args, "dtype", "fp32")
    if isinstance(args.model, Path):
        import torch

        from keepstep.evaluate.chat_model import open_chat_model

        chosen = torch.bfloat16 if dtype == "bf16" else torch.float32
        return open_chat_model(args.model, args.device, args.tokenizer, start=start, dtype=chosen)
    if start or args.tokenizer or args.device != "auto" or dtype != "fp32":
        given = "--start, --tokenizer, --device and --dtype are for folders"
        raise UsageError(f"{given}, and {args.model} is a server", "give them to keepstep serve")
    from keepstep.evaluate.remote_model import RemoteModel

    return RemoteModel(args.model)


def _add_common(parser: argparse.ArgumentParser, *, or_url: bool = False) -> None:
    if or_url:
        parser.add_argument("model", type=_folder_or_url, help=f"{_MODEL}, or the URL of keepstep serve")
    else:
        parser.add_argument("model", type=Path, help=_MODEL)
    parser.add_argument("--batch", type=positive, default=32, help="rows per batch (default: 32)")
    parser.add_argument("--start", action="store_true", help="the weights that the run started from, not the newest")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, if the model's folder has none")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--out", type=writable, metavar="FILE", help="also write the report as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep chat`."""
    add = parser.add_argument
    add("model", type=_folder_or_url, help=f"{_MODEL}, or the URL of keepstep serve")
    add("--system", default="", help="a system message")
    add("--tools", type=Path, metavar="FILE", help="tools as a JSON list of OpenAI function schemas")
    add("--file", type=Path, help="answer each line of this file (plain text, or JSON with messages)")
    add("--temperature", type=float, default=0.0, help="0 always takes the most likely token (default: 0)")
    top_p = "sample from the most likely tokens with this total probability (default: 1)"
    add("--top-p", type=float, default=1.0, help=top_p)
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add("--max-new-tokens", type=positive, default=256, help="longest answer in tokens (default: 256)")
    add("--tokenizer", type=Path, help="a tokenizer.json, if the model's folder has none")
    add("--device", default="auto", help="cpu, cuda or auto")
    parser.set_defaults(call=_chat)


def _tools(args: argparse.Namespace) -> int:
    from keepstep.data.chat.generated import SMALL
    from keepstep.evaluate.ast_check import table
    from keepstep.evaluate.chat_model import Sampling
    from keepstep.evaluate.tool_calls import answered_partly, ask, load_questions, write_lines

    if args.mixed and args.attempts < 2:
        raise UsageError("--mixed compares several answers to a question", "add --attempts 4")
    reward = load_plugin("rewards", args.reward, {}, "--reward") if args.reward else None
    model = _open_model(args)
    questions = [question for question in load_questions(args.data or SMALL, args.rows) for _ in range(args.attempts)]
    sampling = Sampling(temperature=1.0 if args.attempts > 1 else 0.0, max_new_tokens=args.max_new_tokens)
    count = len(questions)
    answered = ask(model, questions, sampling, args.batch, lambda done: progress(f"answered {done} of {count}"), reward)
    if args.answers:
        write_lines(answered.lines, args.answers)
    right = [line["error"] is None for line in answered.lines]
    if args.wrong:
        wrong = {id(question): question for question, is_right in zip(questions, right, strict=True) if not is_right}
        write_lines((question.conversation.row() for question in wrong.values()), args.wrong)
    if args.mixed:
        partly = answered_partly(questions, right, args.attempts)
        write_lines((question.conversation.row() for question in partly), args.mixed)
    facts = {"model": str(args.model), "step": getattr(model, "step", None), **answered.report.as_json()}
    text = table(answered.report)
    if answered.mean_reward is not None:
        facts["reward"] = answered.mean_reward
        text += f"\nmean reward {answered.mean_reward:.4f}"
    return _report(args, facts, f"{text}\nnext: keepstep chat {args.model}")


def _bfcl(args: argparse.Namespace) -> int:
    from keepstep.evaluate.bfcl.benchmark import chosen_categories, open_benchmark
    from keepstep.evaluate.bfcl.run import BenchmarkRun, choose_mode
    from keepstep.evaluate.bfcl.scores import as_json, score, table

    benchmark = open_benchmark(args.data)
    questions = benchmark.questions(chosen_categories(args.categories), args.limit)
    model = _open_model(args)
    mode = choose_mode(model) if args.mode == "auto" else args.mode
    step = getattr(model, "step", None)
    answers = args.answers or _answers_file(args, model, mode)
    progress(f"{len(questions):,} questions, mode {mode}, answers in {answers}")
    run = BenchmarkRun(model, benchmark, mode, args.batch, args.max_new_tokens, progress)
    scores = score(run.ask(questions, answers))
    facts = {"model": str(args.model), "step": step, "mode": mode, "answers": str(answers), **as_json(scores)}
    if not args.answers:
        # The run's page and report show it.
        write_atomic(answers.with_suffix(".json"), json.dumps(facts, indent=2) + "\n")
    return _report(args, facts, f"{table(scores)}\nnext: keepstep data check DATA --against bfcl")


def _answers_file(args: argparse.Namespace, model: Any, mode: str) -> Path:
    """Where answers go by default: into the model's folder, or one for the server's model."""
    if isinstance(args.model, Path):
        return args.model / "bfcl" / f"{'start' if args.start else f'step-{model.step}'}-{mode}.jsonl"
    name = re.sub(r"[^\w.-]", "_", model.name)
    return Path("runs", "bfcl", f"{name}-{mode}.jsonl")


def _ppl(args: argparse.Namespace) -> int:
    from keepstep.evaluate.text_perplexity import text_perplexity

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
    text = f"perplexity {result.perplexity:.3f}   loss {result.loss:.4f}   {result.tokens:,} tokens"
    return _report(args, {"model": str(args.model), **facts}, f"{text}\nnext: keepstep chat {args.model}")


def _lm(args: argparse.Namespace) -> int:
    from keepstep.evaluate.chat_model import open_chat_model
    from keepstep.evaluate.lm_eval_tasks import run_tasks

    model = open_chat_model(args.model, args.device, args.tokenizer, start=args.start)
    results = run_tasks(model, [name for name in args.tasks.split(",") if name], args.batch, args.limit)
    lines = (
        f"{task:<24}" + "   ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        for task, numbers in results.items()
    )
    return _report(args, results, "\n".join(lines))


def _report(args: argparse.Namespace, facts: Mapping[str, Any], text: str) -> int:
    """Print text or JSON, and write the JSON to `--out`."""
    report = json.dumps(facts, indent=2)
    if args.out:
        write_atomic(args.out, report + "\n")
    print(report if args.json else text)
    return 0


def _chat(args: argparse.Namespace) -> int:
    """Answer the lines of the file, or the user at the terminal."""
    from keepstep.evaluate.chat_model import Prompt, Sampling

    tools = _read_tools(args.tools)
    first = [{"role": "system", "content": args.system}] if args.system else []
    prompts = _read_prompts(args.file, first, tools) if args.file else []
    sampling = Sampling(args.temperature, args.top_p, args.seed, args.max_new_tokens)
    model = _open_model(args)
    if args.file:
        for prompt in prompts:
            print(json.dumps({"answer": "".join(model.stream(prompt, sampling))}, ensure_ascii=False), flush=True)
        return 0
    shown = f"{model.config.name}, step {model.step}" if isinstance(args.model, Path) else model.name
    progress(f"{shown}. An empty line or Ctrl-D ends the chat.")
    messages = list(first)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not line.strip():
            return 0
        messages.append({"role": "user", "content": line})
        answer = ""
        for piece in model.stream(Prompt(messages, tools), sampling):
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


def _read_tools(path: Path | None) -> list[dict[str, Any]]:
    from keepstep.data.chat.rows import BadRow, parsed_list, tool

    if path is None:
        return []
    try:
        return [tool(item) for item in parsed_list(read_text(path, "--tools"), "the tools")]
    except BadRow as bad:
        raise UsageError(
            f"{path}: {bad}", "expected a list of {type: function, function: {name, description, parameters}}"
        ) from bad


def _read_prompts(path: Path, first: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Any]:
    """All prompts of the file. Read before the model is loaded, so that a bad line is reported immediately."""
    from keepstep.data.chat.rows import BadRow

    prompts = []
    # Not splitlines: it also splits at characters such as U+2028, which JSON strings may contain.
    for number, line in enumerate(read_text(path, "--file").split("\n"), start=1):
        try:
            prompts += [_prompt_of(line, first, tools)] if line.strip() else []
        except (BadRow, ValueError) as bad:
            raise DataError(
                f"{path} line {number}: {bad}", "expected plain text, or a JSON object with messages"
            ) from None
    return prompts


def _prompt_of(line: str, first: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
    from keepstep.data.chat.rows import BadRow, cleaned, parsed_list, tool
    from keepstep.evaluate.chat_model import Prompt, is_valid_text

    if not line.lstrip().startswith("{"):
        return Prompt([*first, {"role": "user", "content": line.rstrip("\r")}], tools)
    row = json.loads(line)
    if not is_valid_text(json.dumps(row, ensure_ascii=False)):
        raise BadRow("it contains half a character (a lone surrogate)")
    own = [tool(item) for item in parsed_list(row.get("tools"), "tools")]
    return Prompt([*first, *cleaned(row.get("messages"))], own or tools)
