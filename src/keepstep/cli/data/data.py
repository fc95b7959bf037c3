"""`keepstep data`: its actions; those that look at data sets, join them, or work on raw text are below."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from keepstep.cli.data import build, chat
from keepstep.cli.parser import Actions, add_action, add_actions, size
from keepstep.core.errors import EXIT_DATA, EXIT_DONE, DataError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-parser for each action."""
    actions = add_actions(parser)
    build.add_build(actions)
    verify = add_action(actions, "verify", _verify, "compare every file of a build with its checksum")
    verify.add_argument("folder", type=Path)
    help_text = "remove the markers of damaged tasks, so that the build redoes them"
    verify.add_argument("--mend", action="store_true", help=help_text)
    verify.add_argument("--json", action="store_true")
    merge = add_action(actions, "merge", _merge, "join the .bin/.idx pairs of a folder into one pair")
    merge.add_argument("folder", type=Path)
    merge.add_argument("--out", required=True, type=Path, help="prefix to write, for example data/set_text_document")
    summary = "counts, lengths, duplicates and decoded samples of a data set"
    add = add_action(actions, "inspect", _inspect, summary).add_argument
    add("path", help="a folder, a prefix or raw text files, local or remote")
    add("--tokenizer", type=Path, help="default: the one next to the data; raw text needs one")
    add("--column", default="tokens", help="MDS: the column with the tokens")
    add("--samples", type=int, default=3, help="documents to show")
    add("--show", type=int, nargs="*", default=None, metavar="N", help="show these documents completely")
    add("--plot", type=Path, help="write the histogram of lengths as .png or .svg")
    add("--cache", type=Path, default=Path("runs/.data"), help="for copies of remote files")
    add("--json", action="store_true")
    _add_raw_text(actions)
    build.add_pipeline(actions)
    chat.add_actions(actions)


def _add_raw_text(actions: Actions) -> None:
    add = add_action(actions, "train-tokenizer", _train_tokenizer, "train a byte-level BPE on raw text").add_argument
    add("inputs", nargs="+", help="as for build")
    add("--out", required=True, type=Path, help="the tokenizer.json to write")
    add("--vocab", type=int, default=32768, help="number of tokens, including special ones")
    add("--special", nargs="*", action="extend", help="special tokens (default: <|endoftext|>)")
    add("--field", default="text")
    add("--lines", action="store_true")
    add("--max-bytes", type=size, default=1 << 30, help="stop reading after this much text")
    add = add_action(actions, "dedup", _dedup, "drop exact and near duplicates from raw text").add_argument
    add("inputs", nargs="+", help="as for build")
    add("--out", required=True, type=Path, help="the .jsonl to write; a report is written next to it")
    add("--near", type=float, default=0.8, help="common shingles of a duplicate; 1 for exact only")
    add("--field", default="text")
    add("--lines", action="store_true")
    add("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Call the action's function; an error of a path or a disk becomes one with a hint."""
    try:
        code: int = args.call(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise DataError(
            f"{where}{error.strerror or error}",
            "check the path, its permissions and the space on its disk, then start the same command again",
        ) from error
    return code


def _verify(args: argparse.Namespace) -> int:
    """Print each damaged file and the task that writes it again."""
    from keepstep.data.prepare.build import verify

    checked, damages = verify(args.folder, repair=args.mend)
    if args.json:
        print(json.dumps({"files": checked, "damages": [vars(damage) for damage in damages]}))
        return EXIT_DATA if damages else EXIT_DONE
    for damage in damages:
        who = "the build" if damage.task is None else f"task {damage.task}"
        print(f"damaged  {who}  {damage.file} {damage.what}")
    if not damages:
        print(f"ok       {checked} files match their checksums")
        print(f"next: keepstep data inspect {args.folder}")
        return EXIT_DONE
    tasks = sorted({damage.task for damage in damages if damage.task is not None})
    listed = ", ".join(map(str, tasks[:20])) + (" …" if len(tasks) > 20 else "")
    redone = f"redoes task {listed}" if tasks else "writes what is missing"
    first = "" if args.mend else f"keepstep data verify {args.folder} --mend   then "
    print(f"next: {first}the same keepstep data build command again: it {redone}")
    return EXIT_DATA


def _merge(args: argparse.Namespace) -> int:
    """Write one pair and print its size."""
    from keepstep.data.formats.megatron import merge_folder

    documents, tokens = merge_folder(args.folder, args.out)
    print(f"documents {documents:,}")
    print(f"tokens    {tokens:,}")
    print(f"next: keepstep data inspect {args.out}")
    return EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    """Print the statistics and samples of a data set."""
    from keepstep.data.inspect import histogram, inspect, open_documents, plot_lengths

    data, documents = open_documents(args.path, args.cache, args.column, args.tokenizer)
    samples = _samples(args, documents, args.tokenizer or data.tokenizer)
    found = inspect(data, documents)
    if args.plot:
        plot_lengths(documents.lengths, args.plot)
    if args.json:
        print(json.dumps({**found, "samples": [{"document": number, "text": text} for number, text in samples]}))
        return EXIT_DONE
    print(
        "format     {kind}\n"
        "documents  {documents:,}\n"
        "tokens     {tokens:,}\n"
        "lengths    mean {mean:.0f}, median {median:.0f}, 95% ≤ {p95:.0f}, most {longest:,}\n"
        "ids        {vocab_used:,} in use, the largest is {largest_id}\n"
        "duplicates {duplicates:,} among {documents_hashed:,} documents".format(**found)
    )
    print("\n".join(histogram(documents.lengths)))
    for number, text in samples:
        print(f"--- document {number}\n{text}")
    if args.plot:
        print(f"plot       {args.plot}")
    print(f"next: keepstep train run.yaml {shlex.quote(f'data.path={args.path}')}")
    return EXIT_DONE


def _samples(args: argparse.Namespace, documents: Any, tokenizer: Path | None) -> list[tuple[int, str]]:
    """Documents as text: the requested ones completely, or the starts of a few."""
    from keepstep.data.inspect import decoded_samples

    count = len(documents.lengths)
    if args.show is not None:
        outside = [number for number in args.show if not 0 <= number < count]
        if outside:
            raise UsageError(f"--show {outside[0]}: {args.path} has {count:,} documents", "they are numbered from 0")
        if tokenizer is None:
            missing = f"--show needs a tokenizer, and there is none next to {args.path}"
            raise UsageError(missing, "name one with --tokenizer")
        return list(zip(args.show, decoded_samples(documents, tokenizer, args.show, 1 << 30), strict=True))
    if tokenizer is None:
        return []
    wanted = min(count, args.samples)
    spread = [count * number // wanted for number in range(wanted)]
    starts = decoded_samples(documents, tokenizer, spread, 60)
    return [(number, text.replace("\n", "⏎")[:200]) for number, text in zip(spread, starts, strict=True)]


def _train_tokenizer(args: argparse.Namespace) -> int:
    """Train and write a tokenizer."""
    from keepstep.data.prepare.records import RecordOptions, Rejects, require_texts, texts_of
    from keepstep.data.tokenization import END_OF_TEXT, train_bpe

    special = [END_OF_TEXT] if args.special is None else args.special
    rejects = Rejects()
    texts = texts_of(args.inputs, RecordOptions(args.field, lines=args.lines), rejects, max_chars=args.max_bytes)
    count = train_bpe(require_texts(texts, rejects), args.vocab, args.out, special=special)
    print(f"tokens    {count:,}")
    if rejects.total:
        print("rejected  " + ", ".join(f"{count:,} {reason}" for reason, count in rejects.counts.most_common()))
    print(f"next: keepstep data build … --tokenizer {args.out} --eos '{special[0] if special else ''}'")
    return EXIT_DONE


def _dedup(args: argparse.Namespace) -> int:
    """Write the documents that are kept and print the counts."""
    from keepstep.data.prepare.dedup import deduplicate
    from keepstep.data.prepare.records import RecordOptions

    if not 0 < args.near <= 1:
        raise UsageError(f"--near is {args.near}, but it is a share above 0 and at most 1", "0.8 is usual")
    options = RecordOptions(args.field, lines=args.lines)
    report = deduplicate(args.inputs, args.out, threshold=args.near, options=options)
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
