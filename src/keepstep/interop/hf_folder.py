"""Hugging Face model folders, and GGUF files read as such: config.json and weights, into a model and out of one.

Weights that published files hold in 4 or 8 bits become bf16: MXFP4 (gpt-oss) and fp8 in blocks (DeepSeek-V3). In their
names: e experts, o outputs, i inputs, g groups of 32 inputs, c and k blocks of outputs and inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.checkpoint.offline import Kind, Tensors
from keepstep.config.hf_config import hf_family, model_config_from_hf, read_hf_config
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import CheckpointError, UsageError, malformed_as
from keepstep.core.files import write_json
from keepstep.data.remote.hub import fetch_model, is_model_name
from keepstep.data.tokenization import FILES
from keepstep.interop.gguf.model import open_gguf_model, read_gguf_tokenizer
from keepstep.interop.gguf.reader import part_pattern
from keepstep.interop.hf_names import BALANCE_BIAS, export_parameters, import_parameters
from keepstep.interop.safetensors_files import open_hf_tensors, write_shards
from keepstep.models.init import keep_shard
from keepstep.models.moe import router_biases
from keepstep.models.quantized_weight import QuantizedWeight, weight_slots
from keepstep.models.transformer import Transformer

_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each code of four bits means (E2M1)."""
_BIAS = 127
"""A scale is the power of two with this exponent bias (E8M0)."""
_FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale."""


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
    described, tensors = read_hf_config(folder / "config.json"), _dequantized(open_hf_tensors(folder))
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


def _dequantized(stored: Tensors) -> Tensors:
    """The same tensors, each quantised one in bf16 under the name of the weight that it stands for; read on demand."""
    kinds: dict[str, Kind] = {}
    for name, (dtype, shape) in stored.kinds.items():
        if name.endswith(_BLOCKS) and dtype == torch.uint8 and len(shape) == 4:
            experts, outputs, groups, packed = shape
            kinds[name.removesuffix(_BLOCKS)] = torch.bfloat16, (experts, groups * packed * 2, outputs)
        elif name + _INVERSE in stored:
            kinds[name] = torch.bfloat16, shape
        elif not (name.endswith(_INVERSE) or (name.endswith(_SCALES) and name[: -len(_SCALES)] + _BLOCKS in stored)):
            kinds[name] = dtype, shape
    return Tensors(kinds, lambda name: _read_quantized(stored, name))


def _read_quantized(stored: Tensors, name: str) -> Tensor:
    if name + _BLOCKS in stored:
        parts = name + _BLOCKS, name + _SCALES
    elif name + _INVERSE in stored:
        parts = name, name + _INVERSE
    else:
        return stored[name]
    for part in parts:
        if part not in stored:
            raise CheckpointError(f"tensor {part} is missing", "download the file again")
    with malformed_as(CheckpointError, f"the scales of {name} do not fit its weights", "download the file again"):
        decode = decode_fp8 if parts[0] == name else decode_mxfp4
        return decode(*(stored[part] for part in parts))


def decode_mxfp4(blocks_eogb: Tensor, scales_eog: Tensor) -> Tensor:
    """The weights [e, i, o] of all experts; a byte holds two inputs, the first in its low bits."""
    # One expert at a time: the codes of all take eight times the memory of the file.
    pairs = zip(blocks_eogb, scales_eog, strict=True)
    return torch.stack([_decode_expert(blocks_ogb, scales_og) for blocks_ogb, scales_og in pairs])


def _decode_expert(blocks_ogb: Tensor, scales_og: Tensor) -> Tensor:
    codes = torch.stack((blocks_ogb & 15, blocks_ogb >> 4), dim=-1).flatten(-2)
    weights = torch.ldexp(torch.tensor(_FP4_VALUES)[codes.int()], scales_og.int()[..., None] - _BIAS)
    return weights.flatten(-2).t().bfloat16()


def decode_fp8(weight_oi: Tensor, scale_ck: Tensor) -> Tensor:
    """The weight [o, i], each block of it multiplied by its scale in fp32."""
    scale_oi = scale_ck.float()
    for dim, size in enumerate(weight_oi.shape):
        if scale_oi.shape[dim] != -(-size // _FP8_BLOCK):
            raise ValueError(f"{scale_ck.shape[dim]} scales for {size} rows or columns")
        scale_oi = scale_oi.repeat_interleave(_FP8_BLOCK, dim=dim).narrow(dim, 0, size)
    return (weight_oi.float() * scale_oi).bfloat16()
