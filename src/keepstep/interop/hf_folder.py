"""Hugging Face model folders, and GGUF files read as such: config.json and weights, into a model and out of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.checkpoint.offline import Tensors
from keepstep.config.hf_config import hf_family, model_config_from_hf, read_hf_config
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import CheckpointError, UsageError
from keepstep.core.files import write_json
from keepstep.data.remote.hub import fetch_model, is_model_name
from keepstep.data.tokenization import FILES
from keepstep.interop.gguf.model import open_gguf_model, read_gguf_tokenizer
from keepstep.interop.gguf.reader import part_pattern
from keepstep.interop.hf_names import BALANCE_BIAS, export_parameters, import_parameters
from keepstep.interop.quantized import dequantized
from keepstep.interop.safetensors_files import open_hf_tensors, write_shards
from keepstep.models.init import keep_shard
from keepstep.models.moe import router_biases
from keepstep.models.quantized_weight import QuantizedWeight, weight_slots
from keepstep.models.transformer import Transformer


def fetch_source(source: str) -> Path:
    """The folder of a model: a local one, or a copy of a repository on the Hub.

    Or the path of a GGUF file, a local one or one of such a repository.
    """
    if Path(source).is_dir() or is_gguf(Path(source)):
        return Path(source)
    owner, name, inside = (*source.split("/", 2), "", "")[:3]
    # A path whose first folder exists is meant to be a local one.
    if inside.endswith(".gguf") and is_model_name(f"{owner}/{name}") and not Path(owner).exists():
        # With the other parts of the same model.
        path = fetch_model(f"{owner}/{name}", [inside, part_pattern(inside)]) / inside
        if not path.is_file():
            raise UsageError(f"{owner}/{name} has no file {inside}", f"see https://huggingface.co/{owner}/{name}")
        return path
    if source.endswith(".gguf") or not is_model_name(source):
        hint = "give a folder with config.json, a .gguf file, or OWNER/NAME or OWNER/NAME/FILE.gguf on the Hub"
        raise UsageError(f"there is no {'file' if source.endswith('.gguf') else 'folder'} {source}", hint)
    return fetch_model(source, ["config.json", "*.safetensors", "*.safetensors.index.json", *FILES])


def is_hf_folder(path: Path) -> bool:
    """Whether the folder holds a Hugging Face model."""
    return (path / "config.json").is_file()


def is_gguf(path: Path) -> bool:
    """Whether the path is a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def tokenizer_inside(source: Path) -> dict[str, str]:
    """File name → content of the tokenizer in a GGUF file; empty for a folder."""
    return read_gguf_tokenizer(source) if is_gguf(source) else {}


def read_hf_shape(source: Path) -> ModelConfig:
    """The shape of the model in a folder or a GGUF file."""
    described = open_gguf_model(source)[0] if is_gguf(source) else read_hf_config(source / "config.json")
    return ModelConfig(**model_config_from_hf(described))


def open_source(source: Path) -> tuple[Mapping[str, Any], Tensors]:
    """config.json and the tensors of a folder or a GGUF file, with Hugging Face's names and layouts."""
    return open_gguf_model(source) if is_gguf(source) else _open_folder(source)


def _open_folder(folder: Path) -> tuple[Mapping[str, Any], Tensors]:
    """The same of a folder. Layers that predict later tokens (DeepSeek-V3) are left out, as transformers does."""
    described, tensors = read_hf_config(folder / "config.json"), dequantized(open_hf_tensors(folder))
    layers, more = described.get("num_hidden_layers"), described.get("num_nextn_predict_layers")
    if described.get("model_type") != "deepseek_v3" or not isinstance(layers, int) or not isinstance(more, int):
        return described, tensors
    named = {name: re.match(r"model\.layers\.(\d{1,6})\.", name) for name in tensors}
    predictors = {name for name, found in named.items() if found and int(found[1]) in range(layers, layers + more)}
    kinds = {name: kind for name, kind in tensors.kinds.items() if name not in predictors}
    return described, Tensors(kinds, tensors.__getitem__)


@torch.no_grad()
def load_hf(model: Transformer, folder: Path) -> None:
    """Load a folder's or a GGUF file's weights into a model: a whole one, a sharded one, or one pipeline stage.

    Each process reads one parameter at a time and keeps its shard of it.
    """
    described, tensors = open_source(folder)
    biases = router_biases(model)
    for bias in biases.values():
        bias.zero_()
    parameters: dict[str, Tensor | QuantizedWeight] = {**dict(weight_slots(model)), **biases}
    device = next(iter(parameters.values())).device
    # On the device from the start: it packs fused weights much faster than the host.
    on_device = Tensors(tensors.kinds, lambda name: tensors[name].to(device))
    for name, full in import_parameters(on_device, model.config, hf_family(described), only=parameters):
        parameter = parameters[name]
        if full.shape != parameter.shape:
            raise CheckpointError(
                f"{folder}: {name} is {list(full.shape)}, the model needs {list(parameter.shape)}",
                "leave the model's shape to config.json: set no model.* fields that change it",
            )
        keep_shard(parameter, full if isinstance(parameter, QuantizedWeight) else full.to(parameter.dtype))


def save_hf(
    state: Mapping[str, Tensor], config: ModelConfig, described: Mapping[str, Any], folder: Path, dtype: torch.dtype
) -> int:
    """Write config.json and the weights of a whole model; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    exported = export_parameters(state, config, hf_family(described))
    kinds = ((name, tensor, torch.float32 if name.endswith(BALANCE_BIAS) else dtype) for name, tensor in exported)
    total = write_shards(
        ((name, tensor.detach().to(device="cpu", dtype=kind).contiguous()) for name, tensor, kind in kinds), folder
    )
    write_json(folder / "config.json", dict(described))
    return total
