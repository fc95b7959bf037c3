"""A trained model, whole and on one device, out of a run's newest checkpoint: for evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keepstep.config.schema import RunConfig
from keepstep.models.cache import KeyValueCache
from keepstep.models.transformer import Transformer
from keepstep.observe.folder import RunFolder
from keepstep.train.start import whole_model


@dataclass(frozen=True)
class TrainedModel:
    """Weights of one step, with the configuration they were trained under."""

    model: Transformer
    config: RunConfig
    step: int

    def next_token_logits(self) -> Callable[[Tensor], Tensor]:
        """A forward for `evaluate.generate`: all tokens so far in, logits of the last one out; keeps a cache."""
        device = next(self.model.parameters()).device
        cache = KeyValueCache(self.config.model.layers, self.config.model.seq_len)

        def forward(tokens: Tensor) -> Tensor:
            new = tokens[:, cache.length :].to(device)
            logits: Tensor = self.model(new, cache=cache, last_only=True)[0, -1]
            return logits

        return forward


def open_trained(folder: RunFolder, device: torch.device | None = None) -> TrainedModel:
    """A run's best weights where it kept them, else those of its newest whole checkpoint; adapters are merged."""
    model, config, step = whole_model(folder.root)
    return TrainedModel(model.to(device or "cpu"), config, step)
