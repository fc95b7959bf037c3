"""What a committed step says about itself: every file with its hashes, every tensor with a proof that it is all there.

A step folder holds data files, one manifest and the marker `_SUCCESS`. The marker is written last, names the manifest
and carries its hash; the manifest names every data file and carries the hash of its header; a header carries the
hashes of its blocks. So one small file vouches for every byte, and a step without it does not exist. All of it is JSON,
checked field by field: nothing in it can run code or point outside the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint.boxes import Box, coverage_problem
from keepstep.checkpoint.hashing import Algorithm, hasher
from keepstep.core.errors import CheckpointError

FORMAT = "keepstep-checkpoint"
VERSION = 1
MARKER = "_SUCCESS"
LATEST = "latest"

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Element types by their safetensors names, and their sizes."""

_STEP_FOLDER = re.compile(r"^step_(\d{8,})(?:\.(\d+))?$")
_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True)
class Piece:
    """One box of one tensor, and where its bytes lie."""

    box: Box
    file: int
    begin: int
    """First byte, counted from the end of the file's header."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor and the pieces that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    """One data file: enough to tell whether it is the one that was written."""

    name: str
    size_bytes: int
    header_bytes: int
    header_hash: str


@dataclass(frozen=True)
class Manifest:
    """All that a step is."""

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
    parity: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Marker:
    """`_SUCCESS`: this step is whole, and here is the hash of its manifest."""

    step: int
    sequence: int
    time: float
    world_size: int
    algorithm: Algorithm
    manifest: str
    manifest_hash: str
    data_bytes: int


@dataclass(frozen=True)
class StepFolder:
    """A committed step: its folder's name inside the store, and its marker."""

    name: str
    marker: Marker

    @property
    def step(self) -> int:
        """The training step it holds."""
        return self.marker.step


def folder_name(step: int, attempt: int = 0) -> str:
    """`step_00000100`; a step trained again after going back gets `.1`, since folders are never written twice."""
    return f"step_{step:08d}" + (f".{attempt}" if attempt else "")


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a step folder's name, or None for anything else."""
    match = _STEP_FOLDER.match(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def safe_name(name: Any) -> str:
    """`name` if it is a plain file name; an error for anything that could leave the folder."""
    if not isinstance(name, str) or not _FILE_NAME.match(name):
        raise CheckpointError(f"a checkpoint names the file {name!r}, which is not a plain file name inside its folder")
    return name


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "step": manifest.step,
            "sequence": manifest.sequence,
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
                    "pieces": [[p.box.offset, p.box.shape, p.file, p.begin] for p in tensor.pieces],
                }
                for name, tensor in manifest.tensors.items()
            },
        },
        separators=(",", ":"),
    ).encode()


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Read and check a manifest; `where` names it in errors."""
    try:
        raw = json.loads(content)
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise CheckpointError(
                f"{where} is {raw['format']} version {raw['version']}, this keepstep reads {FORMAT} version {VERSION}",
                "upgrade keepstep",
            )
        manifest = Manifest(
            step=int(raw["step"]),
            sequence=int(raw["sequence"]),
            time=float(raw["time"]),
            world_size=int(raw["world_size"]),
            algorithm=raw["hash"],
            files=tuple(FileEntry(safe_name(f[0]), int(f[1]), int(f[2]), str(f[3])) for f in raw["files"]),
            tensors={name: _decode_tensor(tensor) for name, tensor in raw["tensors"].items()},
            values=raw["values"],
            rank_values={int(rank): values for rank, values in raw["rank_values"].items()},
            metadata=raw["metadata"],
            parity=tuple(raw["parity"]),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a manifest: {error!r}") from error
    check_coverage(manifest, where)
    return manifest


def _decode_tensor(raw: Any) -> TensorEntry:
    if raw["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype {raw['dtype']}")
    pieces = tuple(
        Piece(Box(tuple(map(int, offset)), tuple(map(int, shape))), int(file), int(begin))
        for offset, shape, file, begin in raw["pieces"]
    )
    return TensorEntry(raw["dtype"], tuple(map(int, raw["shape"])), pieces)


def check_coverage(manifest: Manifest, where: str) -> None:
    """Prove that every tensor is covered, once, by bytes that lie inside a named file."""
    for name, tensor in manifest.tensors.items():
        problem = coverage_problem(tensor.shape, [piece.box for piece in tensor.pieces])
        if problem:
            raise CheckpointError(f"{where}: tensor {name} is not whole: {problem}")
        for piece in tensor.pieces:
            if not 0 <= piece.file < len(manifest.files):
                raise CheckpointError(f"{where}: tensor {name} lies in file number {piece.file}, which is not listed")
            file = manifest.files[piece.file]
            end = file.header_bytes + piece.begin + piece.box.count * ITEM_BYTES[tensor.dtype]
            if piece.begin < 0 or end > file.size_bytes:
                raise CheckpointError(f"{where}: tensor {name} reaches past the end of {file.name}")


def encode_marker(marker: Marker) -> bytes:
    """The marker as JSON with a hash of itself."""
    body = {**marker.__dict__, "format": FORMAT, "version": VERSION}
    check = hasher(marker.algorithm)(json.dumps(body, sort_keys=True).encode())
    return (json.dumps({**body, "check": check}, indent=1, sort_keys=True) + "\n").encode()


def decode_marker(content: bytes, where: str) -> Marker:
    """Read and check a marker; `where` names it in errors."""
    try:
        body = json.loads(content)
        check = body.pop("check")
        algorithm = body["algorithm"]
        if hasher(algorithm)(json.dumps(body, sort_keys=True).encode()) != check:
            raise CheckpointError(f"{where} is damaged: it does not match its own hash")
        if body.pop("format") != FORMAT or body.pop("version") != VERSION:
            raise CheckpointError(f"{where} was written in a format this keepstep does not read", "upgrade keepstep")
        marker = Marker(**body)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error!r}") from error
    safe_name(marker.manifest)
    return marker
