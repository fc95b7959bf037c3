import math
import re
from pathlib import Path

import pytest

from keepstep.observe import report
from keepstep.observe.goodput import account
from keepstep.observe.history import open_history
from keepstep.observe.verdict import find_straggler, judge
from tests.observe.make_runs import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    made = Writer(tmp_path / "run", steps=1000, now=1000.0)
    made.start()
    return made


def state(writer: Writer, later: float = 1.0) -> str:
    return judge(open_history(writer.folder), writer.now + later).state


def reasons(writer: Writer, later: float = 1.0) -> str:
    return "; ".join(judge(open_history(writer.folder), writer.now + later).reasons)


def test_verdict_goes_from_starting_to_healthy_to_finished(writer: Writer) -> None:
    assert state(writer) == "starting"
    writer.take(100)
    assert state(writer) == "healthy"
    writer.take(900)
    writer.finish()
    assert state(writer, later=1e6) == "finished"


def test_verdict_is_recovering_until_lost_steps_are_repeated(writer: Writer) -> None:
    writer.take(100)
    writer.fault(rank=3)
    assert state(writer) == "recovering"
    assert reasons(writer) == "worker killed by SIGKILL (rank 3)"
    writer.recover(lost=20)
    assert state(writer) == "recovering"
    writer.take(1)
    assert state(writer) == "recovering"
    assert reasons(writer) == "worker killed by SIGKILL (rank 3): 19 steps to repeat"
    writer.take(19)
    assert state(writer) == "healthy"
    assert judge(open_history(writer.folder), writer.now).restarts == 1


def test_verdict_is_stalled_after_silence(writer: Writer) -> None:
    writer.take(100)
    assert state(writer, later=59) == "healthy"
    assert state(writer, later=300) == "stalled"
    writer.fault()
    assert state(writer, later=300) == "recovering"
    assert state(writer, later=3000) == "stalled"


def test_verdict_tells_a_stop_from_a_final_fault(writer: Writer) -> None:
    writer.take(5)
    writer.event("stop")
    assert state(writer, later=1e5) == "stopped"
    writer.event("fault", what="loss is NaN", final=True)
    assert state(writer, later=1e5) == "failed"


def test_verdict_at_risk_is_work_since_the_last_checkpoint(writer: Writer) -> None:
    writer.take(230)
    verdict = judge(open_history(writer.folder), writer.now + 7)
    assert verdict.checkpoint_step == 200
    assert verdict.at_risk_steps == 30
    assert verdict.at_risk_s == pytest.approx(15, rel=0.1)
    assert verdict.checkpoint_age_s == pytest.approx(30 * 0.5 + 3.1 + 7, abs=0.1)
    assert verdict.eta_s == pytest.approx(770 * 0.5, rel=0.1)
    assert verdict.total_steps == 1000


def test_verdict_everything_is_at_risk_before_a_checkpoint(writer: Writer) -> None:
    writer.take(50)
    verdict = judge(open_history(writer.folder), writer.now)
    assert verdict.at_risk_steps == 50
    assert verdict.checkpoint_step == -1
    assert math.isnan(verdict.checkpoint_age_s)


def test_verdict_lists_every_problem(writer: Writer) -> None:
    writer.take(100)
    writer.event("warning", message="a shard is damaged")
    assert reasons(writer) == "a shard is damaged"
    assert state(writer, later=1) == "degraded"
    writer.step_s = 1.0
    writer.take(40)
    assert "speed fell to" in reasons(writer)
    writer.metrics.append({"step": 141, "time": writer.now, "loss": "NaN", "step_s": 1.0})
    assert "the loss is nan" in reasons(writer)


def test_verdict_is_degraded_with_fewer_ranks(writer: Writer) -> None:
    writer.take(30)
    writer.fault()
    writer.recover(lost=5, ranks=6)
    writer.take(20)
    assert reasons(writer) == "6 of 8 ranks are left"


def test_verdict_is_degraded_without_new_checkpoints(writer: Writer) -> None:
    writer.save_every = 20
    writer.take(60)
    writer.save_every = 10_000
    writer.take(200)
    assert "the last checkpoint is" in reasons(writer)


def test_straggler_is_found_by_its_own_time() -> None:
    look = {"step_s": [1.0, 1.0, 1.0, 1.0], "wait_s": [0.5, 0.5, 0.0, 0.5], "host": ["a", "a", "b", "b"]}
    assert find_straggler(look) == {"rank": 2, "ratio": 2.0, "seconds": 1.0, "host": "b"}
    assert find_straggler({"step_s": [1.0, 1.0, 1.1]}) == {}
    assert find_straggler({"step_s": [1.0, 1.0, 1.4]})["rank"] == 2
    assert find_straggler({"step_s": [1.0]}) == {}
    assert find_straggler({}) == {}


def test_total_steps_come_from_the_newest_source(tmp_path: Path) -> None:
    made = Writer(tmp_path / "run", steps=77)
    assert judge(open_history(made.folder), 0.0).total_steps == 77
    made.folder.facts.unlink()
    assert judge(open_history(made.folder), 0.0).total_steps == 77, "from max_duration"
    made.event("start", total_steps=99)
    assert judge(open_history(made.folder), 0.0).total_steps == 99


def test_report_sums_requests_to_object_stores(writer: Writer) -> None:
    assert "Requests to object stores" not in report.markdown(open_history(writer.folder), writer.now)
    writer.event("storage_requests", PUT=900, GET=7, written_bytes=2**30)
    writer.event("storage_requests", PUT=600, LIST="x")
    text = report.markdown(open_history(writer.folder), writer.now)
    assert "Requests to object stores" in text
    assert "| PUT | 1,500 |" in text
    assert "| written_bytes | 1.0 GiB |" in text


def test_verdict_reads_a_fault_with_a_list_of_ranks(writer: Writer) -> None:
    writer.take(100)
    # As keepstep.train.recovery.corruption_check tells it: `ranks` are those that differed.
    writer.event("fault", reason="corruption", ranks=[3], hosts=["n3"], message="rank 3 on n3 computed other bits")
    verdict = judge(open_history(writer.folder), writer.now + 1)
    assert (verdict.ranks, verdict.reasons) == (8, ["rank 3 on n3 computed other bits"])
    assert "8 to 6 ranks" not in report.markdown(open_history(writer.folder), writer.now)
    writer.recover(ranks=6)
    assert "8 to 6 ranks" in report.markdown(open_history(writer.folder), writer.now)


def test_straggler_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.take(30)
    writer.rank_lines.append({"time": writer.now, "step": 30, "step_s": [0.5] * 7 + [5.0]})
    assert judge(open_history(writer.folder), writer.now).straggler["rank"] == 7
    writer.fault()
    writer.recover(lost=0, ranks=4)
    writer.take(5)
    assert not judge(open_history(writer.folder), writer.now).straggler


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0], ids=["back", "forward"])
def test_verdict_survives_a_clock_that_was_set(tmp_path: Path, jump_s: float) -> None:
    writer = Writer(tmp_path / "run", steps=1000, now=1_000_000.0, save_every=50)
    writer.start()
    writer.take(100)
    expected_s = judge(open_history(writer.folder), writer.now + 1).eta_s
    writer.now += jump_s
    writer.event("warning", reason="clock_set", message="the clock was set", seconds=jump_s)
    writer.take(1)
    for _ in range(3):
        writer.take(30)
        history = open_history(writer.folder)
        verdict = judge(history, writer.now + 1)
        assert verdict.state in ("healthy", "degraded"), verdict.reasons
        assert 0 <= verdict.silent_s < 60
        assert verdict.checkpoint_age_s >= 0
        assert 0.5 * expected_s < verdict.eta_s <= 1.1 * expected_s
        assert min(account(history, writer.now + 1).seconds.values()) >= 0
    assert state(writer, later=300) == "stalled", "a sign from the future is no sign of life"
    writer.finish()
    assert 0 < account(open_history(writer.folder), writer.now).share <= 1
    assert not re.search(r"-\d+(\.\d+)? ?(s|min|h|d|%)\b", report.markdown(open_history(writer.folder), writer.now))
