"""What a checkpoint holds: every number that the next step depends on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from keepstep.train.clock import Clock
from keepstep.train.optimizer import Optimizers
from keepstep.train.scaler import LossScaler


@dataclass(frozen=True)
class Moment:
    """Where a run stands, beside its weights and its optimizer."""

    numbers: dict[str, Any]
    rng: dict[str, torch.Tensor]


@dataclass
class TrainState:
    """The live parts whose state is saved and restored."""

    model: nn.Module
    optimizers: Optimizers
    scaler: LossScaler
    clock: Clock

    def tensors(self) -> dict[str, Any]:
        """What is saved; loading fills these and `adopt` takes them over."""
        return {"model": self.weights(), "optimizer": self.optimizers.state(), "rank": _rng_tensors()}

    def weights(self) -> dict[str, Any]:
        """Trained weights by name, in fp32; frozen ones come back from where the run starts."""
        return dict(self.optimizers.weights())

    def numbers(self) -> dict[str, Any]:
        """Plain values that go along."""
        return {"clock": self.clock.state(), "scaler": self.scaler.state()}

    def moment(self) -> Moment:
        """Where the run stands beside its tensors: numbers and random generators, in copies."""
        return Moment(self.numbers(), _rng_tensors())

    def return_to(self, moment: Moment) -> None:
        """Take back steps that changed no tensor."""
        self._adopt_beside(moment.numbers, moment.rng)

    def adopt(self, numbers: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Take over what a load returned (plain values) and filled (`tensors()`)."""
        self.optimizers.adopt(tensors["model"])
        self._adopt_beside(numbers, tensors["rank"])

    def _adopt_beside(self, numbers: dict[str, Any], rng: dict[str, torch.Tensor]) -> None:
        self.clock.restore(numbers["clock"])
        self.scaler.restore(numbers["scaler"])
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
