"""A GGUF file as a Hugging Face model (config.json, lazy tensors, files of its tokenizer), and a model as GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from keepstep.checkpoint.offline import Tensors
from keepstep.config.hf_config import hf_config_of, hf_family, model_config_from_hf
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import CheckpointError
from keepstep.interop.gguf import names
from keepstep.interop.gguf.quantization import TYPES, TensorType, dtype_of
from keepstep.interop.gguf.reader import open_gguf
from keepstep.interop.gguf.tokenizer import tokenizer_files
from keepstep.interop.gguf.writer import PlannedTensor, write_gguf
from keepstep.interop.hf_names import export_parameters, match_rules, rules
from keepstep.models.size import parameter_count

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_k": 14}
"""Types that we write a model as, with llama.cpp's numbers for most of a file's tensors."""


def open_gguf_model(path: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors, decoded when they are read. The tensors are exactly those of the model described."""
    file = open_gguf(path)
    described = names.described_model(file)
    shape = ModelConfig(**model_config_from_hf(described))
    places = {names.hf_name(name, described["model_type"]): name for name in file.tensors if name != names.ROPE_FACTORS}

    def read(name: str) -> Tensor:
        return names.with_layout(name, file.read(places[name]), described, of_gguf=False)

    stored = {name: file.tensors[place] for name, place in places.items()}
    tensors = Tensors({name: (dtype_of(item.kind), item.shape) for name, item in stored.items()}, read)
    match_rules(tensors, rules(shape, hf_family(described)), shape)
    # The model is allocated before its tensors are read, so its size must not be only a claim of the metadata.
    elements = sum(item.kind.elements * (item.size_bytes // item.kind.block.itemsize) for item in stored.values())
    if parameter_count(shape) != elements:
        raise CheckpointError(
            f"{path} describes a model of {parameter_count(shape):,} parameters, but holds {elements:,}",
            "download the file again",
        )
    return described, tensors


def read_gguf_tokenizer(path: Path) -> dict[str, str]:
    """File name → content of the tokenizer in a GGUF file."""
    return tokenizer_files(open_gguf(path).metadata)


def write_gguf_model(
    path: Path, state: Mapping[str, Tensor], config: ModelConfig, wanted: str, extra: Mapping[str, Any]
) -> None:
    """Write the weights of a whole model, with `extra` metadata; `wanted` is a key of `FILE_TYPES`."""
    described = hf_config_of(config, "float32")
    family = hf_family(described)
    file_type = {"general.file_type": FILE_TYPES[wanted], "general.quantization_version": 2}
    metadata = {**names.model_metadata(described, config), **file_type, **extra}

    def tensors(source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if names.needs_rope_factors(config):
            yield names.ROPE_FACTORS, names.rope_factors(config)
        for name, tensor in export_parameters(source, config, family):
            yield names.gguf_name(name, family), names.with_layout(name, tensor.detach(), described, of_gguf=True)

    # Parameters without data show the shapes that the header needs.
    shapes = (
        (name, tuple(item.shape)) for name, item in tensors({key: item.to("meta") for key, item in state.items()})
    )
    planned = [PlannedTensor(name, shape, _chosen_type(name, shape, wanted)) for name, shape in shapes]
    write_gguf(path, metadata, planned, (tensor for _, tensor in tensors(state)))


def _chosen_type(name: str, shape: tuple[int, ...], wanted: str) -> TensorType:
    """The first of the types in question whose blocks fill a row. Norms and biases are fp32: llama.cpp adds them so."""
    if len(shape) == 1 or name.startswith("position_embd"):
        return TYPES["F32"]
    if wanted == "q4_k":
        # A rounded embedding or head hurts more than the same bits elsewhere.
        choices = ["Q8_0", "F16"] if name.startswith(("token_embd", "output.")) else ["Q4_K", "Q4_1", "F16"]
    else:
        choices = [wanted.upper(), "F16"]
    return next(TYPES[choice] for choice in choices if shape[-1] % TYPES[choice].elements == 0)
