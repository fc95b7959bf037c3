import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.observe.columns import Columns, downsample, smooth


def test_columns_that_come_late_or_never_are_gaps() -> None:
    table = Columns()
    table.append([{"step": 1, "loss": 3.0}, {"step": 2, "loss": "NaN"}])
    table.append([{"step": 3, "mfu": 0.5, "note": "text", "sources": {"c4": 1}}])
    assert table.column("loss")[0] == 3.0
    assert np.isnan(table.column("loss")[1:]).all()
    assert table.column("mfu").tolist()[2] == 0.5
    assert np.isnan(table.column("absent")).all()
    assert sorted(table.names) == ["loss", "mfu", "step"]
    assert table.last("step") == 3
    assert math.isnan(Columns().last("step"))


def test_roll_back_removes_and_returns_later_rows() -> None:
    table = Columns()
    table.append([{"step": step, "step_s": 0.5} for step in range(1, 11)])
    gone, count = table.roll_back(7, ("step", "step_s"))
    assert count == 4
    assert gone["step"].tolist() == [7, 8, 9, 10]
    assert gone["step_s"].sum() == 2.0
    table.append([{"step": 7, "step_s": 1.0, "new": 1.0}])
    assert table.column("step").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.isnan(table.column("new")[:6]).all()


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), max_size=700), st.floats(0.0, 0.99))
def test_smooth_equals_the_plain_moving_average(values: list[float], weight: float) -> None:
    average, mass, expected = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            mass = weight * mass + (1 - weight)
        expected.append(average / mass if math.isfinite(value) else math.nan)
    assert smooth(values, weight).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_downsample_keeps_every_extreme(values: list[float], pieces: int) -> None:
    array = np.asarray(values)
    thinned = downsample(np.arange(len(array), dtype=np.float64), array, array, pieces)
    assert len(thinned.steps) <= pieces
    assert min(thinned.low) == pytest.approx(array.min(), rel=1e-6)
    assert max(thinned.high) == pytest.approx(array.max(), rel=1e-6)
    assert thinned.steps[-1] == len(array) - 1


def test_downsample_of_gaps_is_empty() -> None:
    gaps = np.full(5, np.nan)
    assert downsample(np.arange(5.0), gaps, gaps, 10).steps == []
