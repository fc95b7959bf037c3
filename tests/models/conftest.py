from __future__ import annotations

import pytest
from model_variants import VARIANTS

from keepstep.config.schema import ModelConfig


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> ModelConfig:
    """Every way a decoder can differ."""
    return VARIANTS[request.param]
