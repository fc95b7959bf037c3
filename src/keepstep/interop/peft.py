"""Adapters as Hugging Face PEFT files: adapter_config.json and adapter_model.safetensors.

Where their model has queries, keys and values in one matrix (GPT-2, MPT, Phi-3), our three adapters become one adapter
of three times the rank that is zero outside each part. It computes the same sum. Phi-3's gate and up are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.config.hf_experts import DEEPSEEK
from keepstep.config.hf_rotary import Family
from keepstep.config.schema import LoraConfig
from keepstep.core.files import write_json
from keepstep.interop.hf_names import rules
from keepstep.interop.safetensors_files import write_file
from keepstep.models.lora import LoraLinear, lora_modules, projection_factors
from keepstep.models.transformer import Transformer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@torch.no_grad()
def save_adapter(model: Transformer, lora: LoraConfig, family: Family, base: str, folder: Path) -> None:
    """Write the adapters of a whole model; `base` names the model they belong to."""
    tensors: dict[str, Tensor] = {}
    patterns: dict[str, int] = {}
    modules: set[str] = set()
    for module, factor_a, factor_b in _their_factors(model, lora, family):
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = factor_a.detach().float().cpu().contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = factor_b.detach().float().cpu().contiguous()
        short = _short(module)
        modules.add(short)
        if factor_a.shape[0] != lora.rank:
            patterns[short] = factor_a.shape[0]
    folder.mkdir(parents=True, exist_ok=True)
    write_file(tensors, folder / WEIGHTS)
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "rank_pattern": patterns,
        # Keeps alpha / rank the same where the rank is a multiple.
        "alpha_pattern": {name: lora.alpha * rank / lora.rank for name, rank in patterns.items()},
        "fan_in_fan_out": family == "gpt2",
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / CONFIG, described)


def _their_factors(model: Transformer, lora: LoraConfig, family: Family) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Their module names with the factors A [r, i] and B [o, r] of each."""
    weights = {rule.ours: rule for rule in rules(model.config, family)}
    for name, linear in lora_modules(model):
        rule = weights[f"{name}.weight"]
        theirs = [item.removesuffix(".weight") for item in rule.theirs]
        factors = projection_factors(name, linear, lora.targets_in(model.config))
        if len(theirs) > 1:
            for short, (factor_a, factor_b) in factors.items():
                yield next(item for item in theirs if f"{short}_proj" in item), factor_a, factor_b
        elif len(linear.shape.slots) == 1:
            ((factor_a, factor_b),) = factors.values()
            # Rows that latent attention rotates are in another order.
            yield theirs[0], factor_a, rule.unpack(factor_b)[0] if family in DEEPSEEK else factor_b
        else:
            names = ("gate", "up") if name.endswith("gate_up") else ("q", "k", "v")
            yield theirs[0], linear.lora_a, _fused_rows(linear, factors, names)


def _fused_rows(linear: LoraLinear, factors: dict[str, tuple[Tensor, Tensor]], names: tuple[str, ...]) -> Tensor:
    """B of fused projections in their order (all queries, all keys, all values), zero outside each one's own rank."""
    grouped = linear.grouped()
    # All projections but the first have one slot in a group.
    ends = range(grouped.shape[1] - len(names) + 1, grouped.shape[1] + 1)
    parts = (grouped[:, start:end] for start, end in pairwise((0, *ends)))
    rank = linear.shape.rank
    rows = []
    for part, short in zip(parts, names, strict=True):
        count = part.shape[:3].numel()
        block = part.new_zeros(count, linear.shape.projections * rank)
        if short in factors:
            number = list(factors).index(short)
            block[:, number * rank : (number + 1) * rank] = factors[short][1]
        rows.append(block)
    return torch.cat(rows)


def _short(module: str) -> str:
    """The module's own name, with its parent's where two modules share it (GPT-2's c_proj)."""
    parent, name = module.split(".")[-2:]
    return f"{parent}.{name}" if name == "c_proj" else name
