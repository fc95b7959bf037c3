from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from model_variants import VARIANTS

from keepstep.config.schema import ModelConfig


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> ModelConfig:
    """Every way a decoder can differ."""
    return VARIANTS[request.param]
