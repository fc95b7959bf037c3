"""NEFTune: uniform noise on the input embeddings while training, which makes fine-tuned answers less brittle."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from keepstep.models.transformer import Transformer


def add_embedding_noise(model: Transformer, alpha: float, row_parts: int = 1) -> None:
    """Add noise in ±alpha / √(tokens × hidden) to what the embedding returns; evaluation is left alone.

    Tokens are those of a whole row, of which `row_parts` processes hold a part each. A later stage of a pipeline embeds
    nothing and gets no noise.
    """
    if model._modules["embed"] is None:
        return

    def noisy(_module: Any, _inputs: Any, embedded_btd: Tensor) -> Tensor:
        if not model.training:
            return embedded_btd
        bound = alpha / math.sqrt(embedded_btd.shape[1] * row_parts * embedded_btd.shape[2])
        return embedded_btd + torch.empty_like(embedded_btd).uniform_(-bound, bound)

    model.embed.register_forward_hook(noisy)
