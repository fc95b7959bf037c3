"""Data files: one per rank, each a valid safetensors file whose header also holds the hash of every block.

Layout: 8 bytes of header length, the JSON header padded with spaces to a page, then the pieces back to back, widest
elements first so that each piece is aligned. Blocks are hashed in the source buffer, before a byte is written, and
never span two pieces, so that a reader can check exactly the part it needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.protocol.manifest import DIGEST_CHARS, ITEM_BYTES, Algorithm, FileEntry, hasher
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice, whole
from keepstep.checkpoint.storage.store import Store, unreadable
from keepstep.core.errors import CheckpointError, malformed_as

PAGE_BYTES = 4096
SMALLEST_BLOCK_BYTES = 64 * 1024
MOST_BLOCKS = 65536
CHECK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class PieceSpec:
    """One slice of one tensor that a rank writes, and its offset in the rank's buffer."""

    tensor: str
    dtype: str
    tensor_shape: tuple[int, ...]
    tensor_slice: TensorSlice
    begin: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece."""
        return self.tensor_slice.count * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """Its name inside the safetensors file."""
        if self.tensor_slice == whole(self.tensor_shape):
            return self.tensor
        return f"{self.tensor}@[{','.join(map(str, self.tensor_slice.offset))}]"

    def to_json(self) -> list[Any]:
        """For the part file, the writer's pipe and the description of a snapshot."""
        part = self.tensor_slice
        return [self.tensor, self.dtype, self.tensor_shape, part.offset, part.shape, self.begin]

    @staticmethod
    def from_json(raw: Sequence[Any]) -> PieceSpec:
        """Inverse of `to_json`."""
        tensor, dtype, tensor_shape, offset, shape, begin = raw
        return PieceSpec(tensor, dtype, tuple(tensor_shape), TensorSlice(tuple(offset), tuple(shape)), begin)


def lay_out(pieces: Sequence[tuple[str, str, tuple[int, ...], TensorSlice]]) -> tuple[list[PieceSpec], int]:
    """Assign an offset to each (tensor, dtype, tensor shape, slice); returns the specs and the total bytes."""
    ordered = sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece[1]], piece[0], piece[3]))
    specs, begin = [], 0
    for tensor, dtype, shape, tensor_slice in ordered:
        specs.append(PieceSpec(tensor, dtype, shape, tensor_slice, begin))
        begin += specs[-1].size_bytes
    return specs, begin


def shard_header(
    specs: Sequence[PieceSpec], read: Callable[[PieceSpec], memoryview], algorithm: Algorithm, threads: int = 1
) -> bytes:
    """Hash every piece and build the safetensors header, padded to a page; header + pieces is the data file."""
    # Small blocks, so that a part can be checked alone, but at most 65,536 hashes per file.
    block_bytes = SMALLEST_BLOCK_BYTES
    while block_bytes * MOST_BLOCKS < sum(spec.size_bytes for spec in specs):
        block_bytes *= 2
    digest = hasher(algorithm)

    def hashes_of(spec: PieceSpec) -> str:
        data = read(spec)
        return "".join(digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes))

    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            blocks = "".join(pool.map(hashes_of, specs))
    else:
        blocks = "".join(map(hashes_of, specs))
    about = {"format": "pt", "hash": algorithm, "block_bytes": str(block_bytes), "blocks": blocks}
    table: dict[str, Any] = {"__metadata__": about}
    for spec in specs:
        offsets = [spec.begin, spec.begin + spec.size_bytes]
        table[spec.key] = {"dtype": spec.dtype, "shape": spec.tensor_slice.shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


_REPAIR = "keepstep ckpt verify lists all damage, keepstep ckpt repair fixes it"


class ShardReader:
    """Reads pieces of one data file; every byte it returns has been checked."""

    def __init__(self, store: Store, folder: str, entry: FileEntry, algorithm: Algorithm) -> None:
        self._store = store
        self._name = f"{folder}/{entry.name}"
        self._entry = entry
        self._digest = hasher(algorithm)
        self._block_chars = DIGEST_CHARS[algorithm]
        # A list, not a sum: threads share a reader, and an append cannot lose a count.
        self._reads: list[int] = []
        self._open()

    @property
    def bytes_read(self) -> int:
        """Bytes read from this file so far."""
        return sum(self._reads)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._store.locate(self._name)} {what}", _REPAIR)

    def _unreadable(self, error: OSError) -> CheckpointError:
        return unreadable(error, self._store.locate(self._name), _REPAIR)

    def _open(self) -> None:
        """Check the size and the header, and index the blocks."""
        try:
            size = self._store.size(self._name)
        except FileNotFoundError as error:
            raise self._damaged("is missing") from error
        except OSError as error:
            raise self._unreadable(error) from error
        if size != self._entry.size_bytes:
            raise self._damaged(f"has {size} bytes, its manifest says {self._entry.size_bytes}")
        header = bytearray(min(size, self._entry.header_bytes))
        self._read(0, memoryview(header))
        if self._digest(header) != self._entry.header_hash:
            raise self._damaged("has a damaged header")
        with malformed_as(CheckpointError, f"{self._store.locate(self._name)} has a header that is not ours", _REPAIR):
            table = json.loads(header[8:])
            about = table.pop("__metadata__")
            self.block_bytes = int(about["block_bytes"])
            self._hashes = str(about["blocks"])
            self._spans = sorted((int(begin), int(end)) for begin, end in (p["data_offsets"] for p in table.values()))
            inside = size - self._entry.header_bytes
            if self.block_bytes < 1 or any(not 0 <= begin <= end <= inside for begin, end in self._spans):
                raise ValueError("a piece is outside the file")
        self._first_block: dict[int, int] = {}
        count = 0
        for begin, end in self._spans:
            if end > begin:
                self._first_block[begin] = count
                count += -(-(end - begin) // self.block_bytes)

    def _read(self, offset: int, buffer: memoryview) -> None:
        try:
            read = self._store.read_into(self._name, offset, buffer)
        except OSError as error:
            raise self._unreadable(error) from error
        self._reads.append(read)
        if read != len(buffer):
            raise self._damaged(f"ends after {offset + read} bytes")

    def check_all(self) -> None:
        """Read and check every block."""
        run_bytes = max(self.block_bytes, CHECK_BYTES // self.block_bytes * self.block_bytes)
        buffer = memoryview(bytearray(run_bytes))
        for begin, end in self._spans:
            for first in range(0, end - begin, run_bytes):
                self.read_piece(begin, first, buffer[: min(run_bytes, end - begin - first)])

    def widen(self, first: int, last: int, piece_bytes: int) -> tuple[int, int]:
        """The smallest run of whole blocks that contains bytes [first, last) of a piece."""
        start = first // self.block_bytes * self.block_bytes
        return start, min(-(-last // self.block_bytes) * self.block_bytes, piece_bytes)

    def read_piece(self, begin: int, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `first` on of the piece at `begin`; both ends are block boundaries."""
        if not len(buffer):
            return
        if begin not in self._first_block:
            raise self._damaged(f"has no piece at byte {begin}")
        self._read(self._entry.header_bytes + begin + first, buffer)
        block = self._first_block[begin] + first // self.block_bytes
        chars = self._block_chars
        for start in range(0, len(buffer), self.block_bytes):
            expected = self._hashes[block * chars : (block + 1) * chars]
            if self._digest(buffer[start : start + self.block_bytes]) != expected:
                at = self._entry.header_bytes + begin + first + start
                raise self._damaged(
                    f"is damaged between bytes {at} and {at + len(buffer[start : start + self.block_bytes])}"
                )
            block += 1
