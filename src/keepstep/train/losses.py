"""What counts as a loss: every target that is not masked. Pretraining masks nothing; fine-tuning masks prompts."""

from __future__ import annotations

import numpy as np

from keepstep.data.loader import Batch

IGNORED = -100
"""Target value that carries no loss."""


def count_targets(batch: Batch) -> int:
    """Targets of a micro batch that carry a loss."""
    return int(np.count_nonzero(batch.targets != IGNORED))
