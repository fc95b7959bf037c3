"""Data files: one a rank, each a valid safetensors file whose header also holds the hash of every block.

Layout: 8 bytes of header length, the JSON header padded with spaces to a page, then the pieces back to back, widest
elements first so that each is aligned. Hashes are taken from the source buffer before a byte is written, block by block
within each piece, so that a reader can check exactly the part it needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.boxes import Box, whole
from keepstep.checkpoint.hashing import DIGEST_CHARS, Algorithm, block_hashes, hasher
from keepstep.checkpoint.manifest import ITEM_BYTES, FileEntry
from keepstep.checkpoint.store import Store, unreadable
from keepstep.core.errors import CheckpointError

PAGE_BYTES = 4096
SMALLEST_BLOCK_BYTES = 64 * 1024
MOST_BLOCKS = 65536
CHECK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class PieceSpec:
    """One box of one tensor that a rank writes, and its place in the rank's buffer."""

    tensor: str
    dtype: str
    tensor_shape: tuple[int, ...]
    box: Box
    begin: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece."""
        return self.box.count * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """Its name inside the safetensors file."""
        if self.box == whole(self.tensor_shape):
            return self.tensor
        return f"{self.tensor}@[{','.join(map(str, self.box.offset))}]"

    def to_json(self) -> list[Any]:
        """For the part file and the writer's pipe."""
        return [self.tensor, self.dtype, self.tensor_shape, self.box.offset, self.box.shape, self.begin]

    @staticmethod
    def from_json(raw: Sequence[Any]) -> PieceSpec:
        """The way back."""
        tensor, dtype, tensor_shape, offset, shape, begin = raw
        return PieceSpec(tensor, dtype, tuple(tensor_shape), Box(tuple(offset), tuple(shape)), begin)


def lay_out(pieces: Sequence[tuple[str, str, tuple[int, ...], Box]]) -> tuple[list[PieceSpec], int]:
    """Give each (tensor, dtype, tensor shape, box) its place; returns them with the bytes they need."""
    ordered = sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece[1]], piece[0], piece[3]))
    specs, begin = [], 0
    for tensor, dtype, shape, box in ordered:
        specs.append(PieceSpec(tensor, dtype, shape, box, begin))
        begin += specs[-1].size_bytes
    return specs, begin


def block_size(total_bytes: int) -> int:
    """Bytes of a hashed block: small, so that a part can be checked alone, yet at most 65,536 hashes a file."""
    size = SMALLEST_BLOCK_BYTES
    while size * MOST_BLOCKS < total_bytes:
        size *= 2
    return size


def shard_header(specs: Sequence[PieceSpec], data: memoryview, algorithm: Algorithm, threads: int = 1) -> bytes:
    """Hash the source buffer and make the header that, followed by `data`, is a data file."""
    block_bytes = block_size(len(data))

    def hashes_of(spec: PieceSpec) -> list[str]:
        return block_hashes(algorithm, data[spec.begin : spec.begin + spec.size_bytes], block_bytes)

    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            blocks = "".join("".join(hashes) for hashes in pool.map(hashes_of, specs))
    else:
        blocks = "".join("".join(hashes_of(spec)) for spec in specs)
    return encode_header(specs, block_bytes, algorithm, blocks)


def encode_header(specs: Sequence[PieceSpec], block_bytes: int, algorithm: Algorithm, blocks: str) -> bytes:
    """The safetensors header, padded to a page."""
    table: dict[str, Any] = {
        "__metadata__": {"format": "pt", "hash": algorithm, "block_bytes": str(block_bytes), "blocks": blocks}
    }
    for spec in specs:
        table[spec.key] = {
            "dtype": spec.dtype,
            "shape": spec.box.shape,
            "data_offsets": [spec.begin, spec.begin + spec.size_bytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


_REPAIR = "keepstep ckpt verify lists all damage, keepstep ckpt repair mends it"


class ShardReader:
    """Reads pieces of one data file and lets no unchecked byte through."""

    def __init__(self, store: Store, folder: str, entry: FileEntry, algorithm: Algorithm) -> None:
        self._store = store
        self._name = f"{folder}/{entry.name}"
        self._entry = entry
        self._digest = hasher(algorithm)
        self._block_chars = DIGEST_CHARS[algorithm]
        # Appended to, not added up: threads share a reader, and an append cannot lose a count.
        self._reads: list[int] = []
        self._open()

    @property
    def bytes_read(self) -> int:
        """What was read of this file so far."""
        return sum(self._reads)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._store.locate(self._name)} {what}", _REPAIR)

    def _unreadable(self, error: OSError) -> CheckpointError:
        return unreadable(error, self._store.locate(self._name), _REPAIR)

    def _open(self) -> None:
        """Check size and header, and index the blocks."""
        try:
            size = self._store.size(self._name)
        except FileNotFoundError as error:
            raise self._damaged("is missing") from error
        except OSError as error:
            raise self._unreadable(error) from error
        if size != self._entry.size_bytes:
            raise self._damaged(f"has {size} bytes, its manifest says {self._entry.size_bytes}")
        header = bytearray(self._entry.header_bytes)
        self._read(0, memoryview(header))
        if self._digest(header) != self._entry.header_hash:
            raise self._damaged("has a damaged header")
        table = json.loads(header[8:])
        about = table.pop("__metadata__")
        self.block_bytes = int(about["block_bytes"])
        self._hashes: str = about["blocks"]
        self._first_block: dict[int, int] = {}
        self._spans = sorted(tuple(piece["data_offsets"]) for piece in table.values())
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
        """Read every block once and check it."""
        run_bytes = max(self.block_bytes, CHECK_BYTES // self.block_bytes * self.block_bytes)
        buffer = memoryview(bytearray(run_bytes))
        for begin, end in self._spans:
            for first in range(0, end - begin, run_bytes):
                self.read_piece(begin, first, buffer[: min(run_bytes, end - begin - first)])

    def widen(self, first: int, last: int, piece_bytes: int) -> tuple[int, int]:
        """The smallest run of whole blocks around bytes [first, last) of a piece."""
        start = first // self.block_bytes * self.block_bytes
        return start, min(-(-last // self.block_bytes) * self.block_bytes, piece_bytes)

    def read_piece(self, begin: int, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `first` of the piece at `begin`; both ends must be block boundaries."""
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
