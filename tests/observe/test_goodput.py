from pathlib import Path

import pytest

from keepstep.observe.goodput import account
from keepstep.observe.history import open_history
from keepstep.observe.verdict import judge
from tests.observe.make_runs import Writer


def test_goodput_assigns_every_second_to_one_cause(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0)
    writer.start()
    writer.take(400)
    writer.finish()
    seen = open_history(writer.folder)
    goodput = account(seen, now=1e9)
    assert goodput.wall_s == pytest.approx(writer.now - 1000)
    assert goodput.seconds["startup"] == pytest.approx(12, abs=0.1)
    assert goodput.seconds["checkpoint"] == pytest.approx(0.24)
    assert goodput.seconds["evaluate"] == pytest.approx(6.2)
    assert goodput.seconds["lost"] == goodput.seconds["down"] == 0
    assert goodput.share == pytest.approx(197.4 / 218.2, abs=0.005)


def test_goodput_counts_lost_work_down_time_and_startup(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    writer.fault()
    writer.recover(lost=40, down_s=30)
    writer.take(60)
    seen = open_history(writer.folder)
    goodput = account(seen, now=writer.now)
    assert goodput.seconds["lost"] == pytest.approx(20, abs=0.6)
    assert goodput.seconds["down"] == pytest.approx(30, abs=0.1)
    assert goodput.seconds["startup"] == pytest.approx(21, abs=0.2)
    assert goodput.wall_s == pytest.approx(writer.now - 1000)
    assert [segment.cause for segment in goodput.segments] == [
        "startup",
        "training",
        "lost",
        "down",
        "startup",
        "training",
    ]


def test_goodput_joins_a_start_with_its_resume(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0)
    writer.start()
    writer.take(10)
    writer.event("stop")
    writer.now += 100
    writer.event("start", ranks=8)
    writer.now += 5
    writer.event("resume", ranks=8)
    writer.now += 5
    writer.take(10)
    seen = open_history(writer.folder)
    goodput = account(seen, now=writer.now)
    assert goodput.seconds["down"] == pytest.approx(100)
    assert goodput.seconds["startup"] == pytest.approx(22, abs=0.1)
    assert goodput.seconds["lost"] == pytest.approx(0, abs=0.01)


def test_goodput_counts_silence_as_down(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    seen = open_history(writer.folder)
    silent = account(seen, now=writer.now + 500)
    assert silent.seconds["down"] == pytest.approx(500)
    writer.now += 700
    writer.event("start", ranks=8)
    writer.event("resume", ranks=8)
    writer.now += 10
    writer.take(20)
    seen.refresh()
    goodput = account(seen, now=writer.now)
    assert goodput.seconds["down"] == pytest.approx(700)
    assert goodput.wall_s == pytest.approx(writer.now - 1000)


def test_goodput_of_an_attempt_without_steps_is_startup(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0)
    writer.start()
    seen = open_history(writer.folder)
    goodput = account(seen, now=1030.0)
    assert goodput.seconds["startup"] == pytest.approx(30)
    assert goodput.share == 0


def test_goodput_is_zero_before_the_start(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    seen = open_history(writer.folder)
    assert account(seen, now=1.0).share == 0


def test_goodput_counts_steps_of_a_killed_run_as_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    writer.now, writer.step = writer.now + 700, 60
    writer.event("start", ranks=8)
    writer.event("resume", ranks=8)
    writer.now += 10
    seen = open_history(writer.folder)
    for _ in range(2):  # before the next attempt's first step, and after it
        goodput = account(seen, now=writer.now)
        assert goodput.seconds["lost"] == pytest.approx(20, abs=0.6)
        assert goodput.seconds["down"] == pytest.approx(700, abs=0.1)
        assert goodput.wall_s == pytest.approx(writer.now - 1000)
        writer.take(20)
        seen.refresh()


def test_goodput_of_a_run_from_step_0_loses_all_before(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    writer.now, writer.step = writer.now + 300, 0
    writer.start()
    writer.take(10)
    seen = open_history(writer.folder)
    goodput = account(seen, now=writer.now)
    assert goodput.seconds["startup"] == pytest.approx(24, abs=0.2)
    assert goodput.seconds["lost"] == pytest.approx(50, abs=0.6)
    assert goodput.seconds["down"] == pytest.approx(300, abs=0.1)


def test_goodput_counts_rolled_back_steps_as_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    writer.event("guard", what="spike", action="rollback")
    writer.step = 40
    writer.take(80)
    writer.finish()
    seen = open_history(writer.folder)
    goodput = account(seen, now=writer.now)
    assert goodput.seconds["lost"] == pytest.approx(30, abs=0.1)
    assert [segment.cause for segment in goodput.segments] == ["startup", "training", "lost", "training"]


def test_goodput_counts_losses_across_two_attempts(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    writer.fault()
    writer.recover(lost=20, down_s=30)
    writer.take(40)
    writer.fault()
    writer.recover(lost=60, down_s=30)
    writer.take(10)
    seen = open_history(writer.folder)
    goodput = account(seen, now=writer.now)
    assert goodput.seconds["lost"] == pytest.approx((100 - 60 + 40) * 0.5, abs=1)
    assert goodput.seconds["down"] == pytest.approx(60, abs=0.1)
    assert goodput.wall_s == pytest.approx(writer.now - 1000)


def test_goodput_loses_nothing_until_the_resume_step_is_known(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0)
    writer.start()
    writer.take(100)
    writer.event("stop")
    writer.now += 5
    writer.event("start", ranks=8)
    seen = open_history(writer.folder)
    goodput = account(seen, now=writer.now + 20)
    assert goodput.seconds["lost"] == 0
    assert goodput.seconds["productive"] > 40


def test_goodput_counts_the_save_before_a_stop(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    writer.now += 7
    writer.event("checkpoint_committed", seconds=7, blocked_s=7.0)
    writer.event("stop")
    writer.event("start", ranks=8)
    writer.event("resume", ranks=8)
    writer.take(10)
    seen = open_history(writer.folder)
    goodput = account(seen, now=writer.now)
    assert goodput.seconds["checkpoint"] == pytest.approx(7)
    assert goodput.seconds["lost"] == 0


def test_goodput_is_the_same_from_stored_columns(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0, save_every=1000)
    writer.start()
    writer.take(100)
    writer.step = 40
    writer.take(80)
    seen = open_history(writer.folder)
    seen.store_columns()
    again = open_history(writer.folder)
    assert again.rolled_back.column("time").tolist() == seen.rolled_back.column("time").tolist()
    assert len(again.rolled_back) == 60


def test_goodput_counts_the_stall_of_a_step_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=1000.0)
    writer.start()
    writer.take(10)
    for kind in ("left", "joined"):
        writer.event(kind, replica=1, step=10, ranks=3, stall_s=0.25)
    writer.take(10)
    seen = open_history(writer.folder)
    assert account(seen, now=writer.now).seconds["stall"] == pytest.approx(0.25)
    assert judge(seen, writer.now).ranks == 3
