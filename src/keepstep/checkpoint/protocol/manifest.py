"""The manifest and the marker of a committed step: every file with its hashes, every tensor with its pieces.

A step folder holds data files, one manifest and the marker `_SUCCESS`. The marker is written last. It names the
manifest and carries its hash; the manifest names every data file and carries the hash of its header; a header carries
the hashes of its blocks. So one small file vouches for every byte, and a step without it does not exist. Both are JSON
and are checked field by field: nothing in them can run code or point outside the folder.

Hashes protect against accidents, not attackers: every byte of every save is hashed, and XXH3 (64 bits) reaches 9 GB/s a
core where SHA-256 reaches 1.4 GB/s. The algorithm's name is stored with the hashes, so any checkpoint can be checked.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keepstep.checkpoint.protocol.tensor_slice import TensorSlice, coverage_problem
from keepstep.core.errors import CheckpointError, malformed_as

OLDER_STEP = "resume from an older step: keepstep ckpt ls RUN lists them"
FORMAT = "keepstep-checkpoint"
VERSION = 1
LATEST = "latest"

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the dtype's name in safetensors."""

_Digest = Callable[[bytes | bytearray | memoryview], str]

try:
    import xxhash

    _xxh3: _Digest | None = xxhash.xxh3_64_hexdigest
except ImportError:
    # A GPU machine may have little more than PyTorch.
    _xxh3 = None

Algorithm = Literal["xxh3_64", "crc32"]
BEST_ALGORITHM: Algorithm = "crc32" if _xxh3 is None else "xxh3_64"
"""For new checkpoints. Every byte of every save is hashed, and XXH3 is the fastest; its name is stored with it."""
DIGEST_CHARS: dict[Algorithm, int] = {"xxh3_64": 16, "crc32": 8}
"""Hexadecimal characters of one hash."""

_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


def hasher(algorithm: str) -> _Digest:
    """The hash function for a stored algorithm name."""
    if algorithm == "crc32":
        return lambda data: f"{zlib.crc32(data):08x}"
    if algorithm == "xxh3_64":
        if _xxh3 is None:
            raise CheckpointError(
                "this checkpoint is hashed with xxh3_64, and xxhash is not installed", "pip install xxhash"
            )
        return _xxh3
    raise CheckpointError(f"unknown hash algorithm {algorithm!r}", "a newer keepstep may have written this checkpoint")


@dataclass(frozen=True)
class Piece:
    """One slice of one tensor, and where its bytes are: `begin` counts from the end of the file's header."""

    tensor_slice: TensorSlice
    file: int
    begin: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    """One data file: its name, sizes and the hash of its header."""

    name: str
    size_bytes: int
    header_bytes: int
    header_hash: str


@dataclass(frozen=True)
class Manifest:
    """The full description of a step."""

    step: int
    sequence: int
    time: float
    world_size: int
    algorithm: Algorithm
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Any]
    rank_values: Mapping[int, Any]
    metadata: Mapping[str, Any]
    parity: tuple[Mapping[str, Any], ...] = ()
    fence: int = 0
    """The number of the lease under which it was committed; 0 without a lease (see protocol/lease.py)."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Marker:
    """`_SUCCESS`: the step is complete, and this is the hash of its manifest."""

    step: int
    sequence: int
    time: float
    world_size: int
    algorithm: Algorithm
    manifest: str
    manifest_hash: str
    data_bytes: int


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed step: its folder's name inside the store, and its marker."""

    name: str
    marker: Marker

    @property
    def step(self) -> int:
        """The training step it holds."""
        return self.marker.step


def safe_name(name: Any) -> str:
    """`name` if it is a plain file name; raises for anything that could point outside the folder."""
    if not isinstance(name, str) or not _FILE_NAME.match(name):
        raise CheckpointError(f"a checkpoint names the file {name!r}, which is not a plain file name")
    return name


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "step": manifest.step,
            "sequence": manifest.sequence,
            "fence": manifest.fence,
            "time": manifest.time,
            "world_size": manifest.world_size,
            "hash": manifest.algorithm,
            "metadata": dict(manifest.metadata),
            "values": dict(manifest.values),
            "rank_values": {str(rank): values for rank, values in manifest.rank_values.items()},
            "files": [[file.name, file.size_bytes, file.header_bytes, file.header_hash] for file in manifest.files],
            "parity": [dict(group) for group in manifest.parity],
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "pieces": [[p.tensor_slice.offset, p.tensor_slice.shape, p.file, p.begin] for p in tensor.pieces],
                }
                for name, tensor in manifest.tensors.items()
            },
        },
        separators=(",", ":"),
    ).encode()


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Read and check a manifest; `where` names it in errors."""
    with malformed_as(CheckpointError, f"{where} is not a manifest"):
        raw = json.loads(content)
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise CheckpointError(
                f"{where} is {raw['format']} version {raw['version']}, this keepstep reads {FORMAT} version {VERSION}",
                "upgrade keepstep",
            )
        manifest = Manifest(
            step=_count(raw["step"]),
            sequence=_count(raw["sequence"]),
            time=_time(raw["time"]),
            world_size=_count(raw["world_size"]),
            algorithm=raw["hash"],
            files=tuple(FileEntry(safe_name(f[0]), _count(f[1]), _count(f[2]), str(f[3])) for f in raw["files"]),
            tensors={name: _decode_tensor(tensor) for name, tensor in raw["tensors"].items()},
            values=dict(raw["values"]),
            rank_values={int(rank): values for rank, values in raw["rank_values"].items()},
            metadata=dict(raw["metadata"]),
            parity=tuple(map(_decode_parity, raw["parity"])),
            fence=_count(raw.get("fence", 0)),
        )
    check_coverage(manifest, where)
    return manifest


def _decode_tensor(raw: Any) -> TensorEntry:
    if raw["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype {raw['dtype']}")
    pieces = tuple(
        Piece(TensorSlice(tuple(map(_count, offset)), tuple(map(_count, shape))), _count(file), _count(begin))
        for offset, shape, file, begin in raw["pieces"]
    )
    return TensorEntry(raw["dtype"], tuple(map(_count, raw["shape"])), pieces)


def _decode_parity(raw: Any) -> Mapping[str, Any]:
    files, hashes = [*map(_count, raw["files"])], [*map(str, raw["hashes"])]
    return {"name": safe_name(raw["name"]), "bytes": _count(raw["bytes"]), "files": files, "hashes": hashes}


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _time(value: Any) -> float:
    _count(int(value))  # neither NaN nor infinite
    return float(value)


def check_coverage(manifest: Manifest, where: str) -> None:
    """Prove that every element of every tensor is covered exactly once, by bytes inside a listed file."""
    for name, tensor in manifest.tensors.items():
        problem = coverage_problem(tensor.shape, [piece.tensor_slice for piece in tensor.pieces])
        if problem:
            raise CheckpointError(f"{where}: tensor {name} is incomplete: {problem}")
        for piece in tensor.pieces:
            if not 0 <= piece.file < len(manifest.files):
                raise CheckpointError(f"{where}: tensor {name} is in file number {piece.file}, which is not listed")
            file = manifest.files[piece.file]
            end = file.header_bytes + piece.begin + piece.tensor_slice.count * ITEM_BYTES[tensor.dtype]
            if piece.begin < 0 or end > file.size_bytes:
                raise CheckpointError(f"{where}: tensor {name} reaches past the end of {file.name}")


def encode_marker(marker: Marker) -> bytes:
    """The marker as JSON with a hash of itself."""
    body = {**marker.__dict__, "format": FORMAT, "version": VERSION}
    check = hasher(marker.algorithm)(json.dumps(body, sort_keys=True).encode())
    return (json.dumps({**body, "check": check}, indent=1, sort_keys=True) + "\n").encode()


def decode_marker(content: bytes, where: str) -> Marker:
    """Read and check a marker; `where` names it in errors."""
    with malformed_as(CheckpointError, f"{where} is damaged"):
        body = json.loads(content)
        check = body.pop("check")
        algorithm = body["algorithm"]
        if hasher(algorithm)(json.dumps(body, sort_keys=True).encode()) != check:
            raise CheckpointError(f"{where} is damaged: it does not match its own hash", OLDER_STEP)
        if body.pop("format") != FORMAT or body.pop("version") != VERSION:
            raise CheckpointError(f"{where} has a format that this keepstep does not read", "upgrade keepstep")
        counts = {name: _count(body[name]) for name in ("step", "sequence", "world_size", "data_bytes")}
        marker = Marker(**{**body, **counts, "time": _time(body["time"])})
    safe_name(marker.manifest)
    return marker
