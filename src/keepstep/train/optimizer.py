"""Parameter groups, AdamW or Muon, and their state by parameter name so that any later world size can load it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.config.schema import OptimizerConfig
from keepstep.train.muon import Muon


class Optimizers:
    """One or two torch optimizers that share a schedule and a clipping norm."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parts = _build(self._names, config)
        self._peaks = [[float(group["lr"]) for group in part.param_groups] for part in self._parts]
        for part in self._parts:
            _fill_state(part)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters, in the model's order."""
        return list(self._names)

    def step(self, share: float) -> None:
        """Update the weights at `share` of the peak learning rate."""
        for part, peaks in zip(self._parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            part.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live state tensors by parameter name: saving reads them, loading fills them in place."""
        return {self._names[parameter]: dict(slots) for parameter, slots in self._slots()}

    def _slots(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        for parameter in self._names:
            for part in self._parts:
                if parameter in part.state:
                    yield parameter, part.state[parameter]


def _build(names: dict[nn.Parameter, str], config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    if config.name == "muon":
        matrices = [p for p, name in names.items() if p.ndim == 2 and name.startswith("blocks.")]
    chosen = set(matrices)
    groups = _decay_groups({p: n for p, n in names.items() if p not in chosen}, config)
    parts: list[torch.optim.Optimizer] = []
    if groups:
        device_type = next(iter(names)).device.type
        adamw = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=device_type in ("cuda", "cpu")
        )
        parts.append(adamw)
    if matrices:
        parts.append(Muon(matrices, config.muon_lr, config.muon_momentum, config.weight_decay))
    return parts


def _decay_groups(names: dict[nn.Parameter, str], config: OptimizerConfig) -> list[dict[str, Any]]:
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter, name in names.items():
        is_table = name.startswith(("embed.", "position."))
        wanted = config.decay_embeddings if is_table else (parameter.ndim >= 2 or config.decay_norms)
        (decayed if wanted else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _fill_state(part: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, without taking a step: a resume then loads into it."""
    for group in part.param_groups:
        for parameter in group["params"]:
            if isinstance(part, Muon):
                part.state[parameter] = {"momentum": torch.zeros_like(parameter)}
                continue
            on_device = {"device": parameter.device} if group.get("fused") else {}
            part.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, **on_device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
