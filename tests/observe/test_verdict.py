import math
from pathlib import Path

import pytest
from make_runs import Writer

from keepstep.observe import report
from keepstep.observe.history import open_history
from keepstep.observe.verdict import find_straggler, judge


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    made = Writer(tmp_path / "run", steps=1000, now=1000.0)
    made.start()
    return made


def state(writer: Writer, later: float = 1.0) -> str:
    return judge(open_history(writer.folder), writer.now + later).state


def reasons(writer: Writer, later: float = 1.0) -> str:
    return "; ".join(judge(open_history(writer.folder), writer.now + later).reasons)


def test_a_run_goes_from_starting_over_healthy_to_finished(writer: Writer) -> None:
    assert state(writer) == "starting"
    writer.take(100)
    assert state(writer) == "healthy"
    writer.take(900)
    writer.finish()
    assert state(writer, later=1e6) == "finished"


def test_a_killed_worker_makes_it_recovering_until_the_lost_steps_are_done_again(writer: Writer) -> None:
    writer.take(100)
    writer.fault(rank=3)
    assert state(writer) == "recovering"
    assert reasons(writer) == "worker killed by SIGKILL (rank 3)"
    writer.recover(lost=20)
    assert state(writer) == "recovering"
    writer.take(1)
    assert state(writer) == "recovering"
    assert reasons(writer) == "worker killed by SIGKILL (rank 3): 19 steps to do again"
    writer.take(19)
    assert state(writer) == "healthy"
    assert judge(open_history(writer.folder), writer.now).restarts == 1


def test_silence_is_stalled_and_so_is_a_recovery_that_never_steps(writer: Writer) -> None:
    writer.take(100)
    assert state(writer, later=59) == "healthy"
    assert state(writer, later=300) == "stalled"
    writer.fault()
    assert state(writer, later=300) == "recovering"
    assert state(writer, later=3000) == "stalled"


def test_a_stop_on_request_and_a_fault_for_good(writer: Writer) -> None:
    writer.take(5)
    writer.event("stop")
    assert state(writer, later=1e5) == "stopped"
    writer.event("fault", what="loss is NaN", final=True)
    assert state(writer, later=1e5) == "failed"


def test_what_is_at_risk_is_the_work_since_the_last_durable_checkpoint(writer: Writer) -> None:
    writer.take(230)
    verdict = judge(open_history(writer.folder), writer.now + 7)
    assert verdict.checkpoint_step == 200
    assert verdict.at_risk_steps == 30
    assert verdict.at_risk_s == pytest.approx(15, rel=0.1)
    assert verdict.checkpoint_age_s == pytest.approx(30 * 0.5 + 3.1 + 7, abs=0.1)
    assert verdict.eta_s == pytest.approx(770 * 0.5, rel=0.1)
    assert verdict.total_steps == 1000


def test_before_the_first_checkpoint_everything_is_at_risk(writer: Writer) -> None:
    writer.take(50)
    verdict = judge(open_history(writer.folder), writer.now)
    assert verdict.at_risk_steps == 50
    assert verdict.checkpoint_step == -1
    assert math.isnan(verdict.checkpoint_age_s)


def test_each_worry_is_told(writer: Writer) -> None:
    writer.take(100)
    writer.event("warning", message="a shard is damaged")
    assert reasons(writer) == "a shard is damaged"
    assert state(writer, later=1) == "degraded"
    writer.step_s = 1.0
    writer.take(40)
    assert "speed fell to" in reasons(writer)
    writer.metrics.append({"step": 141, "time": writer.now, "loss": "NaN", "step_s": 1.0})
    assert "the loss is nan" in reasons(writer)


def test_fewer_ranks_than_at_the_start_is_degraded(writer: Writer) -> None:
    writer.take(30)
    writer.fault()
    writer.recover(lost=5, ranks=6)
    writer.take(20)
    assert reasons(writer) == "6 of 8 ranks are left"


def test_a_missing_checkpoint_is_noticed(writer: Writer) -> None:
    writer.save_every = 20
    writer.take(60)
    writer.save_every = 10_000
    writer.take(200)
    assert "the last checkpoint is" in reasons(writer)


def test_the_straggler_is_named_by_its_own_time_not_by_its_waiting() -> None:
    look = {"step_s": [1.0, 1.0, 1.0, 1.0], "wait_s": [0.5, 0.5, 0.0, 0.5], "host": ["a", "a", "b", "b"]}
    assert find_straggler(look) == {"rank": 2, "ratio": 2.0, "seconds": 1.0, "host": "b"}
    assert find_straggler({"step_s": [1.0, 1.0, 1.1]}) == {}
    assert find_straggler({"step_s": [1.0, 1.0, 1.4]})["rank"] == 2
    assert find_straggler({"step_s": [1.0]}) == {}
    assert find_straggler({}) == {}


def test_total_steps_come_from_the_newest_source_that_knows(tmp_path: Path) -> None:
    made = Writer(tmp_path / "run", steps=77)
    assert judge(open_history(made.folder), 0.0).total_steps == 77
    made.folder.facts.unlink()
    assert judge(open_history(made.folder), 0.0).total_steps == 77, "from max_duration"
    made.event("start", total_steps=99)
    assert judge(open_history(made.folder), 0.0).total_steps == 99


def test_a_run_on_which_a_machine_computed_other_bits_can_be_looked_at(writer: Writer) -> None:
    writer.take(100)
    # As keepstep.train.recheck tells it: `ranks` are those that differed.
    writer.event("fault", reason="corruption", ranks=[3], hosts=["n3"], message="rank 3 on n3 computed other bits")
    verdict = judge(open_history(writer.folder), writer.now + 1)
    assert (verdict.ranks, verdict.reasons) == (8, ["rank 3 on n3 computed other bits"])
    assert "8 to 6 ranks" not in report.markdown(open_history(writer.folder), writer.now)
    writer.recover(ranks=6)
    assert "8 to 6 ranks" in report.markdown(open_history(writer.folder), writer.now)


def test_a_straggler_of_an_earlier_attempt_is_not_named(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.take(30)
    writer.rank_lines.append({"time": writer.now, "step": 30, "step_s": [0.5] * 7 + [5.0]})
    assert judge(open_history(writer.folder), writer.now).straggler["rank"] == 7
    writer.fault()
    writer.recover(lost=0, ranks=4)
    writer.take(5)
    assert not judge(open_history(writer.folder), writer.now).straggler
