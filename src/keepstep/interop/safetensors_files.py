"""Reading and writing safetensors: one file, or shards with an index as Hugging Face lays them out."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.checkpoint.offline import Content, Kind, Tensors
from keepstep.checkpoint.protocol.layout import DTYPE_NAMES, DTYPES
from keepstep.checkpoint.protocol.restore import bytes_of
from keepstep.checkpoint.protocol.shards import lay_out
from keepstep.checkpoint.protocol.tensor_slice import whole
from keepstep.checkpoint.storage.store import write_durable
from keepstep.core.errors import CheckpointError, malformed_as
from keepstep.core.files import sync_folder, write_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""Largest file of a sharded export; Hugging Face's own tools use the same limit."""


def read_safetensors(path: Path, step: int = 0) -> Content:
    """One safetensors file, or every one in a folder. Tensors get the prefix `model.` and are read on demand."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    kinds: dict[str, Kind] = {}
    places: dict[str, Path] = {}
    for file in files:
        found = _read_kinds(file)
        kinds.update({f"model.{name}": kind for name, kind in found.items()})
        places.update({f"model.{name}": file for name in found})
    if not kinds:
        raise CheckpointError(f"{path} holds no safetensors file", "give a folder with *.safetensors")
    tensors = Tensors(kinds, lambda name: _read_tensor(places[name], name.removeprefix("model.")))
    return Content(step, tensors, {}, {"source": "safetensors"}, {})


def open_hf_tensors(folder: Path) -> Tensors:
    """The tensors that a Hugging Face folder's index names, or those of its single file; read on demand."""
    places = _weight_map(folder)
    kinds = {file: _read_kinds(folder / file) for file in sorted(set(places.values()))}
    missing = next((name for name, file in places.items() if name not in kinds[file]), None)
    if missing is not None:
        raise CheckpointError(f"{folder / places[missing]} lacks {missing}", "download the folder again")
    found = {name: kinds[file][name] for name, file in places.items()}
    return Tensors(found, lambda name: _read_tensor(folder / places[name], name))


def common_dtype(tensors: Tensors) -> torch.dtype:
    """The precision of all weights; fp32, which holds every other, where they differ."""
    dtypes = {dtype for name, (dtype, _) in tensors.kinds.items() if name.endswith("weight")}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _read_kinds(file: Path) -> dict[str, Kind]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (DTYPES[part.get_dtype()], tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged: {error}", "download the file again") from error


def _read_tensor(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name → file name."""
    if (folder / INDEX).is_file():
        with malformed_as(CheckpointError, f"{folder / INDEX} is no index", "download the file again"):
            index: dict[str, Any] = dict(json.loads((folder / INDEX).read_bytes())["weight_map"])
        outside = [file for file in index.values() if not isinstance(file, str) or Path(file).name != file]
        if outside:
            raise CheckpointError(
                f"{folder / INDEX} names {outside[0]!r}, which is no file of its folder", "treat this file as hostile"
            )
        missing = sorted({file for file in index.values() if not (folder / file).is_file()})
        if missing:
            raise CheckpointError(f"{folder} lacks {missing[0]}, which its index names", "download the folder again")
        return index
    if not (folder / SINGLE).is_file():
        hint = "weights must be safetensors: save_pretrained writes them"
        if any(folder.glob("model-*-of-*.safetensors")):
            hint = f"its files are parts that {INDEX} names: download the folder again"
        raise CheckpointError(f"{folder} holds neither {INDEX} nor {SINGLE}", hint)
    return dict.fromkeys(_read_kinds(folder / SINGLE), SINGLE)


_SAMPLES, _SAMPLE_BYTES = 16, 256


def fingerprint(folder: Path) -> str:
    """A hash that identifies a folder's weights by names, shapes and evenly spread bytes of every tensor.

    A hash of all bytes would read hundreds of gigabytes at every start. How the tensors are split into files does not
    change the result.
    """
    found: dict[str, str] = {}
    for file in sorted(set(_weight_map(folder).values())):
        _read_kinds(folder / file)  # an error for a damaged header
        with (folder / file).open("rb") as data:
            size = int.from_bytes(data.read(8), "little")
            header = json.loads(data.read(size))
            for name, described in header.items():
                if name == "__metadata__":
                    continue
                start, end = described["data_offsets"]
                digest = hashlib.sha256(f"{described['dtype']} {described['shape']}".encode())
                for sample in range(_SAMPLES):
                    at = start + max(0, end - start - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
                    data.seek(8 + size + at)
                    digest.update(data.read(min(_SAMPLE_BYTES, end - at)))
                found[name] = digest.hexdigest()
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file with the permissions of any new file; the library lets only its owner read it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    permissions = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # also for a full or failing disk
        raise CheckpointError(f"{path} cannot be written: {error}", "check the disk and its free space") from error
    path.chmod(permissions)


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, largest_bytes: int = SHARD_BYTES) -> int:
    """Write files of at most `largest_bytes`, with an index where there are several; returns the total bytes."""
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total = 0

    def flush() -> None:
        write_file(pending, folder / f"part-{len(parts):05d}.safetensors")
        parts.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > largest_bytes:
            flush()
            pending_bytes = 0
        # A copy: safetensors refuses tensors that share memory.
        pending[name] = tensor.clone()
        pending_bytes += size
        total += size
    flush()
    weight_map = {}
    for number, names in enumerate(parts):
        name = SINGLE if len(parts) == 1 else f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number:05d}.safetensors").replace(folder / name)
        weight_map.update(dict.fromkeys(names, name))
    if len(parts) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def write_safetensors(tensors: Tensors, folder: Path) -> str:
    """The weights under our own names in one file, one tensor in memory at a time; returns the file's path."""
    weights = {name: kind for name, kind in tensors.kinds.items() if name.startswith("model.")}
    if not weights:
        raise CheckpointError("this checkpoint holds no weights (no tensor below `model`)", "give another step")
    path = folder / SINGLE
    if path.exists():
        raise CheckpointError(f"{path} exists already", "choose another folder: nothing is overwritten")
    specs, _ = lay_out([(name, DTYPE_NAMES[dtype], shape, whole(shape)) for name, (dtype, shape) in weights.items()])
    table: Mapping[str, Any] = {"__metadata__": {"format": "pt"}} | {
        spec.tensor.removeprefix("model."): {
            "dtype": spec.dtype,
            "shape": spec.tensor_shape,
            "data_offsets": [spec.begin, spec.begin + spec.size_bytes],
        }
        for spec in specs
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    header = text.ljust(-(-len(text) // 8) * 8)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(struct.pack("<Q", len(header)) + header)
        for spec in specs:
            yield bytes_of(tensors[spec.tensor].contiguous())

    folder.mkdir(parents=True, exist_ok=True)
    # The file gets its name only when it is complete; an interrupted write leaves nothing.
    unfinished = folder / f".{path.name}.unfinished"
    unfinished.unlink(missing_ok=True)
    try:
        write_durable(unfinished, pieces())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(folder)
    return str(path)
