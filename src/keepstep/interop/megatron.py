"""Megatron checkpoints, in both formats, as whole tensors under Megatron's own names.

torch_dist (the default since megatron-core 0.8) is a DCP folder with a `common.pt`; the tensors of all layers are
stacked. The legacy format is `mp_rank_TT[_PPP]/model_optim_rng.pt`, one file per tensor and pipeline rank, with that
rank's slice of every tensor and layers numbered from the rank's first. Files are read with weights_only; the classes of
Megatron's arguments become inert records, and any other class is an error. Optimizer states are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.offline import Kind, Tensors
from keepstep.checkpoint.protocol.tensor_slice import TensorSlice
from keepstep.core.errors import CheckpointError
from keepstep.interop.dcp import DCP_METADATA, InertRecord, read_dcp

LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
_LEGACY_FILE = "model_optim_rng.pt"
_RANK_FOLDER = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
_LAYER = re.compile(r"^(.*\blayers\.)(\d+)\.(.*)$")
_STACKED = re.compile(r"^(.*\blayers\.)(?!\d)(.*)$")
_COLUMN_PARALLEL = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias",
                    "linear_fc1.weight", "linear_fc1.bias")  # fmt: skip
"""Tensors that tensor parallelism splits along their first dimension; the next along their second."""
_ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight")
_INERT = re.compile(r"^(argparse\.Namespace|types\.SimpleNamespace|builtins\.getattr|megatron\.[\w.]+|numpy\.[\w.]+)$")
"""Classes in Megatron's own files; each becomes a record without behaviour."""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """One iteration: its number, the arguments it was trained with, and its weights."""

    iteration: int
    arguments: Mapping[str, Any]
    tensors: Tensors


def find_megatron(path: Path) -> Path | None:
    """The folder of an iteration, given that folder or its parent; None where Megatron wrote neither."""
    if _is_iteration(path):
        return path
    latest = path / LATEST
    if not latest.is_file():
        return None
    text = latest.read_text(errors="replace").strip()
    name = "release" if text == "release" else f"iter_{int(text):07d}" if re.fullmatch("[0-9]{1,12}", text) else ""
    if not name or not _is_iteration(path / name):
        message = f"{latest} names iteration {text[:40]!r}, which is not there"
        raise CheckpointError(message, "give the folder of an iteration, for example iter_0001000")
    return path / name


def _is_iteration(path: Path) -> bool:
    return ((path / DCP_METADATA).is_file() and (path / COMMON).is_file()) or bool(_rank_files(path))


def read_megatron(folder: Path) -> MegatronCheckpoint:
    """One iteration's folder; tensors are read on demand."""
    if (folder / DCP_METADATA).is_file():
        common = _load(folder / COMMON)
        return MegatronCheckpoint(_iteration(common), _arguments(common), _unstack(read_dcp(folder).tensors))
    return _read_legacy(folder)


def _load(path: Path) -> dict[str, Any]:
    """A torch.save file with its tensors memory-mapped; none of its code runs."""
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        for name in foreign:
            if not _INERT.match(name):
                raise CheckpointError(
                    f"{path} wants to use {name}, which no Megatron checkpoint needs: it is not read",
                    "treat this file as hostile",
                )
        with torch.serialization.safe_globals([(InertRecord, name) for name in foreign]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # what torch raises depends on the bytes
        hint = "copy it again from where it was written; if that does not help, treat this file as hostile"
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}", hint) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, where Megatron keeps a dict", "give a folder that Megatron wrote"
        )
    return content


def _arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    return dict(getattr(common.get("args"), "__dict__", {}))


def _iteration(common: Mapping[str, Any]) -> int:
    found = common.get("iteration", 0)
    return found if isinstance(found, int) and found >= 0 else 0


def _unstack(stacked: Tensors) -> Tensors:
    """`decoder.layers.W` of shape [layers, ...] as `decoder.layers.0.W`, `decoder.layers.1.W` and so on."""
    kinds: dict[str, Kind] = {}
    source: dict[str, tuple[str, int | None]] = {}
    for name, (dtype, shape) in stacked.kinds.items():
        if name.startswith(("optimizer.", "rng_state")):
            continue
        plain = name.removeprefix("model.").removeprefix("module.")
        match = _STACKED.match(plain)
        if match is None:
            kinds[plain], source[plain] = (dtype, shape), (name, None)
            continue
        for layer in range(shape[0]):
            single = f"{match[1]}{layer}.{match[2]}"
            kinds[single], source[single] = (dtype, shape[1:]), (name, layer)

    def read(single: str) -> torch.Tensor:
        name, layer = source[single]
        if layer is None:
            return stacked[name]
        shape = kinds[single][1]
        return stacked.part(name, TensorSlice((layer, *(0,) * len(shape)), (1, *shape)))[0]

    return Tensors(kinds, read)


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(pipeline rank, tensor rank) → file."""
    found = {}
    for path in folder.glob(f"mp_rank_*/{_LEGACY_FILE}"):
        match = _RANK_FOLDER.match(path.parent.name)
        if match is not None:
            found[int(match[2] or 0), int(match[1])] = path
    return found


def _read_legacy(folder: Path) -> MegatronCheckpoint:
    files = _rank_files(folder)
    stages, slices = 1 + max(stage for stage, _ in files), 1 + max(rank for _, rank in files)
    missing = [(stage, rank) for stage in range(stages) for rank in range(slices) if (stage, rank) not in files]
    if missing:
        message = f"{folder} lacks the file of pipeline rank {missing[0][0]}, tensor rank {missing[0][1]}"
        raise CheckpointError(message, "copy the folder again: it needs the files of all ranks")
    tensors: dict[str, list[torch.Tensor]] = {}
    first_layer = 0
    common: dict[str, Any] = {}
    for stage in range(stages):
        layers = 0
        for rank in range(slices):
            common = _load(files[stage, rank])
            for name, tensor in _weights(common, files[stage, rank]).items():
                match = _LAYER.match(name)
                if match is not None:
                    layers = max(layers, int(match[2]) + 1)
                    name = f"{match[1]}{int(match[2]) + first_layer}.{match[3]}"
                parts = tensors.setdefault(name, [])
                # The first and the last stage both hold a tied embedding; the first is used.
                if len(parts) == rank:
                    parts.append(tensor)
        first_layer += layers
    partial = next((name for name, parts in tensors.items() if len(parts) != slices), None)
    if partial is not None:
        raise CheckpointError(f"{folder}: not every tensor rank has its slice of {partial}", "copy the folder again")
    arguments = _arguments(common)
    return MegatronCheckpoint(_iteration(common), arguments, _join(tensors, arguments.get("swiglu") is True))


def _weights(common: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    model = common.get("model")
    if not isinstance(model, Mapping):
        kinds = "interleaved stages (model0, model1, ...)" if "model0" in common else "no `model`"
        raise CheckpointError(f"{path} holds {kinds}", "convert it to torch_dist with Megatron's own tools first")
    if "language_model" in model:
        raise CheckpointError(
            f"{path} was written before megatron-core", "convert it to torch_dist with Megatron's own tools first"
        )
    return {
        str(name).removeprefix("module."): tensor for name, tensor in model.items() if isinstance(tensor, torch.Tensor)
    }


def _join(slices: Mapping[str, list[torch.Tensor]], gated: bool) -> Tensors:
    """Whole tensors, each concatenated from the slices of all tensor ranks when you ask for it."""

    def read(name: str) -> torch.Tensor:
        parts = slices[name]
        if name.endswith(_ROW_PARALLEL):
            return torch.cat(parts, dim=1)
        if not name.endswith(_COLUMN_PARALLEL):
            return parts[0]
        if gated and ".linear_fc1." in name:
            # Each rank has its gate rows, then its up rows.
            halves = [part.chunk(2) for part in parts]
            return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
        return torch.cat(parts)

    def kind(name: str) -> Kind:
        first = slices[name][0]
        shape = list(first.shape)
        cut = 1 if name.endswith(_ROW_PARALLEL) else 0 if name.endswith(_COLUMN_PARALLEL) else None
        if cut is not None and cut >= len(shape):
            raise CheckpointError(f"{name} has {len(shape)} dimensions, where tensor parallelism cuts number {cut}")
        if cut is not None:
            shape[cut] *= len(slices[name])
        return first.dtype, tuple(shape)

    return Tensors({name: kind(name) for name in slices}, read)
