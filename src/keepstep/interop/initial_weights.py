"""Weights before the first step: from a seed, a run's checkpoint, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.loader import LoadedStep
from keepstep.checkpoint.storage.object_store import parse_url
from keepstep.config.schema import CheckpointConfig, RunConfig
from keepstep.core.errors import CheckpointError, ConfigError, UsageError
from keepstep.interop.hf_folder import is_hf_folder, load_hf
from keepstep.interop.run_source import BEST_FOLDER, read_run_config
from keepstep.interop.safetensors_files import fingerprint
from keepstep.models.init import init_weights
from keepstep.models.lora import init_adapters
from keepstep.models.moe import router_biases
from keepstep.models.quantized_weight import QuantizedWeight, weight_slots
from keepstep.models.transformer import Transformer
from keepstep.observe.run_folder import RunFolder

WeightsId = dict[str, Any]
"""Identifies the weights that a run started from by their content, in plain values: a folder may change later."""


def load_initial_weights(model: Transformer, config: RunConfig, expected: WeightsId | None = None) -> WeightsId | None:
    """First weights of a model on its device, sharded or whole; adapters start so that they change nothing.

    Returns which weights were loaded, None where a seed made them. With `expected`, any other weights are an error.
    """
    loaded: WeightsId | None = None
    if config.finetune.start_from:
        loaded = load_pretrained(model, Path(config.finetune.start_from), expected)
    else:
        init_weights(model, config.seed)
    if config.lora.rank:
        init_adapters(model, config.seed)
    return loaded


def load_pretrained(model: Transformer, where: Path, expected: WeightsId | None = None) -> WeightsId:
    """Load a folder's weights into a model and leave its adapters alone. Each process reads its own shard.

    Raises where the folder no longer holds the `expected` weights: on others, trained adapters mean nothing.
    """
    if is_hf_folder(where):
        found = {"fingerprint": fingerprint(where)}
        if expected not in (None, found):
            raise _changed(where)
        load_hf(model, where)
        return found
    config = read_run_config(where)
    slots = {name: item for name, item in weight_slots(model) if not name.endswith(("lora_a", "lora_b"))}
    weights = {name: item for name, item in slots.items() if isinstance(item, Tensor)}
    if config.lora.rank:
        raise UsageError(
            f"{where} holds adapters, not whole weights",
            f"keepstep export {where} --hf OUT merges them; start from OUT",
        )
    if expected is not None and "manifest" not in expected:
        raise _changed(where)
    only = expected["manifest"] if expected else ""
    tensors = {"model": {**weights, **router_biases(model)}}
    names = frozenset(f"model.{name}" for name in slots)
    loaded = load_run_checkpoint(where, tensors, through_fp32=True, only=only, elsewhere=names)
    if loaded is None:
        raise _changed(where, expected) if expected else no_checkpoint(where)
    origin: WeightsId = {"step": loaded.step, "manifest": loaded.where.marker.manifest_hash}
    for name, slot in slots.items():
        if isinstance(slot, QuantizedWeight):
            # One at a time: together they would be the model in fp32.
            whole = torch.empty(slot.shape, dtype=torch.float32, device=slot.device)
            into = {"model": {name: whole}}
            if load_run_checkpoint(where, into, only=origin["manifest"], elsewhere=names) is None:
                raise _changed(where, origin)
            slot.store(whole)
    return origin


def load_run_checkpoint(
    where: Path,
    into: dict[str, Any],
    *,
    through_fp32: bool = False,
    only: str = "",
    elsewhere: frozenset[str] = frozenset(),
) -> LoadedStep | None:
    """Load tensors from a run's best weights if it has them, else from its newest checkpoint.

    `through_fp32` converts to the tensors' own precision: frozen weights are bf16, checkpoints fp32. `only` names one
    step by the hash of its manifest, and `elsewhere` tensors that other calls load. Returns None where there is nothing
    to load.
    """
    folder = RunFolder(where)
    config = read_run_config(where)
    newest = Path(config.checkpoint.folder) if config.checkpoint.folder else folder.checkpoints
    buffers = _fp32_buffers(into) if through_fp32 else into
    for place in (folder.root / BEST_FOLDER, newest):
        if place.is_dir() or parse_url(str(place)):
            loaded = Checkpointer(place, CheckpointConfig()).load_newest(buffers, only=only, elsewhere=elsewhere)
            if loaded is not None:
                _copy_buffers(buffers, into)
                return loaded
    return None


def no_checkpoint(where: Path) -> CheckpointError:
    """For a run that has saved nothing yet."""
    return CheckpointError(f"{where} holds no whole checkpoint", "train the run first")


def _changed(where: Path, expected: WeightsId | None = None) -> ConfigError:
    named = f": step {expected['step']} is gone" if expected else ""
    # A ConfigError: unlike a CheckpointError, it cannot be retried.
    return ConfigError(
        f"finetune.start_from is {where}, which does not hold the weights any more that the run started from{named}",
        f"put them back there, or train again from what {where} holds now, under another name",
    )


def _fp32_buffers(into: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {
            name: tensor if tensor.dtype == torch.float32 else torch.empty_like(tensor, dtype=torch.float32)
            for name, tensor in tensors.items()
        }
        for key, tensors in into.items()
    }


@torch.no_grad()
def _copy_buffers(buffers: dict[str, Any], into: dict[str, Any]) -> None:
    for key, tensors in into.items():
        for name, tensor in tensors.items():
            if buffers[key][name] is not tensor:
                tensor.copy_(buffers[key][name])
