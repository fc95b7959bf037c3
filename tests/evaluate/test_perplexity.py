import math

import pytest

from keepstep.core.errors import DataError
from keepstep.evaluate.perplexity import perplexity


def test_the_mean_is_over_tokens_not_over_batches() -> None:
    result = perplexity(lambda batch: batch, [(2.0 * 10, 10), (5.0 * 1, 1)])
    assert result.loss == pytest.approx(25 / 11)
    assert result.perplexity == pytest.approx(math.exp(25 / 11))
    assert result.tokens == 11


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    assert perplexity(lambda tokens: (tokens * math.log(50368), tokens), [7, 3]).perplexity == pytest.approx(50368)


def test_an_exploded_model_has_infinite_perplexity_instead_of_an_error() -> None:
    assert perplexity(lambda _: (1e6, 1), [0]).perplexity == math.inf


def test_nothing_to_evaluate_is_told() -> None:
    with pytest.raises(DataError, match="no token to evaluate"):
        perplexity(lambda _: (0.0, 0), [1, 2])
