"""Megatron's .bin/.idx pair: raw tokens in one file, lengths and boundaries in the other.

Files are untrusted input: sizes are checked against the actual bytes before anything is mapped, and every boundary
before it is used. Opening costs the same for a thousand and for 10^12 tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError, UsageError
from keepstep.core.files import sync_file, sync_folder, temporary_name
from keepstep.data.formats.build_folder import is_unfinished, unfinished_error
from keepstep.data.formats.mapped import map_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: Mapping[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
"""Token types by code. Codes 6 and 7 are floats, which are legal in the format but never tokens."""


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The type that Megatron chooses for a vocabulary of this size."""
    return DTYPES[8] if vocab < 65_500 else DTYPES[4]


def bin_path(prefix: Path) -> Path:
    """The tokens of `prefix`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The index of `prefix`."""
    return prefix.with_name(prefix.name + ".idx")


def is_prefix(path: Path) -> bool:
    """Whether `path` names a .bin/.idx pair."""
    return bin_path(path).is_file() and idx_path(path).is_file()


def find_prefixes(folder: Path) -> list[Path]:
    """Every .bin/.idx pair directly inside `folder`, by name."""
    return [path.with_suffix("") for path in sorted(folder.glob("*.idx")) if path.with_suffix(".bin").is_file()]


class MegatronWriter:
    """Writes one pair. `close` renames both files into place, the index last; a crash leaves neither."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self._dtype = dtype
        self._code = next(code for code, known in DTYPES.items() if known == dtype)
        self._lengths = array("i")
        self.tokens = 0
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_name(prefix, "tmp")
        self._file = bin_path(self._temporary).open("wb")

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def add(self, tokens: NDArray[Any]) -> None:
        """Append one document."""
        self.add_many(tokens, np.array([tokens.size], dtype=np.int32))

    def add_many(self, tokens: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Append documents that are concatenated in `tokens`."""
        assert int(lengths.sum(dtype=np.int64)) == tokens.size, "lengths do not add up to the tokens"
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._lengths.frombytes(np.ascontiguousarray(lengths, dtype=np.int32).tobytes())
        self.tokens += tokens.size

    def close(self) -> None:
        """Flush, write the index and rename both files into place."""
        self._file.close()
        idx_path(self._temporary).write_bytes(index_bytes(np.frombuffer(self._lengths, np.int32), self._code))
        for path_of in (bin_path, idx_path):
            sync_file(path_of(self._temporary))
        for path_of in (bin_path, idx_path):
            path_of(self._temporary).replace(path_of(self.prefix))
        sync_folder(self.prefix.parent)

    def abort(self) -> None:
        """Remove what was written and not renamed into place."""
        self._file.close()
        bin_path(self._temporary).unlink(missing_ok=True)
        idx_path(self._temporary).unlink(missing_ok=True)

    def __enter__(self) -> MegatronWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()


def index_bytes(lengths: NDArray[np.int32], code: int) -> bytes:
    """The content of an .idx file for documents of these lengths."""
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= DTYPES[code].itemsize
    header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    return header + lengths.astype("<i4").tobytes() + pointers.tobytes() + documents.tobytes()


@dataclass(frozen=True)
class RemoteStream:
    """A .bin file that is fetched when it is needed: its size is known, `map` fetches and maps it."""

    size_bytes: int
    map: Callable[[], NDArray[np.uint8]]


class MegatronReader:
    """A memory-mapped pair: `tokens` is the complete stream, documents are found through the index."""

    def __init__(self, prefix: Path, *, index: Path | None = None, remote: RemoteStream | None = None) -> None:
        self.prefix = prefix
        index, stream = index or idx_path(prefix), bin_path(prefix)
        for path in (index,) if remote else (index, stream):
            if not path.is_file():
                raise DataError(f"{path} is missing", "a data set is a .bin and an .idx file of the same name")
        code, sequences, documents = _read_header(index)
        self.dtype = DTYPES[code]
        size_bytes = remote.size_bytes if remote else stream.stat().st_size
        if size_bytes % self.dtype.itemsize:
            raise _damaged(stream, f"holds {size_bytes} bytes, not a whole number of {self.dtype.name} tokens")
        self.token_count = size_bytes // self.dtype.itemsize
        self._remote = remote
        raw = map_file(index) if sequences else np.zeros(HEADER.size + 8, np.uint8)
        cuts = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences])
        self.lengths: NDArray[np.int32] = raw[cuts[0] : cuts[1]].view("<i4")
        self._pointers: NDArray[np.int64] = raw[cuts[1] : cuts[2]].view("<i8")
        self._documents: NDArray[np.int64] = raw[cuts[2] : cuts[2] + 8 * documents].view("<i8")
        self._local: NDArray[Any] | None = None
        if not remote:
            self._local = map_file(stream).view(self.dtype)
        self.sequences = sequences
        self.documents = documents - 1
        self._check_ends(index, stream)

    @property
    def is_remote(self) -> bool:
        """Whether the tokens are fetched when they are first read."""
        return self._remote is not None

    @property
    def tokens(self) -> NDArray[Any]:
        """The complete stream; a remote one is fetched now if it is not cached."""
        if self._local is not None:
            return self._local
        assert self._remote is not None
        raw = self._remote.map()
        if len(raw) != self._remote.size_bytes:
            raise _damaged(bin_path(self.prefix), f"holds {len(raw):,} bytes instead of {self._remote.size_bytes:,}")
        return raw.view(self.dtype)

    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of every document."""
        if self.documents == self.sequences:
            return np.asarray(self.lengths, dtype=np.int64)
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        if np.any(self._documents < 0) or np.any(self._documents > self.sequences):
            raise _damaged(idx_path(self.prefix), "has documents outside its sequences")
        return np.diff(ends[self._documents])

    def _check_ends(self, index: Path, stream: Path) -> None:
        # The ends are enough to notice a truncated or foreign file; the rest is checked when it is read.
        if int(self._documents[0]) or int(self._documents[-1]) != self.sequences or self._pointers[:1].any():
            raise _damaged(index, "does not number its documents from the first to the last sequence")
        size = self.dtype.itemsize
        claimed = int(self._pointers[-1]) // size + int(self.lengths[-1]) if self.sequences else 0
        if claimed != self.token_count:
            raise _damaged(stream, f"holds {self.token_count:,} tokens, but its index ends at {claimed:,}")

    def check(self) -> None:
        """Prove what opening does not: every sequence starts where the one before ends, and so does every document."""
        for first in range(0, self.sequences, 1 << 20):
            self._check_starts(first, min(first + (1 << 20), self.sequences))
        steps = np.diff(self._documents)
        # Megatron stores an empty document as one without a sequence. With one sequence a document there are none.
        if np.any(steps < 0) or (len(steps) == self.sequences and np.any(steps != 1)):
            raise _damaged(idx_path(self.prefix), "has documents out of order")

    def _check_starts(self, first: int, last: int) -> None:
        """Sequences [first, last) and the next must each start where the one before ends."""
        first = max(0, first - 1)
        lengths = self.lengths[first:last].astype(np.int64)
        ends = (self._pointers[first:last] + lengths * self.dtype.itemsize)[: self.sequences - first - 1]
        if np.any(lengths < 0) or np.any(ends != self._pointers[first + 1 : last + 1]):
            raise _damaged(idx_path(self.prefix), f"has gaps or overlaps between sequences {first} and {last}")

    def _offset(self, sequence: int) -> int:
        """Where a sequence starts in `tokens`, checked."""
        pointer, length = int(self._pointers[sequence]), int(self.lengths[sequence])
        start, rest = divmod(pointer, self.dtype.itemsize)
        if rest or start < 0 or length < 0 or start + length > self.token_count:
            raise _damaged(
                idx_path(self.prefix),
                f"puts sequence {sequence} at byte {pointer} with {length} tokens, outside its {self.token_count:,}",
            )
        return start

    def sequence(self, number: int) -> NDArray[Any]:
        """One sequence, as a view of the file."""
        start = self._offset(number)
        return self.tokens[start : start + int(self.lengths[number])]

    def document_start(self, document: int) -> int:
        """Where a document starts in `tokens`; `documents` itself gives the end of the last."""
        if not 0 <= document <= self.documents:
            raise IndexError(document)
        sequence = int(self._documents[document])
        if not 0 <= sequence <= self.sequences:
            raise _damaged(idx_path(self.prefix), f"starts document {document} at sequence {sequence}")
        return self._offset(sequence) if sequence < self.sequences else self.token_count

    def document(self, number: int) -> NDArray[Any]:
        """All tokens of one document, as a view of the file."""
        return self.tokens[self.document_start(number) : self.document_start(number + 1)]

    def sequences_of(self, documents: range) -> range:
        """The sequences of these documents; most files have one sequence for each document."""
        first, last = (int(self._documents[number]) for number in (documents.start, documents.stop))
        if not 0 <= first <= last <= self.sequences:
            raise _damaged(idx_path(self.prefix), f"has documents at sequences {first} to {last}")
        return range(first, last)

    def starts_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Starts of the sequences that begin inside tokens [first, last); an index with gaps there is an error."""
        size = self.dtype.itemsize
        low, high = np.searchsorted(self._pointers, [first * size, last * size])
        self._check_starts(int(low), int(high))
        return np.asarray(self._pointers[low:high]) // size


def _read_header(index: Path) -> tuple[int, int, int]:
    """The dtype code and both counts, checked against the file's length."""
    size_bytes = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise _damaged(index, "is not a Megatron index (its first bytes differ)")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != VERSION:
        raise _damaged(index, f"has version {version}; only {VERSION} is known")
    if code not in DTYPES:
        raise _damaged(index, f"has dtype code {code}; integer tokens are {', '.join(map(str, DTYPES))}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    # A data set of several modes has one more byte for each sequence.
    if documents < 1 or size_bytes not in (expected, expected + sequences):
        raise _damaged(
            index, f"claims {sequences:,} sequences and {documents - 1:,} documents but is {size_bytes:,} bytes long"
        )
    return code, sequences, documents


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}", "the file is damaged or incomplete: build or copy it again")


def merge_folder(folder: Path, out: Path) -> tuple[int, int]:
    """Merge the pairs of a folder into one, for tools that need a single prefix; returns its documents and tokens."""
    if is_unfinished(folder):
        raise unfinished_error(str(folder))
    if out.parent.resolve() == folder.resolve():
        raise UsageError(
            f"--out {out} is in the folder that is merged, which would then hold its documents twice",
            "name a prefix in another folder",
        )
    readers = [MegatronReader(prefix) for prefix in find_prefixes(folder)]
    if not readers:
        raise DataError(f"{folder} holds no .bin/.idx pairs", "name a folder that keepstep data build wrote")
    kinds = {reader.dtype for reader in readers}
    if len(kinds) != 1:
        raise DataError(
            f"the pairs hold tokens of {len(kinds)} types ({', '.join(sorted(kind.name for kind in kinds))})",
            "merge pairs that were built with one tokenizer and --dtype",
        )
    with MegatronWriter(out, kinds.pop()) as writer:
        for reader in readers:
            lengths = reader.document_lengths()
            if int(lengths.sum()) != reader.token_count:
                total = f"{int(lengths.sum()):,} tokens, but its .bin file holds {reader.token_count:,}"
                raise _damaged(idx_path(reader.prefix), f"has documents of {total}")
            reader.check()
            writer.add_many(reader.tokens, lengths.astype(np.int32))
    return writer.documents, writer.tokens
