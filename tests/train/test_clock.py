from __future__ import annotations

from itertools import pairwise

import pytest

from keepstep.config.schema import ScheduleConfig
from keepstep.core.units import Duration, Pace
from keepstep.train.clock import Clock, Interval
from keepstep.train.optim.schedule import lr_share

PACE = Pace(samples_per_step=4, tokens_per_sample=10, samples_per_epoch=100)


@pytest.mark.parametrize(
    ("text", "steps"), [("7ba", 7), ("10sp", 3), ("400tok", 10), ("401tok", 11), ("2ep", 50), ("0.5ep", 13)]
)
def test_every_unit_becomes_steps_rounded_up(text: str, steps: int) -> None:
    assert PACE.steps(Duration.parse(text)) == steps


def test_clock_reaches_durations_in_seconds() -> None:
    clock = Clock(PACE)
    clock.advance(59.0)
    assert not clock.reached(Duration.parse("1min"))
    clock.advance(2.0)
    assert clock.reached(Duration.parse("1min"))


def test_clock_restores_its_state_at_another_batch_size() -> None:
    clock = Clock(PACE)
    for _ in range(5):
        clock.advance(1.0)
    resumed = Clock(Pace(samples_per_step=8, tokens_per_sample=10, samples_per_epoch=100))
    resumed.restore(clock.state())
    assert (resumed.step, resumed.samples) == (5, 20)
    resumed.advance(1.0)
    assert resumed.samples == 28


def test_interval_is_due_once_and_zero_never() -> None:
    clock = Clock(PACE)
    every_two, never = Interval(Duration.parse("2ba"), clock), Interval(Duration.parse("0ba"), clock)
    seen = []
    for _ in range(5):
        clock.advance(0.1)
        seen.append((every_two.due(), every_two.due(), never.due()))
    assert [due for due, _, _ in seen] == [False, True, False, True, False]
    assert not any(again or zero for _, again, zero in seen)


def test_interval_after_resume_is_not_due_again() -> None:
    clock = Clock(PACE, step=4, samples=16)
    interval = Interval(Duration.parse("4ba"), clock)
    clock.advance(0.1)
    assert not interval.due()


@pytest.mark.parametrize("duration", ["64sp", "256tok", "1ep"])
def test_clock_counts_data_at_any_batch_size(duration: str) -> None:
    to_see = Duration.parse(duration)
    # Eight steps of four samples are done, and the run goes on with eight samples a step.
    clock = Clock(Pace(samples_per_step=8, tokens_per_sample=4, samples_per_epoch=64), step=8, samples=32)
    assert not clock.reached(to_see)
    assert clock.steps_towards(to_see) == 4, "half of what is now eight steps"
    for _ in range(4):
        clock.advance(0.1)
    assert clock.reached(to_see)
    assert clock.reached(Duration.parse("12ba"))


@pytest.mark.parametrize("name", ["cosine", "linear", "two_stage", "wsd", "constant"])
def test_every_schedule_rises_to_peak_and_ends_at_final(name: str) -> None:
    config = ScheduleConfig(name=name, final=0.1)  # type: ignore[arg-type]
    shares = [lr_share(config, step, 100, 10) for step in range(101)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(shares) == pytest.approx(1.0)
    assert shares[100] == pytest.approx(1.0 if name == "constant" else 0.1)
    assert all(a >= b - 1e-12 for a, b in pairwise(shares[10:])), "never rises after warmup"


def test_schedule_shapes_have_known_midpoints() -> None:
    assert lr_share(ScheduleConfig(final=0.0), 50, 100, 0) == pytest.approx(0.5)
    bent = ScheduleConfig(name="two_stage", stage_at=0.25, stage_lr=0.4, final=0.0)
    assert lr_share(bent, 25, 100, 0) == pytest.approx(0.4)


def test_wsd_stays_at_the_peak_until_its_decay() -> None:
    config = ScheduleConfig(name="wsd", decay_share=0.2, final=0.0)
    assert lr_share(config, 79, 100, 0) == 1.0
    assert lr_share(config, 90, 100, 0) == pytest.approx(0.5)
