"""Conversation files: read rows of any known format, keep what is sound, write down what is not and why."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


def holds_conversations(path: Path) -> bool:
    """Whether the first row looks like a conversation of a known format, and not like plain text."""
    for file in conversation_files(path):
        for row in _raw_rows(file):
            try:
                return isinstance(row, dict) and bool(detect(row))
            except BadRow:
                return False
    return False


def read_conversations(path: Path, form: FormatName = "auto") -> Iterator[NumberedRow | Reject]:
    """Every row of the files, numbered from 1 in each: as a conversation, or refused with a reason."""
    files = conversation_files(path)
    if not files:
        raise DataError(f"{path} holds no conversations", f"give a file or folder of {', '.join(SUFFIXES)}")
    wanted: RowFormat | None = None if form == "auto" else form
    for file in files:
        for number, row in enumerate(_raw_rows(file), start=1):
            yield _read(file.name, number, row, wanted)


def _read(file: str, number: int, row: Any, form: RowFormat | None) -> NumberedRow | Reject:
    if isinstance(row, _Unreadable):
        return Reject(file, number, row.reason, row.text)
    try:
        return NumberedRow(file, number, convert(row, form))
    except BadRow as bad:
        return Reject(file, number, str(bad), row)


@dataclass(frozen=True)
class _Unreadable:
    text: str
    reason: str


def _raw_rows(file: Path) -> Iterator[Any]:
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file)
        return
    if file.name.endswith(".json"):
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{file} is no JSON: {error}", "a .json file holds one list of rows") from None
        yield from rows if isinstance(rows, list) else [rows]
        return
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                yield _Unreadable(line.rstrip("\n"), f"the line is no JSON: {error}")


def _parquet_rows(file: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{file} needs pyarrow to be read", "pip install pyarrow, or give .jsonl") from None
    for batch in parquet.ParquetFile(file).iter_batches(batch_size=512):
        yield from batch.to_pylist()


def held_out(conversation: Conversation, share: float, seed: int) -> bool:
    """Whether a row belongs to validation. It follows from the row itself: a row that occurs twice is on one side."""
    text = json.dumps(conversation.row(), sort_keys=True, ensure_ascii=False)
    drawn = hashlib.sha256(f"{seed} {text}".encode(errors="surrogatepass")).digest()[:8]
    return int.from_bytes(drawn, "little") < share * 2**64


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
    """Write canonical .jsonl, the held-out share apart, and the refused rows to `OUT.rejects.jsonl`."""
    counts = {"kept": 0, "held_out": 0, "rejected": 0}
    rejects = out.with_name(out.name.removesuffix(".jsonl") + ".rejects.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        train = files.enter_context(out.open("w", encoding="utf-8"))
        valid = files.enter_context(valid_out.open("w", encoding="utf-8")) if valid_out else None
        refused = files.enter_context(rejects.open("w", encoding="utf-8"))
        for item in rows:
            if isinstance(item, Reject):
                refused.write(json.dumps(item.line(), ensure_ascii=False) + "\n")
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
