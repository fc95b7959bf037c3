"""Where weights come from before the first step: a seed, a run's checkpoint, or a Hugging Face folder.

The model's shape follows from what training starts from; only what the user wrote about it counts more.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.finding import LoadedStep
from keepstep.checkpoint.objects import parse_url
from keepstep.config.check import broken_rules
from keepstep.config.fields import value_at
from keepstep.config.load import LoadedConfig, load_config
from keepstep.config.schema import CheckpointConfig, LoraConfig, ModelConfig, RunConfig
from keepstep.core.errors import CheckpointError, ConfigError, HardwareError, KeepstepError, UsageError
from keepstep.models.hf_config import model_config_from_hf
from keepstep.models.hf_folder import fingerprint, is_hf_folder, load_hf, read_hf_config
from keepstep.models.init import init_weights
from keepstep.models.lora import apply_lora, init_adapters, merge_lora
from keepstep.models.transformer import Transformer
from keepstep.observe.folder import RunFolder

Origin = dict[str, Any]
"""Which weights a run began with, in plain values, told by their content: a folder's weights may change afterwards."""
DEFAULT_SEQ_LEN = 2048
"""Rows of a fine-tuning run are this long at most unless the user says otherwise: long contexts cost memory."""
BEST = "best"
"""Folder inside a run that holds the weights with the best validation."""
TOKENIZER = "tokenizer"
"""Folder inside a run that holds its tokenizer's files."""


def adopt_start(loaded: LoadedConfig) -> RunConfig:
    """The configuration with the shape of what it starts from; fields that were written down stay as written."""
    config = loaded.config
    if not config.finetune.start_from:
        return config
    shape = start_shape(Path(config.finetune.start_from))
    written = {
        path.removeprefix("model."): getattr(config.model, path.removeprefix("model."))
        for path, origin in loaded.origins.items()
        if path.startswith("model.") and origin.kind not in ("default", "preset")
    }
    longest = max(shape.max_positions, shape.seq_len)
    shape = replace(shape, preset="custom", max_positions=longest, seq_len=min(longest, DEFAULT_SEQ_LEN))
    adopted = replace(config, model=replace(shape, **written))
    # Checked before with the default shape, which is not the one that is split and trained.
    problems = [
        KeepstepError(f"{item.fields[0]} is {value_at(adopted, item.fields[0])!r}, but it {item.rule}", item.hint)
        for item in broken_rules(adopted)
    ]
    if problems:
        raise ConfigError(problems)
    return adopted


def start_shape(where: Path) -> ModelConfig:
    """The shape of a model that lies in a folder."""
    if is_hf_folder(where):
        return ModelConfig(**model_config_from_hf(read_hf_config(where)))
    return run_config(where).model


def run_config(where: Path) -> RunConfig:
    """The configuration a run was frozen with."""
    folder = RunFolder(where)
    if not folder.config.is_file():
        raise UsageError(
            f"{where} is neither a run's folder nor a Hugging Face model", "it needs a config.yaml or a config.json"
        )
    return _located(load_config(folder.config).config, where)


def _located(config: RunConfig, where: Path) -> RunConfig:
    """The configuration with its relative paths seen from where the run was started, be the caller where it may.

    Else another folder of the same name below the working directory would be taken for the one that was meant.
    """
    inside = Path(config.runs_dir) / config.name
    # Seen from here it is this very run, as its own command would find it; through a link, perhaps.
    if inside.is_absolute() or inside.resolve() == where.resolve():
        return config
    # As it was named first: where `runs` is a link to a scratch disk, what the run began with lies beside the link.
    named = (Path(os.path.abspath(where)), where.resolve())  # noqa: PTH100 - Path.absolute() keeps `..`
    here = next((path for path in named if path.parts[-len(inside.parts) :] == inside.parts), None)
    if here is None:
        return config
    started_in = Path(*here.parts[: -len(inside.parts)])

    def found(path: str) -> str:
        return str(started_in / path) if path and "://" not in path and not Path(path).is_absolute() else path

    def found_if_there(path: str) -> str:
        # `demo` and its like are no paths.
        return found(path) if path and (started_in / path).exists() else path

    data = config.data
    paths: dict[str, Any] = {
        name: found_if_there(getattr(data, name)) for name in ("path", "valid_path", "test_path", "tokenizer")
    }
    blend = {found_if_there(path): weight for path, weight in data.blend.items()}
    return replace(
        config,
        runs_dir=str(started_in / config.runs_dir),
        data=replace(data, **paths, blend=blend),
        chat=replace(config.chat, template=found(config.chat.template)),
        finetune=replace(config.finetune, start_from=found(config.finetune.start_from)),
        checkpoint=replace(config.checkpoint, folder=found(config.checkpoint.folder)),
    )


def run_facts(where: Path) -> dict[str, Any]:
    """What a run noted about itself: versions, data, where its weights were imported from."""
    path = RunFolder(where).facts
    facts: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return facts


def open_device(wanted: str) -> torch.device:
    """What `--device` names: cpu, cuda, cuda:1, or with auto a GPU where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", wanted):
        raise UsageError(f"--device is {wanted!r}, but it must be auto, cpu, cuda or cuda:NUMBER", "--device auto")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise HardwareError(f"--device is {wanted}, but torch finds no such GPU here", "--device cpu")
    return device


def find_tokenizer(where: Path) -> Path | None:
    """The tokenizer.json that belongs to a model's folder."""
    candidates = [where / "tokenizer.json", where / TOKENIZER / "tokenizer.json"]
    if not is_hf_folder(where) and RunFolder(where).config.is_file():
        named = run_config(where).data.tokenizer
        candidates += [Path(named)] if named else []
    return next((path for path in candidates if path.is_file()), None)


def find_chat_template(where: Path, config: RunConfig) -> str:
    """The template that `chat.template` named when the run was trained; empty where it is the tokenizer's own."""
    if not config.chat.template:
        return ""
    # The run's own copy: the file that was named may have been edited, or be gone.
    kept = where / TOKENIZER / "chat_template.jinja"
    return str(kept) if kept.is_file() else config.chat.template if Path(config.chat.template).is_file() else ""


def fill_weights(model: Transformer, config: RunConfig, origin: Origin | None = None) -> Origin | None:
    """First weights of a model that is on its device, sharded or whole; adapters start so that they change nothing.

    Gives back what they were; with an `origin` they are those and no others. None where a seed made them.
    """
    began: Origin | None = None
    if config.finetune.start_from:
        began = fill_from(model, Path(config.finetune.start_from), origin)
    else:
        init_weights(model, config.seed)
    if config.lora.rank:
        init_adapters(model, config.seed)
    return began


def fill_from(model: Transformer, where: Path, origin: Origin | None = None) -> Origin:
    """Weights from a folder into a model, adapters left alone. Each process reads its own part.

    With an `origin` that the folder does not hold any more this raises: on other weights adapters mean nothing.
    """
    if is_hf_folder(where):
        found = {"fingerprint": fingerprint(where)}
        if origin not in (None, found):
            raise _changed(where)
        load_hf(model, where)
        return found
    config = run_config(where)
    weights = {name: item for name, item in model.named_parameters() if not name.endswith(("lora_a", "lora_b"))}
    if config.lora.rank:
        raise UsageError(
            f"{where} holds adapters, not whole weights",
            f"keepstep export {where} --hf OUT merges them; start from OUT",
        )
    if origin is not None and "manifest" not in origin:
        raise _changed(where)
    loaded = load_step(where, {"model": weights}, cast=True, only=origin["manifest"] if origin else "")
    if loaded is None:
        raise _changed(where, origin) if origin else _nothing_in(where)
    return {"step": loaded.step, "manifest": loaded.where.marker.manifest_hash}


def _changed(where: Path, origin: Origin | None = None) -> ConfigError:
    named = f": step {origin['step']} is gone" if origin else ""
    # No fault that another attempt could get over, as a checkpoint's would be.
    return ConfigError(
        f"finetune.start_from is {where}, which does not hold the weights any more that the run began with{named}",
        f"put them back there, or train anew from what {where} holds now, under another name",
    )


def _nothing_in(where: Path) -> CheckpointError:
    return CheckpointError(f"{where} holds no whole checkpoint", "train the run first")


def load_step(where: Path, into: dict[str, Any], *, cast: bool = False, only: str = "") -> LoadedStep | None:
    """Fill tensors from a run's best weights where it kept them, else from its newest checkpoint.

    `only` names one step by the hash of its manifest. None where there is nothing to load.
    """
    folder = RunFolder(where)
    config = run_config(where)
    newest = Path(config.checkpoint.folder) if config.checkpoint.folder else folder.checkpoints
    filled = _in_fp32(into) if cast else into
    for place in (folder.root / BEST, newest):
        if place.is_dir() or parse_url(str(place)):
            loaded = Checkpointer(place, CheckpointConfig()).load_newest(filled, only=only)
            if loaded is not None:
                _copy_back(filled, into)
                return loaded
    return None


def _in_fp32(into: dict[str, Any]) -> dict[str, Any]:
    """Stand-ins for tensors of another precision than checkpoints have: frozen weights are kept in bf16."""
    return {
        key: {
            name: tensor if tensor.dtype == torch.float32 else torch.empty_like(tensor, dtype=torch.float32)
            for name, tensor in tensors.items()
        }
        for key, tensors in into.items()
    }


@torch.no_grad()
def _copy_back(filled: dict[str, Any], into: dict[str, Any]) -> None:
    for key, tensors in into.items():
        for name, tensor in tensors.items():
            if filled[key][name] is not tensor:
                tensor.copy_(filled[key][name])


def prepare_adapters(model: Transformer, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Adapters on a model that is still on the meta device; frozen weights need no fp32 masters and get `dtype`."""
    apply_lora(model, lora)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                frozen = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                setattr(module, name, frozen)


def whole_model(where: Path, *, merge: bool = True) -> tuple[Transformer, RunConfig, int]:
    """A model on the CPU, whole, in fp32, with its configuration and step (0 for a Hugging Face folder)."""
    if is_hf_folder(where):
        shape = ModelConfig(**model_config_from_hf(read_hf_config(where)))
        model = Transformer(shape)
        load_hf(model, where)
        return model.eval(), replace(RunConfig(), name=where.resolve().name, model=shape), 0
    config = run_config(where)
    model = Transformer(config.model)
    start = config.finetune.start_from
    if config.lora.rank:
        apply_lora(model, config.lora)
        if not start:
            fill_weights(model, config)
    trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
    loaded = load_step(where, {"model": trained})
    if loaded is None:
        raise _nothing_in(where)
    if config.lora.rank and start:
        # Below the adapters go the weights they were trained on, whatever the folder's newest are by now.
        fill_from(model, Path(start), loaded.values.get("origin"))
    if config.lora.rank and merge:
        merge_lora(model)
    return model.eval(), config, loaded.step


def start_model(where: Path) -> tuple[Transformer, RunConfig, int]:
    """The weights a run began with, whole: what its training has to be compared with."""
    if is_hf_folder(where) or "imported_from" in run_facts(where):
        return whole_model(where)
    config = run_config(where)
    if config.checkpoint.resume_from:
        raise UsageError(
            f"{where} began with the weights of {config.checkpoint.resume_from}", "name the run that these belong to"
        )
    model = Transformer(config.model)
    loaded = load_step(where, {})
    fill_weights(model, replace(config, lora=LoraConfig()), loaded.values.get("origin") if loaded else None)
    return model.eval(), config, 0


def describe_start(config: RunConfig) -> dict[str, Any]:
    """What a model card says about where the weights came from."""
    return {"start_from": config.finetune.start_from or None, "lora": asdict(config.lora) if config.lora.rank else None}
