"""Loss scaling for fp16: lifts gradients that are too small for the format; a step that overflows is skipped."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from keepstep.models.ops.backend import backend


class LossScaler:
    """Doubles the scale after a run of good steps and halves it on an overflow; when off it stays at 1."""

    def __init__(self, enabled: bool, initial: float = 2.0**15, growth_interval: int = 1000) -> None:
        self.enabled = enabled
        self.scale = initial if enabled else 1.0
        self._growth_interval = growth_interval
        self._good_steps = 0

    def is_finite(self, norm: Tensor) -> bool:
        """Whether the gradients of a step may reach the weights: reads from the device, with fp16 only."""
        return backend().is_finite(norm) if self.enabled else True

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step."""
        if not self.enabled:
            return
        if not finite:
            self.scale = max(1.0, self.scale / 2)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps % self._growth_interval == 0:
            self.scale *= 2

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's numbers."""
        if self.enabled:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
