"""`keepstep finetune`: the short way from a model and conversations to a fine-tuned model. The loop is train's own."""

from __future__ import annotations

import argparse
import shlex

from keepstep.cli import train
from keepstep.config.dump import written
from keepstep.config.load import load_config, split_words
from keepstep.core.errors import UsageError
from keepstep.core.ranks import from_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    train.add_arguments(parser)
    parser.add_argument("--from", dest="start", metavar="DIR", help="a run's folder or a Hugging Face folder")
    parser.add_argument("--data", metavar="PATH", help="conversations: .jsonl, .json, .parquet, or toolcalls")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of all weights")
    parser.add_argument("--epochs", type=float, metavar="N", help="passes over the data")
    parser.add_argument("--name", help="the run's name")


def run(args: argparse.Namespace) -> int:
    """Turn flags into overrides and train."""
    args.words = finetune_words(args)
    _check_given(args)
    code = train.run(args)
    # What was submitted, or is only to be looked at, is no model yet; and many processes would say it many times.
    if code == 0 and args.on == "local" and not from_environment().launched:
        config = train.load_run(*split_words(args.words))
        where = shlex.quote(f"{config.runs_dir}/{config.name}")
        print(f"next: keepstep eval tools {where}   or   keepstep chat {where}")
    return code


def _check_given(args: argparse.Namespace) -> None:
    """Raise where defaults would decide what is learnt by what: neither is what anybody meant to fine-tune."""
    path, words = split_words(args.words)
    given = {name for name, origin in load_config(path, words).origins.items() if origin.kind not in _NOT_GIVEN}
    if not given & {"data.path", "data.blend"}:
        raise UsageError(
            "nothing says which conversations to learn",
            "--data CONVERSATIONS.jsonl, or --data toolcalls to generate some",
        )
    if "finetune.start_from" not in given and not any(name.startswith("model.") for name in given):
        raise UsageError("nothing says which model to start from", "--from a run's folder or a Hugging Face folder")


_NOT_GIVEN = ("default", "preset")


def finetune_words(args: argparse.Namespace) -> list[str]:
    """The words that `keepstep train` would take. Without a recipe, defaults that suit fine-tuning come first."""
    path, given = split_words(args.words)
    words: list[str] = [str(path)] if path else _defaults(args.lora or 0, given)
    flags = {
        "finetune.start_from": args.start,
        "data.path": args.data,
        "lora.rank": args.lora,
        "max_duration": None if args.epochs is None else f"{args.epochs:g}ep",
        "name": args.name,
    }
    # Written as a file would have it: a path may look like a list, a number or a reference.
    words += [f"{field}={written(value)}" for field, value in flags.items() if value is not None]
    return words + given


def _defaults(rank: int, given: list[str]) -> list[str]:
    # Packed into long rows, a thousand conversations are a few steps: twenty of warmup would never reach the rate.
    in_passes = all(word.endswith("ep") for word in given if word.startswith("max_duration="))
    # Adapters start from nothing and bear a rate ten times that of weights that are already good.
    return [
        "name=finetune",
        "max_duration=3ep",
        "global_batch=32",
        "microbatch=4",
        f"optimizer.lr={2e-4 if rank else 2e-5}",
        "optimizer.weight_decay=0.0",
        f"schedule.warmup={'0.1ep' if in_passes else '20ba'}",
        "evaluate.interval=1ep",
        "evaluate.keep_best=true",
        "checkpoint.interval=1ep",
        "checkpoint.keep=1",
        "data.valid_share=0.05",
    ]
