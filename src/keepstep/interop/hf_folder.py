"""Hugging Face model folders, and GGUF files read as such: config.json and weights, into a model and out of one."""

from __future__ import annotations

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
from keepstep.interop.hf_names import export_parameters, import_parameters
from keepstep.interop.quantized import dequantized
from keepstep.interop.safetensors_files import open_hf_tensors, write_shards
from keepstep.models.init import keep_shard
from keepstep.models.transformer import Transformer


def fetch_source(source: str) -> Path:
    """The folder of a model: a local one, or a copy of a repository on the Hub. Also the path of a GGUF file."""
    if Path(source).is_dir() or is_gguf(Path(source)):
        return Path(source)
    if not is_model_name(source):
        hint = "give a folder with config.json, a .gguf file, or OWNER/NAME on the Hub"
        raise UsageError(f"there is no folder {source}", hint)
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
    return (
        open_gguf_model(source)
        if is_gguf(source)
        else (read_hf_config(source / "config.json"), dequantized(open_hf_tensors(source)))
    )


@torch.no_grad()
def load_hf(model: Transformer, folder: Path) -> None:
    """Load a folder's or a GGUF file's weights into a model: a whole one, a sharded one, or one pipeline stage.

    Each process reads one parameter at a time and keeps its shard of it.
    """
    described, tensors = open_source(folder)
    parameters = dict(model.named_parameters())
    for name, full in import_parameters(tensors, model.config, hf_family(described), only=parameters):
        parameter = parameters[name]
        if full.shape != parameter.shape:
            raise CheckpointError(
                f"{folder}: {name} is {list(full.shape)}, the model needs {list(parameter.shape)}",
                "leave the model's shape to config.json: set no model.* fields that change it",
            )
        keep_shard(parameter, full.to(device=parameter.device, dtype=parameter.dtype))
    for buffer in model.buffers():
        buffer.zero_()


def save_hf(
    state: Mapping[str, Tensor], config: ModelConfig, described: Mapping[str, Any], folder: Path, dtype: torch.dtype
) -> int:
    """Write config.json and the weights of a whole model; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    exported = export_parameters(state, config, hf_family(described))
    total = write_shards(
        ((name, tensor.detach().to(device="cpu", dtype=dtype).contiguous()) for name, tensor in exported), folder
    )
    write_json(folder / "config.json", dict(described))
    return total
