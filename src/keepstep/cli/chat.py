"""`keepstep chat`: talk to a checkpoint, line by line or from a file, with tools it may call."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from keepstep.cli.arguments import positive, read_text
from keepstep.core.errors import DataError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("model", type=Path, help="a run's folder or a Hugging Face folder")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--tools", type=Path, metavar="FILE", help="tools as a JSON list of OpenAI function schemas")
    parser.add_argument("--file", type=Path, help="answer each line of this file (plain text, or JSON with messages)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="consider the likeliest tokens up to this share")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="longest answer (default: 256)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, where the model's folder has none")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")


def run(args: argparse.Namespace) -> int:
    """Answer the file's lines, or whoever sits at the terminal."""
    from keepstep.train.speaker import Prompt, Sampling, open_speaker

    tools = _read_tools(args.tools)
    first = [{"role": "system", "content": args.system}] if args.system else []
    prompts = _read_prompts(args.file, first, tools) if args.file else []
    sampling = Sampling(args.temperature, args.top_p, args.seed, args.max_new_tokens)
    speaker = open_speaker(args.model, args.device, args.tokenizer)
    if args.file:
        for prompt in prompts:
            print(json.dumps({"answer": "".join(speaker.stream(prompt, sampling))}, ensure_ascii=False), flush=True)
        return 0
    print(f"{speaker.config.name}, step {speaker.step}. An empty line or Ctrl-D ends it.", file=sys.stderr)
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
        for piece in speaker.stream(Prompt(messages, tools), sampling):
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


def _read_tools(path: Path | None) -> list[dict[str, Any]]:
    from keepstep.data.chat_rows import BadRow, parsed_list, tool

    if path is None:
        return []
    try:
        return [tool(item) for item in parsed_list(read_text(path, "--tools"), "the tools")]
    except BadRow as bad:
        raise UsageError(
            f"{path}: {bad}", "a list of {type: function, function: {name, description, parameters}}"
        ) from bad


def _read_prompts(path: Path, first: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Any]:
    """All prompts of the file, before the model is loaded: a broken line is told at once."""
    from keepstep.data.chat_rows import BadRow

    prompts = []
    # Not splitlines: JSON may hold other signs that it takes for the end of a line.
    for number, line in enumerate(read_text(path, "--file").split("\n"), start=1):
        try:
            prompts += [_prompt_of(line, first, tools)] if line.strip() else []
        except (BadRow, ValueError) as bad:
            raise DataError(f"{path} line {number}: {bad}", "plain text, or a JSON object with messages") from None
    return prompts


def _prompt_of(line: str, first: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
    from keepstep.data.chat_rows import BadRow, cleaned, parsed_list, tool
    from keepstep.train.speaker import Prompt, is_whole_text

    if not line.lstrip().startswith("{"):
        return Prompt([*first, {"role": "user", "content": line.rstrip("\r")}], tools)
    row = json.loads(line)
    if not is_whole_text(json.dumps(row, ensure_ascii=False)):
        raise BadRow("it holds half of a character (a lone surrogate)")
    own = [tool(item) for item in parsed_list(row.get("tools"), "tools")]
    return Prompt([*first, *cleaned(row.get("messages"))], own or tools)
