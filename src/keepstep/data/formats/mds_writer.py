"""Write MDS shards of tokens as mosaicml-streaming reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.files import sync_file, write_atomic
from keepstep.data.formats.mds_reader import INDEX, SHAPE_TYPES

SIZE_LIMIT = 1 << 26


class TokenShardWriter:
    """Writes samples of one `tokens` column into shards; the caller collects `entries` and writes the index."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], column: str = "tokens") -> None:
        self._folder = folder
        self._name = name
        self._dtype = dtype.newbyteorder("<")
        self._config = {
            "column_encodings": [f"ndarray:{dtype.name}"],
            "column_names": [column],
            "column_sizes": [None],
            "compression": None,
            "format": "mds",
            "hashes": ["sha256"],
            "size_limit": SIZE_LIMIT,
            "version": 2,
        }
        self._config_bytes = json.dumps(self._config, sort_keys=True).encode()
        self._parts: list[bytes | memoryview] = []
        self._sizes: list[NDArray[np.int64]] = []
        self._bytes = 8 + len(self._config_bytes)
        self.entries: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add_rows(self, rows: NDArray[Any]) -> None:
        """Append samples of equal length, the rows of a two-dimensional array."""
        header = _array_header(rows.shape[1])
        size = 4 + len(header) + rows.shape[1] * self._dtype.itemsize
        done = 0
        while done < len(rows):
            room = max(1 if not self._sizes else 0, (SIZE_LIMIT - self._bytes) // (size + 4))
            if room == 0:
                self.flush()
                continue
            here = rows[done : done + room]
            block = np.empty((len(here), size), dtype=np.uint8)
            block[:, :4] = np.frombuffer(np.uint32(size - 4).tobytes(), np.uint8)
            block[:, 4 : 4 + len(header)] = np.frombuffer(header, np.uint8)
            block[:, 4 + len(header) :] = np.ascontiguousarray(here, dtype=self._dtype).view(np.uint8)
            self._append(block.reshape(-1).data, np.full(len(here), size, dtype=np.int64))
            done += len(here)

    def add(self, tokens: NDArray[Any]) -> None:
        """Append one sample of at least one token: the format cannot hold an empty one."""
        body = _array_header(len(tokens)) + np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        sample = np.uint32(len(body)).tobytes() + body
        if self._sizes and self._bytes + len(sample) + 4 > SIZE_LIMIT:
            self.flush()
        self._append(sample, np.array([len(sample)], dtype=np.int64))

    def _append(self, raw: bytes | memoryview, sizes: NDArray[np.int64]) -> None:
        self._parts.append(raw)
        self._sizes.append(sizes)
        self._bytes += len(raw) + 4 * len(sizes)

    def flush(self) -> None:
        """Write the shard that is being filled, if any."""
        if not self._sizes:
            return
        sizes = np.concatenate(self._sizes)
        base = 4 + 4 * (len(sizes) + 1) + len(self._config_bytes)
        offsets = np.concatenate([[0], np.cumsum(sizes)]) + base
        basename = f"{self._name}.{len(self.entries):05d}.mds"
        digest = hashlib.sha256()
        with (self._folder / basename).open("wb") as file:
            head = np.uint32(len(sizes)).tobytes(), offsets.astype("<u4").tobytes(), self._config_bytes
            for part in (*head, *self._parts):
                digest.update(part)
                file.write(part)
        sync_file(self._folder / basename)
        raw_data = {"basename": basename, "bytes": int(offsets[-1]), "hashes": {"sha256": digest.hexdigest()}}
        self.entries.append({**self._config, "raw_data": raw_data, "samples": len(sizes), "zip_data": None})
        self._parts, self._sizes, self._bytes = [], [], 8 + len(self._config_bytes)


def _array_header(length: int) -> bytes:
    """Rank and shape of a one-dimensional array, in the smallest type that holds the length."""
    code = next(code for code, dtype in enumerate(SHAPE_TYPES) if length < 1 << 8 * dtype.itemsize)
    return bytes([(1 << 2) | code]) + np.array([length], SHAPE_TYPES[code]).tobytes()


def write_index(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write index.json, which turns a folder of shards into a data set."""
    write_atomic(folder / INDEX, json.dumps({"shards": list(entries), "version": 2}, sort_keys=True))
