from __future__ import annotations

import pytest

from keepstep.config.schema import ModelConfig
from tests.models.model_variants import VARIANTS


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> ModelConfig:
    """Every way a decoder can differ."""
    return VARIANTS[request.param]
