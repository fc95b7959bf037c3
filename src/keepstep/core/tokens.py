"""Token ids outside the vocabulary."""

from __future__ import annotations

IGNORE_INDEX = -100
"""Target id that adds no loss, as in torch's cross-entropy."""
