"""Checkpoints of other trainers' models as checkpoints of ours, and ours as a Hugging Face folder.

`checkpoint` reads and writes files, `models` knows names and layouts; here they meet. Tensors pass one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.convert import open_any
from keepstep.checkpoint.megatron import find_megatron, read_megatron
from keepstep.checkpoint.offline import Content, Kind, Tensors
from keepstep.config.dump import dump_config
from keepstep.config.load import load_config
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.core.errors import CheckpointError, UsageError
from keepstep.core.files import finished_in, is_vacant
from keepstep.models.hf_config import hf_family, model_config_from_hf
from keepstep.models.hf_describe import describe_hf, export_family
from keepstep.models.hf_folder import is_hf_folder, read_hf_config, save_hf
from keepstep.models.hf_names import Rule, matched, rules
from keepstep.models.megatron_names import megatron_rules, model_config_from_megatron, plain_name
from keepstep.models.transformer import Transformer

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COMPOSER = "state.model."
"""What Composer puts before the names of its model; a Hugging Face model inside adds `model.`."""
_COMPOSER_CONFIG = "state.integrations.huggingface.model.config.content."


@contextmanager
def open_source(source: str, config: Path | None, step: int = 0, dtype: torch.dtype | None = None) -> Iterator[Content]:
    """Any checkpoint as one of ours: weights of another trainer get our names and layouts, below `model`.

    `config` gives the model's shape where the source does not (a run.yaml), `dtype` the precision of another trainer's
    weights where it shall not stay as it is.
    """
    path = Path(source)
    iteration = find_megatron(path) if path.is_dir() else None
    if iteration is not None:
        found = read_megatron(iteration)
        model = _shape(config) or ModelConfig(**model_config_from_megatron(found.arguments))
        theirs = _renamed(found.tensors, {plain_name(name): name for name in found.tensors.kinds})
        yield _content(found.iteration or step, theirs, megatron_rules(model), _Target(model, dtype, "megatron"))
        return
    with open_any(source, step) as content:
        if path.is_dir() and is_hf_folder(path):
            described = read_hf_config(path)
            model = _shape(config) or ModelConfig(**model_config_from_hf(described))
            theirs = _below(content.tensors, "model.")
            yield _content(step, theirs, rules(model, hf_family(described)), _Target(model, dtype, "huggingface"))
        elif any(name.startswith(_COMPOSER) for name in content.tensors):
            yield _from_composer(content, config, step, dtype)
        else:
            yield content


def _from_composer(content: Content, config: Path | None, step: int, dtype: torch.dtype | None) -> Content:
    """Composer's sharded checkpoints: the model's own names below `state.model.`."""
    described = _composer_config(content.values)
    model = _shape(config)
    if model is None:
        if described is None:
            raise UsageError(
                "this Composer checkpoint does not say the shape of its model", "give it with --config RUN.yaml"
            )
        model = ModelConfig(**model_config_from_hf(described))
    inner = f"{_COMPOSER}model."
    prefix = inner if any(name.startswith(inner) for name in content.tensors) else _COMPOSER
    theirs = _below(content.tensors, prefix)
    return _content(step, theirs, rules(model, export_family(model)), _Target(model, dtype, "composer"))


def _composer_config(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json that Composer keeps of a Hugging Face model; DCP stores each value under a dotted name."""
    found: dict[str, Any] = {}
    for name, value in (values.get("dcp") or {}).items():
        if name.startswith(_COMPOSER_CONFIG):
            *parents, last = name.removeprefix(_COMPOSER_CONFIG).split(".")
            place = found
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise CheckpointError(f"{name} lies inside a value that is no group of values")
            place[last] = value
    return found or None


def write_hf(content: Content, target: Path, config: Path | None, dtype: str = "auto") -> str:
    """The weights of `content` as a folder that `transformers` loads, without its tokenizer."""
    if not is_vacant(target):
        raise CheckpointError(f"{target} is not empty", "choose another folder: nothing is overwritten")
    model = _shape(config) or _own_shape(content)
    weights = _below(content.tensors, "model.")
    if any(name.endswith(("lora_a", "lora_b")) for name in weights):
        raise UsageError(
            "this checkpoint holds adapters, not whole weights", "keepstep export RUN --hf OUT merges them"
        )
    if not weights:
        raise CheckpointError("this checkpoint holds no weights (no tensor below `model`)")
    kind = PRECISIONS[dtype] if dtype != "auto" else next(iter(weights.kinds.values()))[0]
    with finished_in(target) as aside:
        save_hf(weights, model, describe_hf(model, str(kind).removeprefix("torch.")), aside, kind)
    return str(target)


def _shape(config: Path | None) -> ModelConfig | None:
    return load_config(config).config.model if config is not None else None


def _own_shape(content: Content) -> ModelConfig:
    """The model of a step of ours: its metadata holds the run's configuration."""
    text = content.metadata.get("config")
    if not isinstance(text, str):
        raise UsageError("this checkpoint does not say the shape of its model", "give it with --config RUN.yaml")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        return load_config(path).config.model


def _below(tensors: Tensors, prefix: str) -> Tensors:
    """Those whose names start with `prefix`, without it."""
    return _renamed(tensors, {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)})


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    kinds = {new: tensors.kinds[old] for new, old in names.items()}
    return Tensors(kinds, lambda new: tensors[names[new]], lambda new, box: tensors.part(names[new], box))


@dataclass(frozen=True)
class _Target:
    """What another trainer's weights become: parameters of `model`, in a precision of their own or as they are."""

    model: ModelConfig
    dtype: torch.dtype | None
    source: str


def _content(step: int, theirs: Tensors, by: Iterable[Rule], target: _Target) -> Content:
    """Our parameters, each made of theirs when it is asked for."""
    model = target.model
    # A pipeline's last stage keeps a copy of a tied embedding.
    names = [name for name in theirs if not (model.tied and name == "output_layer.weight")]
    made_of = {f"model.{rule.ours}": (rule, needed) for rule, needed in matched(names, by, model)}
    with torch.device("meta"):
        shapes = {f"model.{name}": tuple(item.shape) for name, item in Transformer(model).named_parameters()}
    kinds: dict[str, Kind] = {
        name: (target.dtype or theirs.kinds[made_of[name][1][0]][0], shape) for name, shape in shapes.items()
    }

    def read(name: str) -> torch.Tensor:
        rule, needed = made_of[name]
        tensor = rule.pack(*(theirs[one] for one in needed)).to(kinds[name][0])
        if tuple(tensor.shape) != kinds[name][1]:
            raise CheckpointError(
                f"{name} is {list(tensor.shape)}, the model needs {list(kinds[name][1])}",
                "does the shape (--config, or what the source says of itself) belong to these weights?",
            )
        return tensor

    config = dump_config(replace(RunConfig(), model=replace(model, preset="custom")))
    return Content(step, Tensors(kinds, read), {}, {"source": target.source, "config": config}, {})
