"""The best weights of a run by validation loss, kept apart from its checkpoints, and when to stop looking."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.schema import CheckpointConfig, EvaluateConfig


class BestWeights:
    """Told every validation loss. All processes are told the same number, so they decide alike."""

    def __init__(self, folder: Path, config: EvaluateConfig) -> None:
        self._folder = folder
        self._config = config
        self._checkpointer = Checkpointer(folder, CheckpointConfig(keep=1)) if config.keep_best else None
        self._lowest = self._kept = math.inf
        self._without = 0
        self._judged_step = -1
        if self._checkpointer is not None:
            kept = self._checkpointer.find()
            if kept is not None:
                # A resumed run goes on from the best it had.
                self._lowest = self._kept = float(self._checkpointer.load(kept, {})["loss"])

    @property
    def enough(self) -> bool:
        """Whether validation has not improved for as long as the configuration waits."""
        return 0 < self._config.patience <= self._without

    def offer(
        self, step: int, loss: float, weights: Callable[[], dict[str, Any]], origin: dict[str, Any] | None = None
    ) -> bool:
        """Keep these weights if none were better; True when they were. Collective; CheckpointError if it fails.

        `origin` says what the run began with and is kept with them: adapters belong to those weights alone.
        """
        if loss < self._lowest:
            self._lowest, self._without = loss, 0
        elif step != self._judged_step:
            # A run that goes on evaluates the step it begins at, which may have been judged before it was saved.
            self._without += 1
        self._judged_step = step
        if self._checkpointer is None or not loss < self._kept:
            return False
        self._checkpointer.save(step, {"model": weights(), "loss": loss, "origin": origin}, {})
        self._kept = loss
        return True

    def begin(self, is_first: bool) -> Path | None:
        """The run begins anew: what an earlier one of its name kept is not its best, and the first process moves it.

        Gives back where it lies now, if there was something.
        """
        self._lowest = self._kept = math.inf
        if not is_first or not self._folder.is_dir():
            return None
        aside = self._folder.with_name(f"{self._folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        return self._folder.rename(aside)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint: how long it is since validation improved, and when it was looked at last."""
        # Before the first validation there is none: JSON has no infinity, and others read manifests too.
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return {"lowest": lowest, "without": self._without, "step": self._judged_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's values. Weights that were kept after it stay the best until there are better."""
        lowest = state["lowest"]
        self._lowest, self._without = math.inf if lowest is None else float(lowest), int(state["without"])
        # Checkpoints of earlier versions do not say.
        self._judged_step = int(state.get("step", -1))

    def close(self) -> None:
        """Let go of the memory that saves go through."""
        if self._checkpointer is not None:
            self._checkpointer.close()
