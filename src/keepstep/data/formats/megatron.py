"""Megatron's .bin/.idx pair: raw tokens in one file, lengths and boundaries in the other.

A file is input, so nothing it claims is believed: sizes are checked against the bytes that are there before anything is
mapped, and every boundary is checked before it is used. Opening costs the same for a thousand and for 10^12 tokens.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.files import sync_folder
from keepstep.data.formats.mapped import map_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Token types by code. Codes 6 and 7 are floats: legal in the format, never tokens."""

LARGEST_UINT16_VOCAB = 65_500
"""Megatron stores tokens of smaller vocabularies in two bytes."""


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The type Megatron itself would choose for a vocabulary of this size."""
    return DTYPES[8] if vocab < LARGEST_UINT16_VOCAB else DTYPES[4]


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
    """Writes one pair. Both files appear, the index last, only when `close` succeeds; a crash leaves neither."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self._dtype = dtype
        self._code = next(code for code, known in DTYPES.items() if known == dtype)
        self._lengths = array("i")
        self.tokens = 0
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._aside = prefix.with_name(f".{prefix.name}.{os.getpid()}.tmp")
        self._file = bin_path(self._aside).open("wb")

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def add(self, tokens: NDArray[Any]) -> None:
        """Append one document."""
        self.add_many(tokens, np.array([tokens.size], dtype=np.int32))

    def add_many(self, tokens: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Append documents that lie one after the other in `tokens`."""
        assert int(lengths.sum(dtype=np.int64)) == tokens.size, "lengths do not add up to the tokens"
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._lengths.frombytes(np.ascontiguousarray(lengths, dtype=np.int32).tobytes())
        self.tokens += tokens.size

    def close(self) -> None:
        """Flush, write the index and give both their names."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with idx_path(self._aside).open("wb") as file:
            file.write(index_bytes(np.frombuffer(self._lengths, dtype=np.int32), self._code))
            file.flush()
            os.fsync(file.fileno())
        bin_path(self._aside).replace(bin_path(self.prefix))
        idx_path(self._aside).replace(idx_path(self.prefix))
        sync_folder(self.prefix.parent)

    def abort(self) -> None:
        """Throw away what was written."""
        self._file.close()
        bin_path(self._aside).unlink(missing_ok=True)
        idx_path(self._aside).unlink(missing_ok=True)

    def __enter__(self) -> MegatronWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def index_bytes(lengths: NDArray[np.int32], code: int) -> bytes:
    """A whole .idx file for documents of these lengths."""
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= DTYPES[code].itemsize
    header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    return header + lengths.astype("<i4").tobytes() + pointers.tobytes() + documents.tobytes()


@dataclass(frozen=True)
class RemoteStream:
    """A .bin file that is fetched when it is needed: its size is known, `map` brings its bytes."""

    size_bytes: int
    map: Callable[[], NDArray[np.uint8]]


class MegatronReader:
    """A pair, memory-mapped: `tokens` is the whole stream, documents are found through the index."""

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
    def tokens(self) -> NDArray[Any]:
        """The whole stream; a remote one is fetched now if it is not here."""
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
        # The ends are enough to notice a truncated or foreign file; what lies between is checked when it is read.
        if int(self._documents[0]) != 0 or int(self._documents[-1]) != self.sequences:
            raise _damaged(index, "does not number its documents from the first to the last sequence")
        size = self.dtype.itemsize
        claimed = int(self._pointers[-1]) // size + int(self.lengths[-1]) if self.sequences else 0
        if claimed != self.token_count:
            raise _damaged(stream, f"holds {self.token_count:,} tokens, but its index ends at {claimed:,}")

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
        """The sequences that documents from `start` to `stop` consist of; most files have one for each."""
        first, last = (int(self._documents[number]) for number in (documents.start, documents.stop))
        if not 0 <= first <= last <= self.sequences:
            raise _damaged(idx_path(self.prefix), f"has documents at sequences {first} to {last}")
        return range(first, last)

    def starts_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Starts of the sequences that begin inside tokens [first, last), as offsets into the whole stream."""
        size = self.dtype.itemsize
        low, high = np.searchsorted(self._pointers, [first * size, last * size])
        # An index that is not sorted may answer anything; what is outside is dropped, never followed.
        starts = np.asarray(self._pointers[low:high]) // size
        return starts[(starts >= first) & (starts < last)]

    def check(self) -> None:
        """Read the whole index and hold every boundary against its neighbours."""
        expected = 0
        for first in range(0, self.sequences, 1 << 20):
            lengths = np.asarray(self.lengths[first : first + (1 << 20)], dtype=np.int64)
            ends = expected + np.cumsum(lengths)
            starts = np.concatenate([[expected], ends[:-1]]) * self.dtype.itemsize
            wrong = np.flatnonzero((starts != self._pointers[first : first + (1 << 20)]) | (lengths < 0))
            if wrong.size:
                raise _damaged(idx_path(self.prefix), f"has a wrong entry for sequence {first + int(wrong[0])}")
            expected = int(ends[-1])
        if np.any(np.diff(self._documents) < 0):
            raise _damaged(idx_path(self.prefix), "has documents that end before they start")


def _read_header(index: Path) -> tuple[int, int, int]:
    """The dtype code and both counts, once the file is as long as they say."""
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
    if documents < 1 or documents > sequences + 1 or expected > size_bytes:
        raise _damaged(
            index, f"claims {sequences:,} sequences and {documents - 1:,} documents but is {size_bytes:,} bytes long"
        )
    return code, sequences, documents


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}", "the file is damaged or incomplete: build or copy it again")
