"""A model on one device, whole and in fp32, from a run or a Hugging Face folder: for export, evaluation and chat."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from keepstep.config.schema import LoraConfig, RunConfig
from keepstep.core.errors import HardwareError, UsageError
from keepstep.core.messages import invalid_value
from keepstep.interop.hf_folder import is_hf_folder, load_hf, read_hf_shape
from keepstep.interop.initial_weights import load_initial_weights, load_pretrained, load_run_checkpoint, no_checkpoint
from keepstep.interop.run_source import read_run_config, read_run_facts
from keepstep.models.lora import apply_lora, merge_lora
from keepstep.models.moe import router_biases
from keepstep.models.transformer import Transformer


def open_device(wanted: str) -> torch.device:
    """The device that `--device` names: cpu, cuda, cuda:1; auto is a GPU where there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", wanted):
        raise UsageError(invalid_value("--device", wanted, "must be auto, cpu, cuda or cuda:NUMBER"), "--device auto")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise HardwareError(f"--device is {wanted}, but torch finds no such GPU here", "--device cpu")
    return device


def load_full_model(where: Path, *, merge: bool = True, only: str = "") -> tuple[Transformer, RunConfig, int]:
    """A model on the CPU with its configuration and step (0 for a Hugging Face folder); adapters are merged.

    `only` names one step of a run by the hash of its manifest.
    """
    if is_hf_folder(where):
        shape = read_hf_shape(where)
        model = Transformer(shape)
        load_hf(model, where)
        return model.eval(), replace(RunConfig(), name=where.resolve().name, model=shape), 0
    config = read_run_config(where)
    model = Transformer(config.model)
    start = config.finetune.start_from
    if config.lora.rank:
        apply_lora(model, config.lora)
        if not start:
            load_initial_weights(model, config)
    trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
    loaded = load_run_checkpoint(where, {"model": {**trained, **router_biases(model)}}, only=only)
    if loaded is None:
        raise no_checkpoint(where)
    if config.lora.rank and start:
        # The adapters belong to the weights they were trained on, not to the newest in that folder.
        load_pretrained(model, Path(start), loaded.values.get("origin"))
    if config.lora.rank and merge:
        merge_lora(model)
    return model.eval(), config, loaded.step


def load_initial_model(where: Path) -> tuple[Transformer, RunConfig, int]:
    """The model that a run started from, to compare its training with."""
    if is_hf_folder(where) or "imported_from" in read_run_facts(where):
        return load_full_model(where)
    config = read_run_config(where)
    if config.checkpoint.resume_from:
        raise UsageError(
            f"{where} started from the weights of {config.checkpoint.resume_from}",
            "name the run that these belong to",
        )
    model = Transformer(config.model)
    loaded = load_run_checkpoint(where, {})
    expected = loaded.values.get("origin") if loaded else None
    load_initial_weights(model, replace(config, lora=LoraConfig()), expected)
    return model.eval(), config, 0
