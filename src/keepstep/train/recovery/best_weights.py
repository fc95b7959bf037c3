"""The best weights of a run by validation loss, saved apart from its checkpoints, and when to stop early."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol.lease import NO_FENCE, Fence
from keepstep.config.schema import CheckpointConfig, EvaluateConfig


class BestWeights:
    """Gets every validation loss. All processes get the same number, so they decide alike."""

    def __init__(self, folder: Path, config: EvaluateConfig, fence: Fence = NO_FENCE) -> None:
        self._folder = folder
        self._config = config
        self._checkpointer = Checkpointer(folder, CheckpointConfig(keep=1), fence=fence) if config.keep_best else None
        self._lowest = self._saved = math.inf
        self._without_improvement = 0
        self._judged_step = -1
        if self._checkpointer is not None:
            newest = self._checkpointer.find()
            if newest is not None:
                # A resumed run continues with the best it had.
                self._lowest = self._saved = float(self._checkpointer.load(newest, {})["loss"])

    @property
    def out_of_patience(self) -> bool:
        """Whether validation has not improved for as long as the configuration waits."""
        return 0 < self._config.patience <= self._without_improvement

    def lead(self, fence: Fence) -> None:
        """This process saves for all from now on."""
        if self._checkpointer is not None:
            self._checkpointer.fence = fence

    def offer(
        self,
        step: int,
        loss: float,
        weights: Callable[[], dict[str, Any]],
        origin: dict[str, Any] | None = None,
        *,
        write: bool = True,
    ) -> bool:
        """Save these weights if none were better; True when they were saved. Collective; CheckpointError if it fails.

        Without `write` another process saves the same weights.

        `origin` names the weights that the run started with and is saved too: adapters belong to those weights alone.
        """
        if loss < self._lowest:
            self._lowest, self._without_improvement = loss, 0
        elif step != self._judged_step:
            # A resumed run evaluates the step it starts at, which may have been judged before it was saved.
            self._without_improvement += 1
        self._judged_step = step
        if self._checkpointer is None or not loss < self._saved:
            return False
        if write:
            self._checkpointer.save(step, {"model": weights(), "loss": loss, "origin": origin}, {})
        self._saved = loss
        return write

    def start(self, is_first: bool) -> Path | None:
        """The run starts from the beginning: the first process moves the best of an earlier run of its name away.

        Returns where it is now, if there was something.
        """
        self._lowest = self._saved = math.inf
        if not is_first or not self._folder.is_dir():
            return None
        moved_to = self._folder.with_name(f"{self._folder.name}.old")
        shutil.rmtree(moved_to, ignore_errors=True)
        return self._folder.rename(moved_to)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        # Infinity before the first validation: JSON has none, and other tools read manifests too.
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return {"lowest": lowest, "without": self._without_improvement, "step": self._judged_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's values. Weights saved after it stay the best until there are better ones."""
        lowest = state["lowest"]
        self._lowest = math.inf if lowest is None else float(lowest)
        self._without_improvement = int(state["without"])
        # Checkpoints of earlier versions have no step.
        self._judged_step = int(state.get("step", -1))

    def close(self) -> None:
        """Release the memory that saves go through."""
        if self._checkpointer is not None:
            self._checkpointer.close()
