"""Parameter groups, AdamW or Muon, and their state by parameter name so that any later world size can load it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.config.schema import OptimizerConfig
from keepstep.train.optim.gradients import scale_gradients
from keepstep.train.optim.master_weights import GradientHolder, MasterWeights, SplitAdamW
from keepstep.train.optim.muon import Muon


class Optimizers:
    """One or two torch optimizers that share a schedule and a clipping factor."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, masters: MasterWeights | None = None) -> None:
        self._masters = masters
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parts = _build(self._names, config, masters)
        self._peaks = [[float(group["lr"]) for group in part.param_groups] for part in self._parts]
        for part in self._parts:
            _fill_state(part)

    @property
    def gradient_holders(self) -> list[nn.Parameter] | list[GradientHolder]:
        """Objects with the gradient of each trainable parameter in their `grad`."""
        return self._masters.holders() if self._masters else list(self._names)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters, in the model's order."""
        return list(self._names)

    def take_gradients(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Use these fp32 gradients in the next step."""
        if self._masters:
            self._masters.take_gradients(gradients)
            return
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def accumulate_gradients(self) -> None:
        """Called after each of several micro batches."""
        if self._masters:
            self._masters.accumulate_gradients()

    def step(self, share: float, factor: Tensor) -> None:
        """Update the weights at `share` of the peak learning rate with gradients multiplied by `factor`.

        A factor that is not finite leaves weights, moments and counts as they are; the host does not wait for it.
        """
        for part, peaks in zip(self._parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            if isinstance(part, SplitAdamW | Muon):
                part.update(factor)
            else:
                parameters = [p for group in part.param_groups for p in group["params"]]
                scale_gradients(parameters, factor)
                # torch's fused kernel reads this: it then writes nothing and undoes its count.
                part.found_inf = (~torch.isfinite(factor)).float().to(parameters[0].device)  # type: ignore[attr-defined]
                part.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        if self._masters:
            self._masters.zero_grad()
        for parameter in self._names:
            parameter.grad = None

    def weights(self) -> dict[str, Tensor]:
        """All trainable weights in fp32 by name: the live tensors, or copies where they are stored split.

        Copies stay on the device where it has room for them, so that a save can read them behind training.
        """
        if self._masters is None:
            return {name: parameter for parameter, name in self._names.items()}
        keep = has_room(4 * sum(parameter.numel() for parameter in self._names), next(iter(self._names)).device)
        copies = {name: self._masters.read(parameter) for parameter, name in self._names.items()} if keep else {}
        return copies or {name: self._masters.read(parameter).cpu() for parameter, name in self._names.items()}

    def adopt(self, weights: dict[str, Tensor]) -> None:
        """Take over the tensors of `weights()` that a checkpoint has filled."""
        if self._masters is not None:
            for parameter, name in self._names.items():
                self._masters.write(parameter, weights[name].to(parameter.device))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live state tensors by parameter name: saving reads them, loading fills them in place."""
        return {self._names[parameter]: dict(slots) for parameter, slots in self._slots()}

    def _slots(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        for parameter in self._names:
            for part in self._parts:
                if parameter in part.state:
                    yield parameter, part.state[parameter]


def has_room(size_bytes: int, device: torch.device) -> bool:
    """Whether a GPU has room for this much more; host memory always counts as enough."""
    return device.type != "cuda" or size_bytes < 0.8 * torch.cuda.mem_get_info(device)[0]


def _build(
    names: dict[nn.Parameter, str], config: OptimizerConfig, masters: MasterWeights | None
) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    if config.name == "muon":
        matrices = [p for p, name in names.items() if _is_matrix(p, name) and name.startswith("blocks.")]
    chosen = set(matrices)
    groups = _decay_groups({p: n for p, n in names.items() if p not in chosen}, config)
    parts: list[torch.optim.Optimizer] = []
    if groups and masters:
        parts.append(SplitAdamW(groups, masters, lr=config.lr, betas=config.betas, eps=config.eps))
    elif groups:
        parts.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True))
    if matrices:
        parts.append(Muon(matrices, config.muon_lr, config.muon_momentum, config.weight_decay, masters))
    return parts


def _decay_groups(names: dict[nn.Parameter, str], config: OptimizerConfig) -> list[dict[str, Any]]:
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter, name in names.items():
        is_table = name.startswith(("embed.", "position."))
        wanted = config.decay_embeddings if is_table else (_is_matrix(parameter, name) or config.decay_norms)
        (decayed if wanted else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_matrix(parameter: nn.Parameter, name: str) -> bool:
    """Whether a parameter is a matrix or a stack of them; the biases of experts are stacked vectors."""
    return parameter.ndim >= 2 and not name.endswith("_bias")


def _fill_state(part: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, so that a resume can load into it."""
    device = part.param_groups[0]["params"][0].device
    # One step count for all parameters, on the device; torch's own kernel needs one per parameter.
    shared = torch.zeros((), dtype=torch.float32, device=device)
    for group in part.param_groups:
        for parameter in group["params"]:
            if isinstance(part, Muon):
                part.state[parameter] = {"momentum": torch.zeros_like(parameter, dtype=torch.float32)}
                continue
            part.state[parameter] = {
                "step": shared if isinstance(part, SplitAdamW) else torch.zeros_like(shared),
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
            }
