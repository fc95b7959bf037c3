"""Conversation files: read rows of any known format, keep what is sound, write down what is not and why."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from keepstep.core.errors import DataError
from keepstep.data.chat_import import RowFormat, convert, detect
from keepstep.data.chat_rows import BadRow, Conversation

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".parquet")
FormatName = Literal["auto", "messages", "glaive", "xlam", "hermes", "toolace", "sharegpt", "alpaca"]


@dataclass(frozen=True)
class Reject:
    """A row that was refused: where it stood, why, and the row itself."""

    file: str
    row: int
    reason: str
    source: Any

    def line(self) -> dict[str, Any]:
        """What the rejects file holds of it."""
        return {"file": self.file, "row": self.row, "reason": self.reason, "source": self.source}


@dataclass(frozen=True)
class NumberedRow:
    """A sound conversation and where it stood, so that a later refusal can still name its place."""

    file: str
    row: int
    conversation: Conversation

    def reject(self, reason: str) -> Reject:
        """This row, refused after all."""
        return Reject(self.file, self.row, reason, self.conversation.row())


def conversation_files(path: Path) -> list[Path]:
    """The conversation files a path names: one file, or all in a folder, by name."""
    if path.is_dir():
        return sorted(item for item in path.iterdir() if item.name.endswith(SUFFIXES) and item.is_file())
    return [path] if path.name.endswith(SUFFIXES) and path.is_file() else []


def holds_conversations(path: Path, text_field: str = "") -> bool:
    """Whether the first row looks like a conversation of a known format, and not like plain text (in `text_field`)."""
    for file in conversation_files(path):
        for row in _raw_rows(file):
            try:
                return isinstance(row, dict) and text_field not in row and bool(detect(row))
            except BadRow:
                return False
    return False


def read_conversations(path: Path, form: FormatName = "auto") -> Iterator[NumberedRow | Reject]:
    """Every row of the files, numbered from 1 in each: as a conversation, or refused with a reason."""
    files = conversation_files(path)
    if not files:
        wrong = f"{path} holds no conversations" if path.exists() else f"there is no file or folder {path}"
        raise DataError(wrong, f"give a file or folder of {', '.join(SUFFIXES)}")
    wanted: RowFormat | None = None if form == "auto" else form
    for file in files:
        for number, row in enumerate(_raw_rows(file), start=1):
            yield _read(file.name, number, row, wanted)


def _read(file: str, number: int, row: Any, form: RowFormat | None) -> NumberedRow | Reject:
    if isinstance(row, _Unreadable):
        return Reject(file, number, row.reason, row.text)
    try:
        conversation = convert(row, form)
        # NaN and infinity are Python's words: a model would learn to write what no reader of its calls takes.
        json.dumps(conversation.row(), ensure_ascii=False, allow_nan=False).encode()
    except BadRow as bad:
        return Reject(file, number, str(bad), row)
    except UnicodeEncodeError:
        # An emoji cut in two, as JSON's escapes can write it: no tokenizer takes it and no file holds it.
        return Reject(file, number, "it holds half of a character (a lone surrogate)", row)
    except (TypeError, ValueError) as error:
        return Reject(file, number, f"it cannot be written as JSON: {error}", row)
    return NumberedRow(file, number, conversation)


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
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{file} is no JSON: {error}", "a .json file holds one list of rows") from None
    yield from rows if isinstance(rows, list) else [rows]


def _line_rows(file: Path) -> Iterator[Any]:
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, raw in enumerate(lines):
            line = raw if number else raw.removeprefix(BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield json.loads(line.decode())
            except ValueError as error:
                text = line.decode(errors="replace").rstrip("\r\n")
                yield _Unreadable(text, f"the line is no JSON: {error}")


def _parquet_rows(file: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{file} needs pyarrow to be read", "pip install pyarrow, or give .jsonl") from None
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=512):
            for row in batch.to_pylist():
                yield {name: _without_nothing(value) for name, value in row.items()}
    except (OSError, ValueError) as error:  # what pyarrow raises for damaged files
        raise DataError(f"{file} cannot be read: {error}", "the file is damaged: copy it again") from error


def _without_nothing(value: Any) -> Any:
    """A table gives each row the fields of all others, with nothing in them: a call would have every call's arguments,
    and a tool every tool's parameters."""
    if isinstance(value, dict):
        return {name: _without_nothing(item) for name, item in value.items() if item is not None}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


def held_out(conversation: Conversation, share: float, seed: int) -> bool:
    """Whether a row belongs to validation. It follows from the row itself: a row that occurs twice is on one side."""
    text = json.dumps(conversation.row(), sort_keys=True, ensure_ascii=False)
    drawn = hashlib.sha256(f"{seed} {text}".encode(errors="surrogatepass")).digest()[:8]
    return int.from_bytes(drawn, "little") < share * 2**64


def reject_line(reject: Reject) -> str:
    """A refused row as a line of a rejects file, whatever it holds."""
    return json.dumps(reject.line(), ensure_ascii=False, default=str) + "\n"


@contextmanager
def written_whole(path: Path, wanted: Callable[[], bool] = lambda: True) -> Iterator[TextIO]:
    """A text file that gets its name once all is written; what cannot be UTF-8 is written as JSON's escape.

    Where it is not `wanted` in the end, what was there stays.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if wanted():
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@dataclass(frozen=True)
class Written:
    """What a conversion came to."""

    kept: int
    held_out: int
    rejected: int
    rejects: Path | None


def write_canonical(
    rows: Iterable[NumberedRow | Reject], out: Path, valid_out: Path | None, share: float, seed: int
) -> Written:
    """Write canonical .jsonl, the held-out share apart, and the refused rows to `OUT.rejects.jsonl`.

    All of them appear when the last row is written, `out` last. Where no row can be kept, what was there stays.
    """
    counts = {"kept": 0, "held_out": 0, "rejected": 0}
    rejects = out.with_name(out.name.removesuffix(".jsonl") + ".rejects.jsonl")

    def holds_rows() -> bool:
        return counts["kept"] + counts["held_out"] > 0

    for place in (out, valid_out or out):
        place.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        train = files.enter_context(written_whole(out, holds_rows))
        refused = files.enter_context(written_whole(rejects))
        valid = files.enter_context(written_whole(valid_out, holds_rows)) if valid_out else None
        for item in rows:
            if isinstance(item, Reject):
                refused.write(reject_line(item))
                counts["rejected"] += 1
                continue
            line = json.dumps(item.conversation.row(), ensure_ascii=False) + "\n"
            if valid is not None and held_out(item.conversation, share, seed):
                valid.write(line)
                counts["held_out"] += 1
            else:
                train.write(line)
                counts["kept"] += 1
    if not counts["rejected"]:
        rejects.unlink()
    return Written(**counts, rejects=rejects if counts["rejected"] else None)
