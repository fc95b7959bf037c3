"""The best weights of a run by validation loss, kept apart from its checkpoints, and when to stop looking."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.schema import CheckpointConfig, EvaluateConfig


class BestWeights:
    """Told every validation loss. All processes are told the same number, so they decide alike."""

    def __init__(self, folder: Path, config: EvaluateConfig) -> None:
        self._config = config
        self._checkpointer = Checkpointer(folder, CheckpointConfig(keep=1)) if config.keep_best else None
        self._lowest = math.inf
        self._without = 0
        if self._checkpointer is not None:
            kept = self._checkpointer.find()
            if kept is not None:
                # A resumed run goes on from the best it had.
                self._lowest = float(self._checkpointer.load(kept, {})["loss"])

    @property
    def enough(self) -> bool:
        """Whether validation has not improved for as long as the configuration waits."""
        return 0 < self._config.patience <= self._without

    def offer(self, step: int, loss: float, weights: Callable[[], dict[str, Any]]) -> bool:
        """Keep these weights if none were better; True when they were kept. Collective."""
        if not loss < self._lowest:
            self._without += 1
            return False
        self._lowest, self._without = loss, 0
        if self._checkpointer is None:
            return False
        self._checkpointer.save(step, {"model": weights(), "loss": loss}, {})
        return True
