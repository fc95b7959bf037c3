"""A trained model, whole and on one device, out of a run's newest checkpoint: for evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.load import load_config
from keepstep.config.schema import CheckpointConfig, RunConfig
from keepstep.core.errors import CheckpointError
from keepstep.models.cache import KeyValueCache
from keepstep.models.transformer import Transformer
from keepstep.observe.folder import RunFolder


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
            logits: Tensor = self.model(new, cache=cache)[0, -1]
            return logits

        return forward


def open_trained(folder: RunFolder, device: torch.device | None = None) -> TrainedModel:
    """Load the newest whole checkpoint of a run."""
    config = load_config(folder.config).config
    model = Transformer(config.model)
    place = Path(config.checkpoint.folder) if config.checkpoint.folder else folder.checkpoints
    checkpointer = Checkpointer(place, CheckpointConfig())
    weights = dict(model.named_parameters())
    loaded = checkpointer.load_newest({"model": weights})
    if loaded is None:
        raise CheckpointError(f"{place} holds no whole checkpoint", "train the run first")
    return TrainedModel(model.eval().to(device or "cpu"), config, loaded.step)
