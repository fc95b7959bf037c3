from __future__ import annotations

import traceback

import numpy as np
import pytest

from keepstep.config.load import load_config
from keepstep.core.errors import ConfigError, UsageError
from keepstep.library.overrides import hints_in_traceback, words_of


def test_overrides_of_three_spellings_are_equal() -> None:
    spellings = [{"lr": 0.25}, {"optimizer": {"lr": 0.25}}, {"optimizer.lr": np.float64(0.25)}]
    assert {tuple(words_of(None, one)) for one in spellings} == {("optimizer.lr=0.25",)}
    assert words_of({"optimizer": {"lr": 0.5}}, {"lr": 0.25})[-1] == "optimizer.lr=0.25"


def test_overrides_reach_the_config_with_their_types() -> None:
    given = {"data": {"blend": {"a b/c": 1.0, "d": 2.0}}, "name": "true", "evaluate": {"prompts": ["a: b", "c"]}}
    config = load_config(None, words_of(given, {"max_duration": "5ba", "vocab": 300})).config
    assert dict(config.data.blend) == {"a b/c": 1.0, "d": 2.0}
    assert (config.name, config.model.vocab, str(config.max_duration)) == ("true", 300, "5ba")
    assert list(config.evaluate.prompts) == ["a: b", "c"]


def test_overrides_refuse_a_name_of_several_sections() -> None:
    with pytest.raises(UsageError, match="interval is a field of several sections") as error:
        words_of(None, {"interval": "5ba"})
    assert error.value.hint is not None
    assert '{"interval": …}' in error.value.hint


def test_traceback_has_the_hint_of_each_problem() -> None:
    for wrong, count in (({"lrr": 1}, 1), ({"lrr": 1, "global_bach": 2}, 2)):
        with pytest.raises(ConfigError) as error, hints_in_traceback():
            load_config(None, words_of(None, wrong))
        text = "".join(traceback.format_exception(error.value))
        assert text.count("hint: did you mean") == count
