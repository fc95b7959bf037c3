"""The guard's judgement: plain numbers in, a verdict out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from keepstep.config.schema import GuardConfig
from keepstep.core.errors import DivergedError
from keepstep.resilience.guard import Guard, Reading, Verdict


def reading(step: int, loss: float = 2.0, norm: float = 1.0) -> Reading:
    return Reading(step, loss, norm, first_sample=8 * (step - 1), count=8)


def told(count: int = 30, **config: Any) -> Guard:
    """A guard that has seen some ordinary steps."""
    guard = Guard(GuardConfig(**config))
    for step in range(1, count + 1):
        good = reading(step, 2.0 + 0.05 * (step % 3), 1.0 + 0.1 * (step % 2))
        assert guard.judge(good) == Verdict()
        assert guard.outlier(good) is None
    return guard


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_dealt_with_by_policy(value: float) -> None:
    for loss, norm in ((value, 1.0), (2.0, value)):
        careful = told()
        assert careful.judge(reading(31, loss, norm)) == Verdict("nan", "retry")
        assert careful.judge(reading(31, loss, norm)) == Verdict("nan", "skip")
        assert told(nan="skip").judge(reading(31, loss, norm)) == Verdict("nan", "skip")
        assert told(nan="rollback").judge(reading(31, loss, norm)) == Verdict("nan", "rollback")
        with pytest.raises(DivergedError, match="at step 31") as caught:
            told(nan="stop").judge(reading(31, loss, norm))
        assert caught.value.hint


def test_scaled_losses_overflow_in_their_norm_only() -> None:
    guard = Guard(GuardConfig(), scaled=True)
    assert guard.judge(reading(1, norm=math.inf)) == Verdict()
    assert guard.judge(reading(2, loss=math.nan)).what == "nan"


def test_a_spike_is_far_above_what_the_last_losses_vary_by() -> None:
    assert told(spike="rollback").judge(reading(31, 3.0)) == Verdict("spike", "rollback")
    assert told(spike="rollback").judge(reading(31, 2.3)) == Verdict()
    assert told(spike="rollback", spike_factor=2.0).judge(reading(31, 2.3)).what == "spike"
    assert told().judge(reading(31, 30.0)) == Verdict(), "ignored unless asked for"


def test_few_losses_or_a_falling_one_make_no_spike() -> None:
    assert told(10, spike="rollback").judge(reading(11, 30.0)) == Verdict()
    assert told(spike="rollback").judge(reading(31, 0.1)) == Verdict()


def test_a_spike_that_was_rolled_back_does_not_become_the_usual() -> None:
    guard = told(spike="rollback", limit=100)
    assert {guard.judge(reading(31, 9.0)).what for _ in range(40)} == {"spike"}


def test_the_limit_counts_within_the_window_only() -> None:
    guard = told(nan="skip", window=20, limit=2)
    for step in (31, 32):
        assert guard.judge(reading(step, math.nan)).action == "skip"
    for step in range(33, 53):
        guard.judge(reading(step))
    for step in (53, 54):
        assert guard.judge(reading(step, math.nan)).action == "skip"
    with pytest.raises(DivergedError, match=r"3 of the last 20 steps went wrong: guard\.limit allows 2"):
        guard.judge(reading(55, math.nan))


def test_a_limit_of_zero_ends_the_run_at_once() -> None:
    with pytest.raises(DivergedError):
        told(limit=0).judge(reading(31, math.nan))


def test_a_norm_far_above_the_usual_is_an_outlier() -> None:
    guard = told()
    assert guard.outlier(reading(31, norm=50.0)) == pytest.approx(1.05)
    assert guard.outlier(reading(32, norm=5.0)) is None
    assert told(outlier_factor=0.0).outlier(reading(31, norm=50.0)) is None
    assert told(5).outlier(reading(6, norm=50.0)) is None, "too few to know what is usual"


def test_samples_without_a_target_are_skipped_by_any_policy_and_named() -> None:
    for policy in ("retry", "skip", "rollback", "stop"):
        empty = Reading(31, math.nan, math.nan, first_sample=240, count=8, targets=0)
        assert told(nan=policy).judge(empty) == Verdict("no targets", "skip")
        assert str(empty) == "step 31: no token of its samples has a target"
    guard = told(limit=2)
    for step in (31, 32):
        guard.judge(Reading(step, math.nan, math.nan, 8 * step, 8, targets=0))
    with pytest.raises(DivergedError, match="no token of the samples of step 33 has a target, and 3 of") as caught:
        guard.judge(Reading(33, math.nan, math.nan, 264, 8, targets=0))
    assert "keepstep data show" in str(caught.value.hint)
