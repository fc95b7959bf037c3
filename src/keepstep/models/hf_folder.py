"""Hugging Face model folders: safetensors read tensor by tensor, and written in shards with an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import CheckpointError, UsageError
from keepstep.core.files import write_json
from keepstep.models.hf_config import hf_family
from keepstep.models.hf_names import import_parameters, rules
from keepstep.models.init import keep_shard
from keepstep.models.transformer import Transformer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""Largest file of a sharded export, as Hugging Face's own tools have it."""


class HfTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name. Asking for one reads it; nothing is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _tensor_files(folder)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._folder / self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged, or lacks {name}: {error}", "fetch the file again") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def dtype(self) -> torch.dtype:
        """The precision that holds every weight as it is: the widest there is, fp32 where none holds them all."""
        kinds = {_dtype(self._folder / file, name) for name, file in self._files.items() if name.endswith("weight")}
        return kinds.pop() if len(kinds) == 1 else torch.float32


def _dtype(path: Path, name: str) -> torch.dtype:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        part = file.get_slice(name)
        kind: torch.dtype = part[: min(1, part.get_shape()[0])].dtype
    return kind


def _tensor_files(folder: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).is_file():
        try:
            index: dict[str, str] = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index: {error!r}", "fetch the file again") from None
        missing = sorted({file for file in index.values() if not (folder / file).is_file()})
        if missing:
            raise CheckpointError(f"{folder} lacks {missing[0]}, which its index names", "fetch the folder again")
        return index
    if not (folder / SINGLE).is_file():
        raise CheckpointError(
            f"{folder} holds neither {INDEX} nor {SINGLE}", "weights must be safetensors: save_pretrained writes them"
        )
    try:
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / SINGLE} is damaged: {error}", "fetch the file again") from None


_SAMPLES, _SAMPLE_BYTES = 16, 256


def fingerprint(folder: Path) -> str:
    """A hash that tells a folder's weights from others: names, shapes and evenly spread bytes of every tensor.

    A whole hash would read hundreds of gigabytes at every start. However the tensors are spread over files, it is the
    same.
    """
    found: dict[str, str] = {}
    for file in sorted(set(_tensor_files(folder).values())):
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


def is_hf_folder(path: Path) -> bool:
    """Whether a Hugging Face model lies here."""
    return (path / "config.json").is_file()


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{folder / 'config.json'} is {type(config).__name__}, not an object", "fetch the file again")
    return config


@torch.no_grad()
def load_hf(model: Transformer, folder: Path) -> None:
    """Fill a model, sharded, a stage of it, or whole, from a folder; each process keeps its part of one parameter at a
    time."""
    family = hf_family(read_hf_config(folder))
    parameters = dict(model.named_parameters())
    for name, whole in import_parameters(HfTensors(folder), model.config, family, only=parameters):
        parameter = parameters[name]
        if whole.shape != parameter.shape:
            raise CheckpointError(
                f"{folder}: {name} is {list(whole.shape)}, the model needs {list(parameter.shape)}",
                "leave the model's shape to config.json: give no model.* fields that change it",
            )
        keep_shard(parameter, whole.to(device=parameter.device, dtype=parameter.dtype))


def save_hf(
    state: Mapping[str, Tensor], config: ModelConfig, described: Mapping[str, Any], folder: Path, dtype: torch.dtype
) -> int:
    """Write config.json and the weights of a whole model; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    family = hf_family(described)
    theirs = (
        (name, tensor.detach().to(device="cpu", dtype=dtype).contiguous())
        for rule in rules(config, family)
        for name, tensor in zip(rule.theirs, rule.unpack(state[rule.ours]), strict=True)
    )
    total = write_shards(theirs, folder)
    write_json(folder / "config.json", dict(described))
    return total


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file with the rights of any new file; the library's own are for its owner alone."""
    from safetensors.torch import save_file

    path.touch()
    rights = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(rights)


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, largest_bytes: int = SHARD_BYTES) -> int:
    """Tensors into files of at most `largest_bytes`, with an index where there is more than one; total bytes."""
    parts: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    waiting_bytes = total = 0

    def flush() -> None:
        write_tensors(waiting, folder / f"part-{len(parts):05d}.safetensors")
        parts.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if waiting and waiting_bytes + size > largest_bytes:
            flush()
            waiting_bytes = 0
        # A copy of its own: safetensors refuses tensors that share memory.
        waiting[name] = tensor.clone()
        waiting_bytes += size
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
