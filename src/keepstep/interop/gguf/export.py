"""A run becomes a GGUF file for llama.cpp and Ollama, read back and compared before it counts as done."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.config.hf_config import hf_config_of, hf_family, model_config_from_hf
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import CheckpointError, UsageError
from keepstep.core.files import finished_in, is_vacant, write_atomic
from keepstep.data import tokenization
from keepstep.data.chat.template import find_template
from keepstep.data.chat.tokenizer import end_tokens
from keepstep.interop.full_model import load_full_model
from keepstep.interop.gguf.model import open_gguf_model, write_gguf_model
from keepstep.interop.gguf.ollama import Turns, modelfile
from keepstep.interop.gguf.tokenizer import tokenizer_metadata
from keepstep.interop.hf_names import export_parameters
from keepstep.interop.run_source import find_chat_template, find_tokenizer
from keepstep.models.size import parameter_count
from keepstep.models.transformer import Transformer

MODEL, MODELFILE = "model.gguf", "Modelfile"
TOLERANCES = {"f32": 0.0, "f16": 1e-3, "bf16": 4e-3, "q8_0": 2e-2, "q4_k": 0.2}
"""Largest difference of a tensor that is rounding, relative to its norm; a wrong name or layout gives more than 1."""


@dataclass(frozen=True)
class ExportedGguf:
    """What an export wrote, and how much its weights differ when it is read back."""

    folder: Path
    step: int
    family: str
    type: str
    parameters: int
    file_bytes: int
    difference: float
    """Largest difference of a tensor, relative to its norm."""
    ollama_template: Turns
    """How much of the chat template the Modelfile has; Ollama does not read the one in the file."""


def export_gguf(where: Path, out: Path, kind: str) -> ExportedGguf:
    """Write model.gguf and an Ollama Modelfile into a folder; adapters are merged."""
    if not is_vacant(out) or out.suffix == ".gguf":
        raise UsageError(f"{out} is no empty or new folder", f"model.gguf is written inside: --gguf {out.stem}")
    model, config, step = load_full_model(where)
    tokenizer = find_tokenizer(where)
    if tokenizer is None:
        raise UsageError(
            f"{where} has no tokenizer, which a GGUF file needs", "keepstep export RUN --hf OUT needs none"
        )
    template = find_template(tokenizer, find_chat_template(where, config))
    extra = {"general.name": config.name, **tokenizer_metadata(tokenizer, config.model.vocab, template)}
    with finished_in(out) as unfinished:
        unfinished.mkdir(parents=True)
        write_gguf_model(unfinished / MODEL, dict(model.named_parameters()), config.model, kind, extra)
        difference = check_gguf(unfinished / MODEL, model, kind)
        loaded = tokenization.load(tokenizer)
        stops = [loaded.id_to_token(number) for number in sorted(end_tokens(tokenizer, loaded, template))]
        text, turns = modelfile(template, stops)
        write_atomic(unfinished / MODELFILE, text)
        family, size = hf_config_of(config.model, "float32")["model_type"], (unfinished / MODEL).stat().st_size
        count = parameter_count(config.model)
    return ExportedGguf(out, step, family, kind, count, size, difference, turns)


def check_gguf(path: Path, model: Transformer, kind: str) -> float:
    """How much weights differ when the file is read back; raises above the tolerance, and for another shape."""
    described, tensors = open_gguf_model(path)
    shape, largest = ModelConfig(**model_config_from_hf(described)), 0.0
    if _comparable(shape) != _comparable(model.config):
        raise CheckpointError(f"the export {path} describes another model", "please report this with its config.yaml")
    for name, expected in export_parameters(dict(model.named_parameters()), model.config, hf_family(described)):
        error = (tensors[name].float() - expected).norm() / expected.norm().clamp(min=1e-30)
        largest = max(largest, float(error.detach().nan_to_num(nan=float("inf"))))
    if largest > TOLERANCES[kind]:
        raise CheckpointError(
            f"the export {path} is wrong: a tensor differs by {largest:.1e} of its norm (rounding to {kind} gives at "
            f"most {TOLERANCES[kind]:.0e})",
            "--type f32; weights beyond 65,504 do not fit into f16",
        )
    return largest


def _comparable(config: ModelConfig) -> dict[str, Any]:
    """What a file says about a model; its numbers are fp32."""
    described = {**hf_config_of(config, "float32"), "initializer_range": None}
    found: dict[str, Any] = json.loads(json.dumps(described), parse_float=lambda text: float(np.float32(text)))
    return found
