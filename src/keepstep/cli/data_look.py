"""Actions of `keepstep data` that look at text and tokens: inspect, train-tokenizer, dedup."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from keepstep.cli.data_common import add_action, size
from keepstep.core.errors import EXIT_DONE, UsageError


def add_actions(actions: Any) -> None:
    """Add the sub-parsers."""
    _add_inspect(actions)
    _add_train_tokenizer(actions)
    _add_dedup(actions)


def _add_inspect(actions: Any) -> None:
    parser = add_action(actions, "inspect", inspect, "counts, lengths, duplicates and decoded samples of a data set")
    parser.add_argument("path", help="a folder, a prefix or raw text files, here or at an address")
    parser.add_argument("--tokenizer", type=Path, help="default: the one beside the data; raw text needs one")
    parser.add_argument("--column", default="tokens", help="MDS: the column with the tokens")
    parser.add_argument("--samples", type=int, default=3, help="documents to show")
    parser.add_argument("--show", type=int, nargs="*", default=None, metavar="N", help="show these documents whole")
    parser.add_argument("--plot", type=Path, help="write the histogram of lengths as a .png or .svg")
    parser.add_argument("--cache", type=Path, default=Path("runs/.data"), help="for copies of remote files")
    parser.add_argument("--json", action="store_true")


def inspect(args: argparse.Namespace) -> int:
    """Print what is in a data set."""
    from keepstep.data.inspect import histogram, open_documents, plot_lengths
    from keepstep.data.inspect import inspect as look

    data, documents = open_documents(args.path, args.cache, args.column, args.tokenizer)
    samples = _samples(args, documents, args.tokenizer or data.tokenizer)
    found = look(data, documents)
    if args.plot:
        plot_lengths(found.lengths, args.plot)
    if args.json:
        facts = {key: value for key, value in vars(found).items() if key != "lengths"}
        print(json.dumps({**facts, "samples": [{"document": number, "text": text} for number, text in samples]}))
        return EXIT_DONE
    print(f"format     {found.kind}")
    print(f"documents  {found.documents:,}")
    print(f"tokens     {found.tokens:,}")
    print(f"lengths    mean {found.mean:.0f}, median {found.median:.0f}, 95% ≤ {found.p95:.0f}, most {found.longest:,}")
    print(f"ids        {found.vocab_used:,} in use, the largest is {found.largest_id}")
    print(f"duplicates {found.duplicates:,} among {found.documents_hashed:,} documents looked at")
    print("\n".join(histogram(found.lengths)))
    for number, text in samples:
        print(f"--- document {number}\n{text}")
    if args.plot:
        print(f"plot       {args.plot}")
    print(f"next: keepstep train run.yaml {shlex.quote(f'data.path={args.path}')}")
    return EXIT_DONE


def _samples(args: argparse.Namespace, documents: Any, tokenizer: Path | None) -> list[tuple[int, str]]:
    """Documents as text: those asked for, whole, or the starts of a few."""
    from keepstep.data.inspect import decoded_samples

    count = len(documents.lengths)
    if args.show is not None:
        outside = [number for number in args.show if not 0 <= number < count]
        if outside:
            raise UsageError(f"--show {outside[0]}: {args.path} has {count:,} documents", "they are numbered from 0")
        if tokenizer is None:
            raise UsageError(f"--show needs a tokenizer, and none lies beside {args.path}", "name one with --tokenizer")
        return list(zip(args.show, decoded_samples(documents, tokenizer, args.show, 1 << 30), strict=True))
    if tokenizer is None:
        return []
    wanted = min(count, args.samples)
    spread = [count * number // wanted for number in range(wanted)]
    starts = decoded_samples(documents, tokenizer, spread, 60)
    return [(number, text.replace("\n", "⏎")[:200]) for number, text in zip(spread, starts, strict=True)]


def _add_train_tokenizer(actions: Any) -> None:
    parser = add_action(actions, "train-tokenizer", train_tokenizer, "train a byte-level BPE on raw text")
    parser.add_argument("inputs", nargs="+", help="as for build")
    parser.add_argument("--out", required=True, type=Path, help="the tokenizer.json to write")
    parser.add_argument("--vocab", type=int, default=32768, help="tokens, special ones included")
    parser.add_argument("--special", nargs="*", action="extend", help="special tokens (default: <|endoftext|>)")
    parser.add_argument("--field", default="text")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--max-bytes", type=size, default=1 << 30, help="stop reading after this much text")


def train_tokenizer(args: argparse.Namespace) -> int:
    """Train and write a tokenizer."""
    from keepstep.data.records import RecordOptions, Rejects, not_nothing, texts_of
    from keepstep.data.tokenize import END_OF_TEXT, train_bpe

    special = [END_OF_TEXT] if args.special is None else args.special
    rejects = Rejects()
    texts = texts_of(args.inputs, RecordOptions(args.field, lines=args.lines), rejects, max_chars=args.max_bytes)
    size = train_bpe(not_nothing(texts, rejects), args.vocab, args.out, special=special)
    print(f"tokens    {size:,}")
    if rejects.total:
        print("rejected  " + ", ".join(f"{count:,} {reason}" for reason, count in rejects.counts.most_common()))
    print(f"next: keepstep data build … --tokenizer {args.out} --eos '{special[0] if special else ''}'")
    return EXIT_DONE


def _add_dedup(actions: Any) -> None:
    parser = add_action(actions, "dedup", dedup, "drop exact and near duplicates from raw text")
    parser.add_argument("inputs", nargs="+", help="as for build")
    parser.add_argument("--out", required=True, type=Path, help="the .jsonl to write; a report lands beside it")
    parser.add_argument("--near", type=float, default=0.8, help="shared shingles of a duplicate; 1 for exact only")
    parser.add_argument("--field", default="text")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--json", action="store_true")


def dedup(args: argparse.Namespace) -> int:
    """Write what stays and say what went."""
    from keepstep.data.dedup import deduplicate
    from keepstep.data.records import RecordOptions

    if not 0 < args.near <= 1:
        raise UsageError(f"--near is {args.near}, but it is a share above 0 and at most 1", "0.8 is usual")
    report = deduplicate(
        args.inputs, args.out, threshold=args.near, options=RecordOptions(args.field, lines=args.lines)
    )
    if args.json:
        print(json.dumps(vars(report)))
        return EXIT_DONE
    print(f"documents {report.documents:,}")
    print(f"exact     {report.exact_duplicates:,} dropped")
    print(f"near      {report.near_duplicates:,} dropped")
    if report.rejected:
        print(f"rejected  {report.rejected:,} bad records")
    print(f"kept      {report.kept:,} in {args.out}")
    print(f"next: keepstep data build {args.out} …")
    return EXIT_DONE
