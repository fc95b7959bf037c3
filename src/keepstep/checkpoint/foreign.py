"""Reading other systems' checkpoints without trusting them: DCP folders (torchtitan, Composer, Megatron), safetensors.

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

from keepstep.checkpoint.boxes import Box, coverage_problem, whole
from keepstep.checkpoint.layout import DTYPE_NAMES, DTYPES
from keepstep.checkpoint.manifest import safe_name
from keepstep.checkpoint.offline import Content, Tensors
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


class _PropertiesRecord(_Record):
    """TensorProperties pickles itself as a tuple that starts with the type."""

    dtype: torch.dtype = torch.float32

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_PLANNER_MODULE = "torch.distributed.checkpoint.planner"
_ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
    (_METADATA_MODULE, "Metadata"): _Record,
    (_METADATA_MODULE, "TensorStorageMetadata"): _TensorRecord,
    (_METADATA_MODULE, "BytesStorageMetadata"): _BytesRecord,
    (_METADATA_MODULE, "ChunkStorageMetadata"): _Record,
    (_METADATA_MODULE, "TensorProperties"): _PropertiesRecord,
    (_METADATA_MODULE, "MetadataIndex"): _Record,
    (_METADATA_MODULE, "StorageMeta"): _Record,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): lambda value: value,
    # Megatron keeps the plans of all ranks along.
    (_PLANNER_MODULE, "SavePlan"): _Record,
    (_PLANNER_MODULE, "WriteItem"): _Record,
    (_PLANNER_MODULE, "WriteItemType"): _Record,
    (_PLANNER_MODULE, "TensorWriteData"): _Record,
    (_PLANNER_MODULE, "BytesIOWriteData"): _Record,
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
    """A DCP checkpoint: its tensors by name, read on demand, and its plain values where they are plain."""
    metadata = read_dcp_metadata(folder)
    try:
        # A field at its default is left out of the pickle.
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        entries = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, _TensorRecord)
        }
        kinds = {name: _dcp_kind(folder, name, entry, places) for name, entry in entries.items()}
        values = {
            name: _dcp_value(folder, name, places[name, ()])
            for name in metadata.state_dict_metadata
            if name not in entries
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: its metadata and its files do not fit together: {error!r}") from error

    def read_box(name: str, box: Box) -> torch.Tensor:
        return _dcp_part(folder, name, entries[name], places, box)

    tensors = Tensors(kinds, lambda name: read_box(name, whole(kinds[name][1])), read_box)
    return Content(step, tensors, {"dcp": values} if values else {}, {"source": "dcp"}, {})


def _dcp_kind(folder: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of a tensor whose parts are all there, in files inside the folder."""
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    problem = coverage_problem(entry.size, boxes)
    if problem:
        raise CheckpointError(f"{folder}: tensor {name} is not whole: {problem}")
    for box in boxes:
        _own_file(places[name, box.offset])
    if entry.properties.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{folder}: tensor {name} has type {entry.properties.dtype}, which is not read")
    return entry.properties.dtype, tuple(entry.size)


def _dcp_part(folder: Path, name: str, entry: Any, places: Mapping[Any, Any], wanted: Box) -> torch.Tensor:
    """One box of a tensor, from the parts that reach into it."""
    target = torch.empty(wanted.shape, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        common = box.common(wanted) if box.count else None
        if common is None:
            continue
        part = _dcp_item(folder, name, places[name, box.offset])
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != box.shape or part.dtype != target.dtype:
            raise CheckpointError(f"{folder}: the part of {name} at {list(box.offset)} is not what its metadata says")
        target[common.within(wanted)] = part[common.within(box)]
    return target


def _dcp_value(folder: Path, name: str, info: Any) -> Any:
    """A value that is no tensor. What plain types cannot hold (a trainer's own classes) is named, and not read."""
    try:
        return _plain(_dcp_item(folder, name, info))
    except CheckpointError as error:
        if not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        return "<not read: an object of the trainer's own>"


def _dcp_item(folder: Path, name: str, info: Any) -> Any:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{folder}: {name} is stored compressed, which is not read")
    path = folder / _own_file(info)
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
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
    """One safetensors file, or a folder of them; names get the prefix `model.`, tensors are read on demand."""
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    where: dict[str, Path] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    where[f"model.{name}"] = file
                    kinds[f"model.{name}"] = DTYPES[part.get_dtype()], tuple(part.get_shape())
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not kinds:
        raise CheckpointError(f"{path} holds no safetensors file")

    def read(name: str) -> torch.Tensor:
        with safe_open(where[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name.removeprefix("model."))
        return tensor

    return Content(step, Tensors(kinds, read), {}, {"source": "safetensors"}, {})
