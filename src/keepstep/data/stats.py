"""Plain numbers about token streams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 22


def token_counts(tokens: NDArray[Any], vocab: int = 0) -> NDArray[np.int64]:
    """How often each id occurs, a chunk of a mapped file at a time."""
    counts = np.zeros(vocab, dtype=np.int64)
    for first in range(0, len(tokens), _CHUNK):
        here = np.bincount(np.asarray(tokens[first : first + _CHUNK]).astype(np.int64), minlength=len(counts))
        if len(here) > len(counts):
            here[: len(counts)] += counts
            counts = here.astype(np.int64)
        else:
            counts += here
    return counts


def unigram_perplexity(train: NDArray[Any], valid: NDArray[Any], vocab: int = 0) -> float:
    """Perplexity on `valid` of knowing only how frequent each token is in `train` (add-one smoothing).

    A model that learnt anything about order is below this.
    """
    expected = token_counts(valid, vocab)
    counts = token_counts(train, len(expected))
    expected = np.pad(expected, (0, len(counts) - len(expected)))
    log_share = np.log(counts + 1.0) - math.log(float(counts.sum()) + len(counts))
    return float(np.exp(-(expected * log_share).sum() / max(1, int(expected.sum()))))
