"""Conversation files: read rows of any known format, keep the valid ones, and write the others with a reason."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from keepstep.core.errors import DataError, malformed_as
from keepstep.core.files import temporary_name
from keepstep.core.messages import suggestion
from keepstep.data.chat.generate import CATEGORIES, Split
from keepstep.data.chat.generated import GENERATED, generate_rows
from keepstep.data.chat.published_sets import RowFormat, convert, detect
from keepstep.data.chat.rows import BadRow, Conversation

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".parquet")
MAX_LINE_BYTES = 2**24
"""Longer lines are rejected: a megabyte of gzip can hold a line of a gigabyte."""
ParsedT = TypeVar("ParsedT")
FormatName = Literal["auto", "messages", "glaive", "xlam", "hermes", "toolace", "sharegpt", "alpaca"]
_SHOWN = 3
_REMEDIES = (
    ("do not fit a row", "raise model.seq_len, or split these conversations"),
    ("carries a loss", "rows need a turn of the assistant that chat.loss_on selects"),
    ("single tool-calls", "write one call per turn, or name a template with parallel calls: chat.template=FILE"),
    (
        "must alternate",
        "merge neighbouring turns of one role; tools need chat.template=FILE that knows them",
    ),
    ("leaves out", "name a template that renders tool calls: chat.template=FILE"),
    (
        "differently when",
        "leave out the system message, end rows after one answer, or set another chat.template=FILE",
    ),
    ("chat template", "change the rows, or name another template: chat.template=FILE"),
)


@dataclass(frozen=True)
class RejectedRow:
    """A rejected row: its place, the reason, and the row itself."""

    file: str
    row: int
    reason: str
    source: Any

    def line(self) -> str:
        """A line of the rejects file."""
        return json.dumps(vars(self), ensure_ascii=False, default=str) + "\n"


@dataclass(frozen=True)
class NumberedRow:
    """A valid conversation and its place, so that it can still be rejected later with its place."""

    file: str
    row: int
    conversation: Conversation

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """What is rendered: this one."""
        return (self.conversation,)

    def reject(self, reason: str) -> RejectedRow:
        """This row, rejected after all."""
        return RejectedRow(self.file, self.row, reason, self.conversation.row())


def generated_rows(
    name: str, count: int, seed: int, split: Split, categories: Collection[str] = CATEGORIES
) -> Iterator[NumberedRow]:
    """Rows of a generated data set, numbered from 1."""
    for number, row in enumerate(generate_rows(name, count, seed, split, categories), start=1):
        yield NumberedRow(name, number, row.conversation)


def conversation_files(path: Path) -> list[Path]:
    """The conversation files of a path: one file, or all in a folder, by name."""
    if path.is_dir():
        return sorted(item for item in path.iterdir() if item.name.endswith(SUFFIXES) and item.is_file())
    return [path] if path.name.endswith(SUFFIXES) and path.is_file() else []


def holds_conversations(path: Path, text_field: str = "") -> bool:
    """Whether the first row has a known conversation format and not a plain text in `text_field`."""
    row = next((row for file in conversation_files(path) for row in _raw_rows(file)), None)
    try:
        return isinstance(row, dict) and text_field not in row and bool(detect(row))
    except BadRow:
        return False


def read_conversations(path: Path, form: FormatName = "auto") -> Iterator[NumberedRow | RejectedRow]:
    """Every row of the files, numbered from 1 in each file: a conversation, or rejected with a reason."""
    wanted: RowFormat | None = None if form == "auto" else form
    for file, number, row in rows_of_files(path):
        found = read_row(file, number, row, lambda row: convert(row, wanted), Conversation.row)
        yield found if isinstance(found, RejectedRow) else NumberedRow(file, number, found)


def rows_of_files(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Every row of the files as it is written, with its file and its number."""
    files = conversation_files(path)
    if not files:
        wrong = f"{path} holds no conversations" if path.exists() else f"there is no file or folder {path}"
        # A word without an ending may be meant as the name of a generated set.
        sets = [] if path.exists() or path.suffix else list(GENERATED)
        raise DataError(wrong, suggestion(str(path), sets, f"give a file or folder of {', '.join(SUFFIXES)}"))
    for file in files:
        yield from ((file.name, number, row) for number, row in enumerate(_raw_rows(file), start=1))


def read_row(
    file: str, number: int, row: Any, parse: Callable[[Any], ParsedT], as_json: Callable[[ParsedT], Any]
) -> ParsedT | RejectedRow:
    """A parsed row, or rejected with the reason."""
    if isinstance(row, _Unreadable):
        return RejectedRow(file, number, row.reason, row.text)
    try:
        parsed = parse(row)
        # NaN and infinity are not JSON: a model would learn calls that no program can parse.
        json.dumps(as_json(parsed), ensure_ascii=False, allow_nan=False).encode()
    except BadRow as bad:
        return RejectedRow(file, number, str(bad), row)
    except UnicodeEncodeError:
        # JSON escapes can write half of an emoji, which neither a tokenizer nor a UTF-8 file accepts.
        return RejectedRow(file, number, "it holds half of a character (a lone surrogate)", row)
    except RecursionError:
        # Too deep to be written with the rejected rows, too.
        return RejectedRow(file, number, "it is nested too deeply", None)
    except (TypeError, ValueError) as error:
        return RejectedRow(file, number, f"it cannot be written as JSON: {error}", row)
    return parsed


@dataclass(frozen=True)
class _Unreadable:
    text: str
    reason: str


def _raw_rows(file: Path) -> Iterator[Any]:
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file)
        return
    try:
        yield from _json_rows(file) if file.name.endswith(".json") else _line_rows(file)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}", "the file is damaged: copy it again") from error


def _json_rows(file: Path) -> Iterator[Any]:
    with malformed_as(DataError, f"{file} is not JSON", "a .json file holds one list of rows"):
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    yield from rows if isinstance(rows, list) else [rows]


def _line_rows(file: Path) -> Iterator[Any]:
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, raw in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b"")):
            line = raw if number else raw.removeprefix(BOM_UTF8)
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                while (rest := lines.readline(2**16)) and not rest.endswith(b"\n"):
                    pass
                yield _Unreadable(line[:200].decode(errors="replace"), f"the line has over {MAX_LINE_BYTES:,} bytes")
                continue
            if not line.strip():
                continue
            try:
                yield json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                text = line.decode(errors="replace").rstrip("\r\n")
                yield _Unreadable(text, f"the line is not JSON: {error}")


def _parquet_rows(file: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{file} needs pyarrow to be read", "pip install pyarrow, or give .jsonl") from None
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=512):
            for row in batch.to_pylist():
                yield {name: _drop_nulls(value) for name, value in row.items()}
    except (OSError, ValueError, MemoryError) as error:  # what pyarrow raises for damaged files and false sizes in them
        raise DataError(f"{file} cannot be read: {error}", "the file is damaged: copy it again") from error


def _drop_nulls(value: Any) -> Any:
    """A table gives each row the fields of all other rows, as nulls. Without this, a call would have the arguments of
    every call, and a tool the parameters of every tool."""
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def is_validation_row(conversation: Conversation, share: float, seed: int) -> bool:
    """Whether a row belongs to validation. It depends on the row alone, so a row that occurs twice is in one split."""
    text = json.dumps(conversation.row(), sort_keys=True, ensure_ascii=False)
    drawn = hashlib.sha256(f"{seed} {text}".encode(errors="surrogatepass")).digest()[:8]
    return int.from_bytes(drawn, "little") < share * 2**64


@contextmanager
def atomic_text_file(path: Path, wanted: Callable[[], bool] = lambda: True) -> Iterator[TextIO]:
    """A text file that replaces `path` when it is complete; invalid UTF-8 is written as a JSON escape.

    If it is not `wanted` in the end, the existing file is kept.
    """
    part = temporary_name(path, "part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if wanted():
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_canonical(
    rows: Iterable[NumberedRow | RejectedRow], out: Path, valid_out: Path | None, share: float, seed: int
) -> tuple[dict[str, int], Path | None]:
    """Write canonical .jsonl, the held-out share to `valid_out`, and the rejected rows to `OUT.rejects.jsonl`.

    The files appear after the last row is written, `out` last. If no row is valid, existing files are kept. Returns how
    many rows were kept, held out and rejected, and the file of the rejected ones if there are any.
    """
    counts = {"kept": 0, "held_out": 0, "rejected": 0}
    rejects = out.with_name(out.name.removesuffix(".jsonl") + ".rejects.jsonl")

    def holds_rows() -> bool:
        return counts["kept"] + counts["held_out"] > 0

    for place in (out, valid_out or out):
        place.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        train = files.enter_context(atomic_text_file(out, holds_rows))
        rejected = files.enter_context(atomic_text_file(rejects))
        valid = files.enter_context(atomic_text_file(valid_out, holds_rows)) if valid_out else None
        for item in rows:
            if isinstance(item, RejectedRow):
                rejected.write(item.line())
                counts["rejected"] += 1
                continue
            line = json.dumps(item.conversation.row(), ensure_ascii=False) + "\n"
            if valid is not None and is_validation_row(item.conversation, share, seed):
                valid.write(line)
                counts["held_out"] += 1
            else:
                train.write(line)
                counts["kept"] += 1
    if not counts["rejected"]:
        rejects.unlink()
        return counts, None
    return counts, rejects


def frequent_reasons(rejects: Path) -> Iterator[str]:
    """Lines for the terminal about a file of rejected rows: count, reason, and what to do about it."""
    counts, examples = Counter[str](), dict[str, str]()
    with rejects.open(encoding="utf-8") as file:
        for line in file:
            reason = str(json.loads(line)["reason"])
            # Rows that are too long by different numbers of tokens have one reason.
            alike = re.sub(r"\d+", "N", reason)
            counts[alike] += 1
            examples.setdefault(alike, reason)
    for alike, count in counts.most_common(_SHOWN):
        yield f"{count:,} × {examples[alike][:200]}"
        remedy = next((remedy for part, remedy in _REMEDIES if part in alike), "")
        if remedy:
            yield f"  hint: {remedy}"
    if len(counts) > _SHOWN:
        yield f"{len(counts) - _SHOWN} more reasons"
