"""Documents out of raw files, in batches, with every bad record counted and none believed.

Memory is bounded by the batch and by the largest document allowed, whatever a file claims: a line without an end, or a
small file that unpacks to terabytes, is skipped in pieces and counted as a giant.
"""

from __future__ import annotations

import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from keepstep.core.errors import DataError
from keepstep.data.parquet_rows import column_values
from keepstep.data.remote import broke_off, is_network
from keepstep.data.sources import Piece, cut_tasks, find_files, open_binary
from keepstep.data.zstd_frames import Unzstd

BLOCK_BYTES = 1 << 19
"""Raw bytes read, and about the text handed on, at a time: what is done to them finds them in the processor's cache."""
SAMPLES_KEPT = 20
"""Rejected records written down for each task."""

_REMEDIES = {
    "missing field": "name the right field with --field (data.text_field in a run), or mend the input",
    "field is not text": "name the right field with --field (data.text_field in a run), or mend the input",
    "giant document": "raise --max-document; for plain text, --lines makes each line a document",
}

Line = bytes | bytearray | memoryview
"""One line without its end; most are views of the block they were read in."""

Count = Callable[[int], None]
"""Told how many more bytes of a file, as it lies on its disk, were read."""


@dataclass(frozen=True)
class RecordOptions:
    """How a record becomes a document."""

    text_field: str = "text"
    """Field of a JSON object or column of a table; dots go into nested objects."""
    max_document_bytes: int = 1 << 26
    """Larger documents are rejected: they are dumps, not text."""
    lines: bool = False
    """Plain text: each line is a document, not each file."""


@dataclass
class Rejects:
    """What was not taken, by reason, with a few samples to look at."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, reason: str, path: str, place: int, sample: Line | str) -> None:
        """Count one record; `place` is its byte, row or line number."""
        self.counts[reason] += 1
        if len(self.samples) < SAMPLES_KEPT:
            text = sample[:200] if isinstance(sample, str) else str(sample[:200], "utf-8", "replace")
            self.samples.append({"reason": reason, "file": path, "place": place, "sample": text})

    @property
    def total(self) -> int:
        """Records rejected."""
        return self.counts.total()

    def complaint(self, where: str, seen: int) -> DataError:
        """That too many of the records seen are bad, with the first of them and what may help."""
        first = self.samples[0]
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common())
        return DataError(
            f"{where} rejected {self.total:,} of {seen:,} records ({reasons}); "
            f"the first is in {first['file']} at {first['place']}: {first['sample'][:80]!r}",
            _REMEDIES.get(self.counts.most_common(1)[0][0], "mend the input"),
        )


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_documents(
    piece: Piece, options: RecordOptions, rejects: Rejects, count: Count = lambda _: None
) -> Iterator[list[str]]:
    """The documents of one piece, a batch at a time; `count` hears how much of its file was read for them."""
    match piece.kind:
        case "jsonl":
            yield from _read_jsonl(piece, options, rejects, count)
        case "parquet":
            yield from _read_parquet(piece, options, rejects, count)
        case "text":
            yield from _read_text(piece, options, rejects, count)


def texts_of(
    inputs: Sequence[str], options: RecordOptions, rejects: Rejects | None = None, max_chars: int = 1 << 62
) -> Iterator[str]:
    """Every document of these inputs in order, until `max_chars` are read."""
    for pieces in cut_tasks(find_files(inputs), 1 << 30):
        for piece in pieces:
            for texts in read_documents(piece, options, rejects or Rejects()):
                for text in texts:
                    yield text
                    max_chars -= len(text)
                    if max_chars <= 0:
                        return


def not_nothing(texts: Iterator[str], rejects: Rejects) -> Iterator[str]:
    """The same texts; an error where there are none, with the reason where every record was rejected."""
    first = next(texts, None)
    if first is None:
        if rejects.total:
            raise rejects.complaint("reading", rejects.total)
        raise DataError("the inputs hold no text", "give files that are not empty")
    yield first
    yield from texts


def _read_jsonl(piece: Piece, options: RecordOptions, rejects: Rejects, count: Count) -> Iterator[list[str]]:
    import orjson

    loads, path, name = orjson.loads, piece.path, options.text_field
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
                text = record[name] if not nested else _descend(record, name)
            except orjson.JSONDecodeError:
                if bytes(line).strip():
                    rejects.add(_why_not_json(line), path, place + number, line)
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


def _why_not_json(line: Line) -> str:
    try:
        str(line, "utf-8")
    except UnicodeDecodeError:
        return "bad UTF-8"
    return "broken JSON"


def _descend(record: Any, name: str) -> Any:
    for part in name.split("."):
        record = record[part]
    return record


def _blocks(piece: Piece, max_line_bytes: int, rejects: Rejects, count: Count) -> Iterator[tuple[int, list[Line]]]:
    """Whole lines in blocks, each with a number for messages: the line inside the piece.

    A piece owns the lines that start inside it, so neighbouring pieces share none and lose none.
    """
    stream, remaining = _open_at(piece, count)
    with stream as file:
        rest = bytearray()
        skipping = False
        if piece.start:
            # The byte before ours tells whether a line starts exactly where we do.
            skipping = file.read(1) != b"\n"
        number = 0
        while True:
            want = BLOCK_BYTES if remaining is None else min(BLOCK_BYTES, remaining)
            block = _read(file, want, piece.path) if want else b""
            if remaining is not None:
                if want and not block:
                    raise DataError(
                        f"{piece.path} became shorter after the build began",
                        "inputs must stay as they are while they are read: build what is there now into another --out",
                    )
                remaining -= len(block)
            if not block:
                break
            if skipping:
                end = block.find(b"\n")
                if end < 0:
                    continue
                block, skipping = block[end + 1 :], False
            lines, rest = _cut_lines(rest, block)
            if lines and not number and not piece.start:
                lines[0] = _without_mark(lines[0])
            if len(rest) > max_line_bytes:
                rejects.add("giant document", piece.path, number + len(lines), rest)
                rest, skipping = bytearray(), True
            yield number, lines
            number += len(lines)
        if rest:
            line = _finish_line(file, rest, piece, max_line_bytes, rejects, number)
            yield number, [line if number or piece.start else _without_mark(line)]


def _without_mark(line: Line) -> Line:
    """A file's first line without the mark that some editors put before UTF-8."""
    return line[len(BOM_UTF8) :] if bytes(line[: len(BOM_UTF8)]) == BOM_UTF8 else line


def _cut_lines(rest: bytearray, block: bytes) -> tuple[list[Line], bytearray]:
    """The lines that end in a block, and what it holds of the next; only a line that began earlier is copied."""
    find, view = block.find, memoryview(block)
    end = find(b"\n")
    if end < 0:
        rest += block
        return [], rest
    rest += view[:end]
    lines: list[Line] = [rest]
    start = end + 1
    # Not block.split: it copies every line, and looks at one byte at a time.
    while (end := find(b"\n", start)) >= 0:
        lines.append(view[start:end])
        start = end + 1
    return lines, bytearray(view[start:])


def _finish_line(file: Any, rest: bytearray, piece: Piece, max_line_bytes: int, rejects: Rejects, number: int) -> bytes:
    """The end of the last line, which may lie in the next piece."""
    parts, size = [bytes(rest)], len(rest)
    while piece.stop >= 0 and not piece.compression:
        block = _read(file, 1 << 16, piece.path)
        end = block.find(b"\n")
        parts.append(block if end < 0 else block[:end])
        size += len(parts[-1])
        if size > max_line_bytes:
            rejects.add("giant document", piece.path, number, rest)
            return b""
        if end >= 0 or not block:
            break
    return b"".join(parts)


def _open_at(piece: Piece, count: Count = lambda _: None) -> tuple[Any, int | None]:
    """The stream at the piece's first byte (one before it, unless it starts the file) and how many bytes are ours."""
    file = _Counted(open_binary(piece.path), count)
    if piece.compression == ".gz":
        return _Inflating(file, zlib.decompressobj(wbits=31), piece.path), None
    if piece.compression == ".zst":
        return Unzstd(file, piece.path), None
    if piece.start:
        file.seek(piece.start - 1)
    return file, None if piece.stop < 0 else piece.stop - piece.start


def open_decompressed(path: str) -> Any:
    """A file's unpacked bytes as a stream, whatever its name says it is packed with."""
    compression = next((suffix for suffix in (".gz", ".zst") if path.endswith(suffix)), "")
    return _Checked(_open_at(Piece(path, "jsonl", compression, 0, -1))[0], path)


class _Counted:
    """A file that says how much of it was read."""

    def __init__(self, file: Any, count: Count) -> None:
        self._file = file
        self._count = count
        self.seek = file.seek
        self.close = file.close

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; none at the end."""
        found: bytes = self._file.read(size)
        self._count(len(found))
        return found


class _Checked:
    """A stream whose faults are our errors."""

    def __init__(self, stream: Any, path: str) -> None:
        self._stream = stream
        self._path = path

    def __enter__(self) -> _Checked:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.__exit__(None, None, None)

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        return _read(self._stream, size, self._path)


class _Inflating:
    """gzip as a stream of bounded reads; members may follow one another, and a cut-off file is an error."""

    def __init__(self, file: _Stream, inflate: Any, path: str) -> None:
        self._file = file
        self._inflate = inflate
        self._path = path
        self._input = b""

    def __enter__(self) -> _Inflating:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # type: ignore[attr-defined]

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        while True:
            if not self._input:
                self._input = self._file.read(1 << 18)
            ends = not self._input
            if self._inflate.eof:
                # Tapes and some stores fill the last block up with zeros.
                self._input = self._input.lstrip(b"\0")
                if ends:
                    return b""
                if not self._input:
                    continue
                self._inflate = zlib.decompressobj(wbits=31)
            elif ends:
                raise DataError(f"{self._path} ends in the middle", "the file is truncated: copy it again")
            found: bytes = self._inflate.decompress(self._input, size)
            self._input = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            if found:
                return found


def _read(file: _Stream, size: int, path: str) -> bytes:
    try:
        return file.read(size)
    except DataError:
        raise
    except Exception as error:  # zlib, zstandard and remote systems each raise their own
        if "://" in path and (isinstance(error, OSError) or is_network(error)):
            raise broke_off(path, error) from error
        raise DataError(f"{path} cannot be unpacked: {error}", "the file is damaged: copy it again") from error


def _read_parquet(piece: Piece, options: RecordOptions, rejects: Rejects, count: Count) -> Iterator[list[str]]:
    row = 0
    for values, read_bytes in column_values(piece.path, piece.start, piece.stop, options.text_field):
        count(read_bytes)
        texts = []
        for number, text in enumerate(values):
            reason = _why_not_text(text, options.max_document_bytes)
            if reason:
                rejects.add(reason, piece.path, row + number, str(text))
            else:
                texts.append(text)
        row += len(values)
        if texts:
            yield texts


def _why_not_text(text: Any, max_bytes: int) -> str:
    if text is None:
        return "missing field"
    if type(text) is not str:
        return "field is not text"
    if not text:
        return "empty"
    return "giant document" if len(text) > max_bytes else ""


def _read_text(piece: Piece, options: RecordOptions, rejects: Rejects, count: Count) -> Iterator[list[str]]:
    if options.lines:
        for place, lines in _blocks(piece, options.max_document_bytes, rejects, count):
            texts = []
            for number, line in enumerate(lines):
                if len(line) > options.max_document_bytes:
                    rejects.add("giant document", piece.path, place + number, line)
                    continue
                try:
                    # Lines of Windows end in two characters.
                    text = str(line, "utf-8").removesuffix("\r")
                except UnicodeDecodeError:
                    rejects.add("bad UTF-8", piece.path, place + number, line)
                    continue
                if text.strip():
                    texts.append(text)
            if texts:
                yield texts
        return
    stream, _ = _open_at(piece, count)
    with stream as file:
        parts: list[bytes] = []
        while block := _read(file, BLOCK_BYTES, piece.path):
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
