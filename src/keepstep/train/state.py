"""What a checkpoint holds: every number that the next step depends on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keepstep.data.loader import Loader
from keepstep.interop.initial_weights import WeightsId
from keepstep.models.moe import router_biases
from keepstep.models.transformer import Transformer
from keepstep.train.clock import Clock
from keepstep.train.optim.loss_scaler import LossScaler
from keepstep.train.optim.optimizer import Optimizers


@dataclass(frozen=True)
class StepState:
    """What changes with a step next to weights and optimizer: counts and random generators."""

    numbers: dict[str, Any]
    rng: dict[str, torch.Tensor]


@dataclass
class TrainState:
    """The live parts whose state is saved and restored."""

    model: Transformer
    optimizers: Optimizers
    scaler: LossScaler
    clock: Clock
    origin: WeightsId | None = None
    """Which pretrained weights the model started with; None for weights made from the seed."""
    data: Loader | None = None
    """The training data, which may have a state of its own."""
    frozen: Transformer | None = None
    """The model whose weights are those of the start: adapters and a reference belong to them."""

    def tensors(self) -> dict[str, Any]:
        """The tensors to save; loading fills them and `adopt` takes them over."""
        return {"model": self.weights(), "optimizer": self.optimizers.state(), "rank": _rng_tensors()}

    def weights(self) -> dict[str, Any]:
        """Trained weights and router biases by name, in fp32. Frozen ones are not saved: a resumed run reads them."""
        return {**self.optimizers.weights(), **router_biases(self.model)}

    def numbers(self) -> dict[str, Any]:
        """Plain values that are saved with the tensors."""
        numbers = {"clock": self.clock.state(), "scaler": self.scaler.state()}
        stream = self.data and self.data.state_at(self.clock.samples)
        return {**numbers, "stream": stream} if stream else numbers

    def step_state(self) -> StepState:
        """A copy of the numbers and random generators, before a step."""
        return StepState(self.numbers(), _rng_tensors())

    def restore_step_state(self, before: StepState) -> None:
        """Undo steps that changed no weights."""
        self.adopt_numbers(before.numbers, before.rng)

    def adopt(self, numbers: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Take over loaded values, and the tensors that a load has filled."""
        self.optimizers.adopt(tensors["model"])
        self.adopt_numbers(numbers, tensors["rank"])

    def adopt_numbers(self, numbers: dict[str, Any], rng: dict[str, torch.Tensor]) -> None:
        """Take over plain values and random generators, where weights and optimizer have their own way."""
        self.clock.restore(numbers["clock"])
        self.scaler.restore(numbers["scaler"])
        if self.data is not None and "stream" in numbers:
            self.data.restore(numbers["stream"])
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])


def seed_everything(seed: int, rank: int) -> None:
    """Dropout differs between processes; everything else draws from its own generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed * 1_000_003 + rank)


def _rng_tensors() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
