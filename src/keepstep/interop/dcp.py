"""DCP folders (torchtitan, Composer, Megatron): read without trusting them, and written.

DCP describes its files in a pickle, and a pickle can run code. The unpickler here knows a dozen names and replaces each
by an inert record; any other name is an error. Tensors inside are read with weights_only.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.offline import Content, Tensors
from keepstep.checkpoint.protocol.layout import DTYPE_NAMES
from keepstep.checkpoint.protocol.manifest import safe_name
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice, coverage_problem, whole
from keepstep.core.errors import CheckpointError, malformed_as

DCP_METADATA = ".metadata"
_COPY_AGAIN = "copy the folder again from where it was written"
_HOSTILE = "copy it again from where it was written; if that does not help, treat this file as hostile"


class InertRecord:
    """Replaces a class of a foreign checkpoint: attributes, no behaviour."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _TensorRecord(InertRecord):
    pass


class _PropertiesRecord(InertRecord):
    """TensorProperties pickles itself as a tuple that starts with the type."""

    dtype: torch.dtype = torch.float32

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_PLANNER_MODULE = "torch.distributed.checkpoint.planner"
_ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
    (_METADATA_MODULE, "Metadata"): InertRecord,
    (_METADATA_MODULE, "TensorStorageMetadata"): _TensorRecord,
    (_METADATA_MODULE, "BytesStorageMetadata"): InertRecord,
    (_METADATA_MODULE, "ChunkStorageMetadata"): InertRecord,
    (_METADATA_MODULE, "TensorProperties"): _PropertiesRecord,
    (_METADATA_MODULE, "MetadataIndex"): InertRecord,
    (_METADATA_MODULE, "StorageMeta"): InertRecord,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): lambda value: value,
    # Megatron stores the save plans of all ranks as well.
    (_PLANNER_MODULE, "SavePlan"): InertRecord,
    (_PLANNER_MODULE, "WriteItem"): InertRecord,
    (_PLANNER_MODULE, "WriteItemType"): InertRecord,
    (_PLANNER_MODULE, "TensorWriteData"): InertRecord,
    (_PLANNER_MODULE, "BytesIOWriteData"): InertRecord,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): InertRecord,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): InertRecord,
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
                _HOSTILE,
            ) from None

    def persistent_load(self, identifier: Any) -> Any:
        raise CheckpointError(f"{self._where} refers to {identifier!r} outside itself: it is not read", _HOSTILE)


def _read_metadata(folder: Path) -> Any:
    """DCP's `.metadata` as inert records."""
    path = folder / DCP_METADATA
    try:
        return _AllowListUnpickler(path.read_bytes(), str(path)).load()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: {folder} is not a DCP checkpoint", "give the folder with .metadata"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{path} is damaged: {error!r}", _HOSTILE) from error


def read_dcp(folder: Path, step: int = 0) -> Content:
    """A DCP checkpoint: its tensors by name, read on demand, and its plain values where they are plain."""
    metadata = _read_metadata(folder)
    with malformed_as(CheckpointError, f"{folder}: its metadata and its files do not fit together"):
        # A field with its default value is left out of the pickle.
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        entries = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, _TensorRecord)
        }
        kinds = {name: _kind(folder, name, entry, places) for name, entry in entries.items()}
        values = {
            name: _read_value(folder, name, places[name, ()])
            for name in metadata.state_dict_metadata
            if name not in entries
        }

    def read_slice(name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        return _read_slice(folder, name, entries[name], places, tensor_slice)

    tensors = Tensors(kinds, lambda name: read_slice(name, whole(kinds[name][1])), read_slice)
    return Content(step, tensors, {"dcp": values} if values else {}, {"source": "dcp"}, {})


def _kind(folder: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor; its chunks must cover it and be in files inside the folder."""
    slices = [TensorSlice(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    problem = coverage_problem(entry.size, slices)
    if problem:
        raise CheckpointError(f"{folder}: tensor {name} is not complete: {problem}", _COPY_AGAIN)
    for tensor_slice in slices:
        _safe_file(places[name, tensor_slice.offset])
    if entry.properties.dtype not in DTYPE_NAMES:
        message = f"{folder}: tensor {name} has type {entry.properties.dtype}, which is not supported"
        raise CheckpointError(message, f"supported: {', '.join(DTYPE_NAMES.values())}")
    return entry.properties.dtype, tuple(entry.size)


def _read_slice(folder: Path, name: str, entry: Any, places: Mapping[Any, Any], wanted: TensorSlice) -> torch.Tensor:
    """One tensor_slice of a tensor, from the parts that reach into it."""
    target = torch.empty(wanted.shape, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        tensor_slice = TensorSlice(tuple(chunk.offsets), tuple(chunk.sizes))
        common = tensor_slice.intersection(wanted) if tensor_slice.count else None
        if common is None:
            continue
        part = _read_item(folder, name, places[name, tensor_slice.offset])
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != tensor_slice.shape or part.dtype != target.dtype:
            raise CheckpointError(
                f"{folder}: the part of {name} at {list(tensor_slice.offset)} is not what its metadata says",
                _COPY_AGAIN,
            )
        target[common.within(wanted)] = part[common.within(tensor_slice)]
    return target


def _read_value(folder: Path, name: str, info: Any) -> Any:
    """A value that is no tensor. A trainer's own classes are replaced by a note: they are not read."""
    try:
        return _plain(_read_item(folder, name, info))
    except CheckpointError as error:
        if not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        return "<not read: an object of the trainer's own>"


def _read_item(folder: Path, name: str, info: Any) -> Any:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder}: {name} is stored compressed, which is not supported", "save it without compression"
        )
    path = folder / _safe_file(info)
    try:
        with path.open("rb") as file, malformed_as(CheckpointError, f"{path}: the place of {name} is damaged"):
            file.seek(info.offset)
            content = file.read(min(info.length, path.stat().st_size))
    except OSError as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}", _COPY_AGAIN) from error
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises depends on the bytes
        message = f"{path}: {name} cannot be read as plain tensors: {str(error)[:200]}"
        raise CheckpointError(message, _HOSTILE) from error


def _safe_file(info: Any) -> str:
    """The file's name, checked by the rule for our own names; DCP's may start with underscores."""
    name = str(info.relative_path)
    safe_name(name.lstrip("_") or name)
    return name


def _plain(value: Any) -> Any:
    """A value that JSON can hold; any other object becomes its type's name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return f"<{type(value).__name__}>"


def write_dcp(tensors: Tensors, folder: Path) -> str:
    """All tensors as a DCP checkpoint; torch's writer holds all of them in memory. Returns the folder."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if (folder / DCP_METADATA).exists():
        raise CheckpointError(
            f"{folder} holds a DCP checkpoint already", "choose another folder: nothing is overwritten"
        )
    with warnings.catch_warnings():
        # DCP warns that there is no process group; none is needed.
        warnings.simplefilter("ignore")
        save(dict(tensors), checkpoint_id=str(folder), no_dist=True)
    return str(folder)
