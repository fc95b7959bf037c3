"""Reading other systems' checkpoints without trusting them: DCP folders (torchtitan, Composer's sharded), safetensors.

DCP describes its files in a pickle, and a pickle can run code. It is read here by an unpickler that knows a dozen names
and replaces each by something inert; any other name is an error. Tensors inside are read with weights_only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.boxes import Box, coverage_problem
from keepstep.checkpoint.layout import DTYPE_NAMES
from keepstep.checkpoint.manifest import safe_name
from keepstep.checkpoint.offline import Content
from keepstep.core.errors import CheckpointError

DCP_METADATA = ".metadata"


class _Record:
    """Stands in for every class of DCP's metadata: attributes, no behaviour."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _TensorRecord(_Record):
    pass


class _BytesRecord(_Record):
    pass


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
    (_METADATA_MODULE, "Metadata"): _Record,
    (_METADATA_MODULE, "TensorStorageMetadata"): _TensorRecord,
    (_METADATA_MODULE, "BytesStorageMetadata"): _BytesRecord,
    (_METADATA_MODULE, "ChunkStorageMetadata"): _Record,
    (_METADATA_MODULE, "TensorProperties"): _Record,
    (_METADATA_MODULE, "MetadataIndex"): _Record,
    (_METADATA_MODULE, "StorageMeta"): _Record,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): lambda value: value,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Record,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(parts),
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


class _AllowListUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise CheckpointError(
                f"{self._where} wants to use {module}.{name}, which no DCP checkpoint needs: it is not read",
                "treat this file as hostile",
            ) from None

    def persistent_load(self, identifier: Any) -> Any:
        raise CheckpointError(f"{self._where} refers to {identifier!r} outside itself: it is not read")


def read_dcp_metadata(folder: Path) -> Any:
    """DCP's `.metadata` as inert records."""
    path = folder / DCP_METADATA
    try:
        return _AllowListUnpickler(path.read_bytes(), str(path)).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: {folder} is not a DCP checkpoint") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{path} is damaged: {error!r}") from error


def read_dcp(folder: Path, step: int = 0) -> Content:
    """A DCP checkpoint, whole: its tensors by name, and its plain values where they are plain."""
    metadata = read_dcp_metadata(folder)
    try:
        # A field at its default is left out of the pickle.
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, _TensorRecord):
                tensors[name] = _dcp_tensor(folder, name, entry, places)
            else:
                values[name] = _plain(_dcp_item(folder, name, places[name, ()]))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: its metadata and its files do not fit together: {error!r}") from error
    return Content(step, tensors, {"dcp": values} if values else {}, {"source": "dcp"}, {})


def _dcp_tensor(folder: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> torch.Tensor:
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    problem = coverage_problem(entry.size, boxes)
    if problem:
        raise CheckpointError(f"{folder}: tensor {name} is not whole: {problem}")
    target: torch.Tensor | None = None
    for box in boxes:
        part = _dcp_item(folder, name, places[name, box.offset])
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != box.shape:
            raise CheckpointError(f"{folder}: the part of {name} at {list(box.offset)} is not what its metadata says")
        if target is None:
            target = torch.empty(entry.size, dtype=part.dtype)
        target[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))] = part
    return target if target is not None else torch.empty(entry.size)


def _dcp_item(folder: Path, name: str, info: Any) -> Any:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{folder}: {name} is stored compressed, which is not read")
    path = folder / _own_file(info)
    with path.open("rb") as file:
        file.seek(info.offset)
        content = file.read(info.length)
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises depends on the bytes
        raise CheckpointError(f"{path}: {name} cannot be read as plain tensors: {str(error)[:200]}") from error


def _own_file(info: Any) -> str:
    """DCP's names start with underscores; otherwise they are held to the same rule as ours."""
    name = str(info.relative_path)
    safe_name(name.lstrip("_") or name)
    return name


def _plain(value: Any) -> Any:
    """A value that JSON can hold, or a word in its place: foreign checkpoints carry all kinds of objects."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return f"<{type(value).__name__}>"


def read_safetensors(path: Path, step: int = 0) -> Content:
    """One safetensors file, or a folder of them as Hugging Face writes it; names get the prefix `model.`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            for name, tensor in load_file(file).items():
                tensors[f"model.{name}"] = tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not tensors:
        raise CheckpointError(f"{path} holds no safetensors file")
    return Content(step, tensors, {}, {"source": "safetensors"}, {})
