"""Documents from raw files, in batches; every bad record is counted and left out.

Memory is bounded by the batch and by the largest document allowed, whatever a file contains: a line without an end, or
a small file that decompresses to terabytes, is skipped in pieces and counted as a giant document.
"""

from __future__ import annotations

import csv
from codecs import BOM_UTF8, getincrementaldecoder
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

from keepstep.core.errors import DataError
from keepstep.data.prepare.decompress import CountBytes, open_piece, read_checked
from keepstep.data.prepare.parquet_rows import column_values
from keepstep.data.prepare.sources import Piece, find_files, split_tasks

BLOCK_BYTES = 1 << 19
"""Raw bytes in one read, and about the text in one batch: small enough to stay in the processor's cache."""
SAMPLES_KEPT = 20
"""Rejected records stored as samples for each task."""

_OTHER_FIELD = "name the right field with --field (data.text_field in a run), or fix the input"
_REMEDIES = {
    "missing field": _OTHER_FIELD,
    "field is not text": _OTHER_FIELD,
    "bad UTF-8": "convert the file to UTF-8, for example with iconv",
    "broken JSON": "each line must be one JSON object; jq -c . writes a file that way",
    "empty": "such records hold no text: leave them out",
    "giant document": "raise --max-document; for plain text, --lines makes each line a document",
}

_CSV_BATCH = 256

Line = bytes | bytearray | memoryview
"""One line without its line end; most are views of the block that holds them."""


@dataclass(frozen=True)
class RecordOptions:
    """How a record becomes a document."""

    text_field: str = "text"
    """Field of a JSON object or column of a table; dots name fields of nested objects."""
    max_document_bytes: int = 1 << 26
    """Larger documents are rejected: they are dumps and not text."""
    lines: bool = False
    """Plain text: each line is a document instead of each file."""


@dataclass
class Rejects:
    """Rejected records, counted by reason, with a few samples."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, reason: str, path: str, place: int, sample: Line | str) -> None:
        """Count one record; `place` is the number of its row or line from 0, shown from 1 as people count."""
        self.counts[reason] += 1
        if len(self.samples) < SAMPLES_KEPT:
            text = sample[:200] if isinstance(sample, str) else str(sample[:200], "utf-8", "replace")
            self.samples.append({"reason": reason, "file": path, "place": place + 1, "sample": text})

    @property
    def total(self) -> int:
        """Records rejected."""
        return self.counts.total()

    def error(self, where: str, seen: int) -> DataError:
        """The error for too many bad records, with the first of them and a remedy."""
        first = self.samples[0]
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common())
        return DataError(
            f"{where} rejected {self.total:,} of {seen:,} records ({reasons}); "
            f"the first is record {first['place']:,} of {first['file']}: {first['sample'][:80]!r}",
            remedy_for(self.counts.most_common(1)[0][0]),
        )


def remedy_for(reason: str) -> str:
    """What to do about records that were rejected for this reason."""
    return _REMEDIES.get(reason, "fix the input")


def read_documents(
    piece: Piece, options: RecordOptions, rejects: Rejects, count: CountBytes = lambda _: None
) -> Iterator[list[str]]:
    """The documents of one piece, a batch at a time; `count` is called with the bytes read from its file."""
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "csv": _read_csv, "text": _read_text}
    return readers[piece.kind](piece, options, rejects, count)


def texts_of(
    inputs: Sequence[str], options: RecordOptions, rejects: Rejects | None = None, max_chars: int = 1 << 62
) -> Iterator[str]:
    """Every document of these inputs in order, until `max_chars` characters were read."""
    for pieces in split_tasks(find_files(inputs), 1 << 30):
        for piece in pieces:
            for texts in read_documents(piece, options, rejects or Rejects()):
                for text in texts:
                    yield text
                    max_chars -= len(text)
                    if max_chars <= 0:
                        return


def require_texts(texts: Iterator[str], rejects: Rejects) -> Iterator[str]:
    """The same texts; an error if there are none, with the reason if every record was rejected."""
    first = next(texts, None)
    if first is None:
        if rejects.total:
            raise rejects.error("reading", rejects.total)
        raise DataError("the inputs hold no text", "give files that are not empty")
    yield first
    yield from texts


def _read_jsonl(piece: Piece, options: RecordOptions, rejects: Rejects, count: CountBytes) -> Iterator[list[str]]:
    import orjson

    loads, path, name = orjson.loads, _counted_from(piece), options.text_field
    nested, largest = "." in name, options.max_document_bytes
    for place, lines in _blocks(piece, options.max_document_bytes, rejects, count):
        texts: list[str] = []
        for number, line in enumerate(lines):
            if not line:
                continue
            if len(line) > largest:
                rejects.add("giant document", path, place + number, line)
                continue
            try:
                record = loads(line)
                text = record[name] if not nested else reduce(getitem, name.split("."), record)
            except orjson.JSONDecodeError:
                if bytes(line).strip():
                    rejects.add(_json_problem(line), path, place + number, line)
                continue
            except (KeyError, TypeError, IndexError):
                rejects.add("missing field", path, place + number, line)
                continue
            if type(text) is not str:
                rejects.add("field is not text", path, place + number, line)
            elif text:
                texts.append(text)
            else:
                rejects.add("empty", path, place + number, line)
        if texts:
            yield texts


def _counted_from(piece: Piece) -> str:
    """The file, and where counting starts if the piece does not start with the file."""
    return f"{piece.path} after byte {piece.start:,}" if piece.start else piece.path


def _json_problem(line: Line) -> str:
    try:
        str(line, "utf-8")
    except UnicodeDecodeError:
        return "bad UTF-8"
    return "broken JSON"


def _blocks(piece: Piece, max_line_bytes: int, rejects: Rejects, count: CountBytes) -> Iterator[tuple[int, list[Line]]]:
    """Complete lines in blocks, each block with the number of its first line inside the piece.

    A piece owns the lines that start inside it, so neighbouring pieces neither share nor lose a line.
    """
    stream, remaining = open_piece(piece, count)
    with closing(stream) as file:
        rest = bytearray()
        # The byte before the piece tells whether a line starts exactly at its first byte.
        skipping = bool(piece.start) and file.read(1) != b"\n"
        number = 0
        while True:
            want = BLOCK_BYTES if remaining is None else min(BLOCK_BYTES, remaining)
            block = read_checked(file, want, piece.path) if want else b""
            if remaining is not None:
                if want and not block:
                    raise DataError(
                        f"{piece.path} became shorter after the build started",
                        "inputs must not change while they are read: build the changed ones into another --out",
                    )
                remaining -= len(block)
            if not block:
                break
            if skipping:
                end = block.find(b"\n")
                if end < 0:
                    continue
                block, skipping = block[end + 1 :], False
            lines, rest = _split_lines(rest, block)
            if lines and not number and not piece.start:
                lines[0] = _without_bom(lines[0])
            if len(rest) > max_line_bytes:
                rejects.add("giant document", _counted_from(piece), number + len(lines), rest)
                rest, skipping = bytearray(), True
            yield number, lines
            number += len(lines)
        if rest:
            line = _finish_line(file, rest, piece, max_line_bytes, rejects, number)
            yield number, [line if number or piece.start else _without_bom(line)]


def _without_bom(line: Line) -> Line:
    """A file's first line without the byte order mark that some editors write."""
    return line[len(BOM_UTF8) :] if bytes(line[: len(BOM_UTF8)]) == BOM_UTF8 else line


def _split_lines(rest: bytearray, block: bytes) -> tuple[list[Line], bytearray]:
    """The lines that end in a block, and the start of the next one; only a line from an earlier block is copied."""
    find, view = block.find, memoryview(block)
    end = find(b"\n")
    if end < 0:
        rest += block
        return [], rest
    rest += view[:end]
    lines: list[Line] = [rest]
    start = end + 1
    # Not block.split, which copies every line and scans one byte at a time.
    while (end := find(b"\n", start)) >= 0:
        lines.append(view[start:end])
        start = end + 1
    return lines, bytearray(view[start:])


def _finish_line(file: Any, rest: bytearray, piece: Piece, max_line_bytes: int, rejects: Rejects, number: int) -> bytes:
    """The last line with its end, which may be in the next piece."""
    parts, size = [bytes(rest)], len(rest)
    while piece.stop >= 0 and not piece.compression:
        block = read_checked(file, 1 << 16, piece.path)
        end = block.find(b"\n")
        parts.append(block if end < 0 else block[:end])
        size += len(parts[-1])
        if size > max_line_bytes:
            rejects.add("giant document", _counted_from(piece), number, rest)
            return b""
        if end >= 0 or not block:
            break
    return b"".join(parts)


def _read_parquet(piece: Piece, options: RecordOptions, rejects: Rejects, count: CountBytes) -> Iterator[list[str]]:
    row = 0
    for values, read_bytes in column_values(piece.path, piece.start, piece.stop, options.text_field):
        count(read_bytes)
        texts = []
        for number, text in enumerate(values):
            reason = _text_problem(text, options.max_document_bytes)
            if reason:
                rejects.add(reason, piece.path, row + number, str(text))
            else:
                texts.append(text)
        row += len(values)
        if texts:
            yield texts


def _read_csv(piece: Piece, options: RecordOptions, rejects: Rejects, count: CountBytes) -> Iterator[list[str]]:
    """One column of a table with a line of column names."""
    name = options.text_field
    csv.field_size_limit(options.max_document_bytes)
    stream, _ = open_piece(piece, count)
    with closing(stream) as file:
        rows = csv.reader(_text_lines(file, piece.path), delimiter="\t" if ".tsv" in piece.path.lower() else ",")
        try:
            names = next(rows, [])
            if names and name not in names:
                raise DataError(f"{piece.path} has no column {name!r}", f"--field one of {', '.join(names)}")
            column = names.index(name) if names else 0
            texts: list[str] = []
            for number, row in enumerate(rows, 1):
                text = row[column] if column < len(row) else None
                reason = _text_problem(text, options.max_document_bytes)
                if text and any("\udc80" <= letter <= "\udcff" for letter in text):
                    reason = "bad UTF-8"
                if reason and row:
                    rejects.add(reason, piece.path, number, repr(row))
                elif text:
                    texts.append(text)
                if len(texts) >= _CSV_BATCH:
                    yield texts
                    texts = []
            if texts:
                yield texts
        except csv.Error as error:
            hint = "close the quote of that field, or raise --max-document"
            raise DataError(f"{piece.path} line {rows.line_num:,}: {error}", hint) from error


def _text_lines(file: Any, path: str) -> Iterator[str]:
    """Lines with their ends; bytes that are not UTF-8 become lone surrogates, which no text has."""
    decoder, rest = getincrementaldecoder("utf-8-sig")("surrogateescape"), ""
    while block := read_checked(file, BLOCK_BYTES, path):
        *lines, rest = (rest + decoder.decode(block)).split("\n")
        yield from (line + "\n" for line in lines)
    if rest := rest + decoder.decode(b"", final=True):
        yield rest


def _text_problem(text: Any, max_bytes: int) -> str:
    if text is None:
        return "missing field"
    if type(text) is not str:
        return "field is not text"
    if not text:
        return "empty"
    return "giant document" if len(text) > max_bytes else ""


def _read_text(piece: Piece, options: RecordOptions, rejects: Rejects, count: CountBytes) -> Iterator[list[str]]:
    if options.lines:
        for place, lines in _blocks(piece, options.max_document_bytes, rejects, count):
            texts = []
            for number, line in enumerate(lines):
                if len(line) > options.max_document_bytes:
                    rejects.add("giant document", piece.path, place + number, line)
                    continue
                try:
                    # Windows ends a line with two characters.
                    text = str(line, "utf-8").removesuffix("\r")
                except UnicodeDecodeError:
                    rejects.add("bad UTF-8", piece.path, place + number, line)
                    continue
                if text.strip():
                    texts.append(text)
            if texts:
                yield texts
        return
    stream, _ = open_piece(piece, count)
    with closing(stream) as file:
        parts: list[bytes] = []
        while block := read_checked(file, BLOCK_BYTES, piece.path):
            parts.append(block)
            if sum(map(len, parts)) > options.max_document_bytes:
                rejects.add("giant document", piece.path, 0, parts[0])
                return
    raw = b"".join(parts)
    try:
        text = raw.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError:
        rejects.add("bad UTF-8", piece.path, 0, raw)
        return
    if text.strip():
        yield [text]
    else:
        rejects.add("empty", piece.path, 0, raw)
