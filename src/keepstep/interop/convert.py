"""Checkpoints of any system as ours, and ours as any system's.

One tensor is in memory at a time, except in DCP's writer, which holds all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from keepstep.checkpoint.inspect import choose_step
from keepstep.checkpoint.offline import Content, Kind, Tensors, read_content, write_content
from keepstep.checkpoint.protocol.retention import reading
from keepstep.checkpoint.storage.store import open_store
from keepstep.config.dump import dump_config
from keepstep.config.hf_config import export_family, hf_config_of, hf_family, model_config_from_hf, read_hf_config
from keepstep.config.load import load_config
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.core.errors import CheckpointError, UsageError
from keepstep.core.files import finished_in, is_vacant
from keepstep.core.step_folders import parse_folder_name
from keepstep.interop.dcp import DCP_METADATA, read_dcp, write_dcp
from keepstep.interop.hf_folder import is_hf_folder, save_hf
from keepstep.interop.hf_names import Rule, match_rules, pack, rules
from keepstep.interop.megatron import find_megatron, read_megatron
from keepstep.interop.megatron_names import megatron_rules, model_config_from_megatron, plain_name
from keepstep.interop.safetensors_files import read_safetensors, write_safetensors
from keepstep.models.transformer import Transformer

Form = Literal["sharded", "full", "safetensors", "dcp"]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COMPOSER_MODEL = "state.model."
"""Prefix of the model's names in Composer's DCP folders; a Hugging Face model inside adds `model.`."""
_COMPOSER_CONFIG = "state.integrations.huggingface.model.config.content."


@contextmanager
def open_source(source: str, config: Path | None, step: int = 0, dtype: torch.dtype | None = None) -> Iterator[Content]:
    """Any checkpoint as one of ours: weights of another trainer get our names and layouts, below `model`.

    `config` is a run.yaml with the model's shape, needed where the source does not store it. `dtype` converts another
    trainer's weights to that precision. Sources without a step number get `step`.
    """
    path = Path(source)
    iteration = find_megatron(path) if path.is_dir() else None
    if iteration is not None:
        found = read_megatron(iteration)
        model = _shape(config) or ModelConfig(**model_config_from_megatron(found.arguments))
        theirs = _renamed(found.tensors, {plain_name(name): name for name in found.tensors.kinds})
        packed = _pack(theirs, megatron_rules(model), model, dtype)
        yield _content(found.iteration or step, packed, model, "megatron")
        return
    with _open_files(source, step) as content:
        if path.is_dir() and is_hf_folder(path):
            described = read_hf_config(path / "config.json")
            model = _shape(config) or ModelConfig(**model_config_from_hf(described))
            theirs = _below(content.tensors, "model.")
            yield _content(step, _pack(theirs, rules(model, hf_family(described)), model, dtype), model, "huggingface")
        elif any(name.startswith(_COMPOSER_MODEL) for name in content.tensors):
            model = _shape(config) or ModelConfig(**model_config_from_hf(_read_composer_config(content.values)))
            theirs = _renamed(content.tensors, _strip_composer_names(content.tensors))
            yield _content(step, _pack(theirs, rules(model, export_family(model)), model, dtype), model, "composer")
        else:
            yield content


@contextmanager
def _open_files(source: str, step: int) -> Iterator[Content]:
    """A committed step of ours (or of a run: the newest), a DCP folder, or safetensors files, under their own names.

    Tensors are read while the source is open; a step of ours is not deleted meanwhile.
    """
    path = Path(source)
    if (path / DCP_METADATA).is_file():
        yield read_dcp(path, step)
    elif _holds_steps(source):
        store, where = choose_step(source, step or None)
        with reading(store, where.name):
            yield read_content(store, where)
    elif (path.suffix == ".safetensors" and path.is_file()) or (path.is_dir() and any(path.glob("*.safetensors"))):
        yield read_safetensors(path, step)
    else:
        raise CheckpointError(
            f"{source} is not a checkpoint that keepstep can read",
            "give a run or step folder, a DCP folder (with .metadata), safetensors files, or a folder of Megatron",
        )


def _holds_steps(source: str) -> bool:
    """Whether this is a step folder, or the folder of a run or of its checkpoints."""
    if parse_folder_name(source.rstrip("/").rpartition("/")[2]) is not None:
        return True
    names = [] if Path(source).is_file() else open_store(source).names()
    return "checkpoints" in names or any(parse_folder_name(name) is not None for name in names)


def write_checkpoint(content: Content, target: str, form: Form, shards: int = 1, with_parity: bool = False) -> str:
    """Write `content` into the folder `target` under our own names; returns what was written."""
    match form:
        case "sharded" | "full":
            store = open_store(target)
            written = write_content(store, content, shards if form == "sharded" else 1, with_parity)
            return store.locate(written.name)
        case "safetensors":
            return write_safetensors(content.tensors, Path(target))
        case "dcp":
            return write_dcp(content.tensors, Path(target))


def write_hf(content: Content, target: Path, config: Path | None, dtype: str = "auto") -> str:
    """Write the weights of `content` as a folder that `transformers` loads, without a tokenizer."""
    if not is_vacant(target):
        raise CheckpointError(f"{target} is not empty", "choose another folder: nothing is overwritten")
    model = _shape(config) or _stored_shape(content)
    weights = _below(content.tensors, "model.")
    if any(name.endswith(("lora_a", "lora_b")) for name in weights):
        raise UsageError(
            "this checkpoint holds adapters, not whole weights", "keepstep export RUN --hf OUT merges them"
        )
    if not weights:
        raise CheckpointError("this checkpoint holds no weights (no tensor below `model`)", "give another step")
    kind = PRECISIONS[dtype] if dtype != "auto" else next(iter(weights.kinds.values()))[0]
    with finished_in(target) as unfinished:
        save_hf(weights, model, hf_config_of(model, str(kind).removeprefix("torch.")), unfinished, kind)
    return str(target)


def _shape(config: Path | None) -> ModelConfig | None:
    return load_config(config).config.model if config is not None else None


def _stored_shape(content: Content) -> ModelConfig:
    """The model of a step of ours: its metadata holds the run's configuration."""
    text = content.metadata.get("config")
    if not isinstance(text, str):
        raise UsageError("this checkpoint does not store the shape of its model", "give it with --config RUN.yaml")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        return load_config(path).config.model


def _below(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names start with `prefix`, without it."""
    return _renamed(tensors, {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)})


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    kinds = {new: tensors.kinds[old] for new, old in names.items()}
    return Tensors(
        kinds, lambda new: tensors[names[new]], lambda new, tensor_slice: tensors.part(names[new], tensor_slice)
    )


def _pack(theirs: Tensors, by: Iterable[Rule], model: ModelConfig, dtype: torch.dtype | None) -> Tensors:
    """Our parameters, each packed from theirs when you ask for it."""
    # Megatron's last pipeline stage keeps a copy of a tied embedding.
    names = [name for name in theirs if not (model.tied and name == "output_layer.weight")]
    packed_from = {f"model.{rule.ours}": (rule, needed) for rule, needed in match_rules(names, by, model)}
    with torch.device("meta"):
        shapes = {f"model.{name}": tuple(item.shape) for name, item in Transformer(model).named_parameters()}
    kinds: dict[str, Kind] = {
        name: (dtype or theirs.kinds[packed_from[name][1][0]][0], shape) for name, shape in shapes.items()
    }

    def read(name: str) -> torch.Tensor:
        rule, needed = packed_from[name]
        tensor = pack(rule, (theirs[one] for one in needed)).to(kinds[name][0])
        if tuple(tensor.shape) != kinds[name][1]:
            raise CheckpointError(
                f"{name} is {list(tensor.shape)}, the model needs {list(kinds[name][1])}",
                "does the shape (from --config, or stored with the source) belong to these weights?",
            )
        return tensor

    return Tensors(kinds, read)


def _content(step: int, tensors: Tensors, model: ModelConfig, source: str) -> Content:
    config = dump_config(replace(RunConfig(), model=replace(model, preset="custom")))
    return Content(step, tensors, {}, {"source": source, "config": config}, {})


def _strip_composer_names(names: Iterable[str]) -> dict[str, str]:
    """The model's own name → Composer's, for every tensor of the model."""
    listed = list(names)
    inner = f"{_COMPOSER_MODEL}model."
    prefix = inner if any(name.startswith(inner) for name in listed) else _COMPOSER_MODEL
    return {name.removeprefix(prefix): name for name in listed if name.startswith(prefix)}


def _read_composer_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that Composer stores of a Hugging Face model; DCP has each value under a dotted name."""
    found: dict[str, Any] = {}
    for name, value in (values.get("dcp") or {}).items():
        if name.startswith(_COMPOSER_CONFIG):
            *parents, last = name.removeprefix(_COMPOSER_CONFIG).split(".")
            place = found
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise CheckpointError(f"{name} is inside a value that is no group of values")
            place[last] = value
    if not found:
        raise UsageError(
            "this Composer checkpoint does not store the shape of its model", "give it with --config RUN.yaml"
        )
    return found
