"""Which step is on disk, and which saves were skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.observe.history import open_history
from keepstep.observe.verdict import Saves, Verdict, find_saves, judge
from tests.observe.make_runs import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    made = Writer(tmp_path / "run", steps=40, save_every=10)
    made.start()
    made.take(10)
    return made


def saves(writer: Writer) -> Saves:
    return find_saves(open_history(writer.folder))


def verdict(writer: Writer) -> Verdict:
    return judge(open_history(writer.folder), writer.now)


def finish_without_saving(writer: Writer) -> None:
    writer.save_every = 1000
    for _ in range(3):
        writer.take(10)
        writer.fail_to_save()
    writer.finish()


def test_saves_counts_failed_saves_until_they_are_repeated(writer: Writer) -> None:
    assert (saves(writer).step, saves(writer).skipped) == (10, ())
    writer.save_every = 1000
    writer.take(10)
    writer.fail_to_save()
    writer.event("save_skipped", reason="no space left")
    assert (saves(writer).step, saves(writer).skipped) == (10, (20,))
    writer.save()
    assert (saves(writer).step, saves(writer).skipped) == (20, ())


def test_saves_trusts_the_disk_more_than_the_events(writer: Writer) -> None:
    shutil.rmtree(writer.folder.checkpoints / "step_00000010")
    assert (saves(writer).step, saves(writer).recorded_step) == (-1, 10)
    shutil.rmtree(writer.folder.checkpoints)
    assert saves(writer).step == 10, "a run folder that was copied without its checkpoints"


@pytest.mark.parametrize("folder", ["s3://bucket/run", "relative/folder", "/not/mounted/here"])
def test_saves_uses_events_for_checkpoints_out_of_sight(writer: Writer, folder: str) -> None:
    shutil.rmtree(writer.folder.checkpoints / "step_00000010")
    text = writer.folder.config.read_text()
    writer.folder.config.write_text(f"{text}checkpoint:\n  interval: 10ba\n  folder: {folder}\n")
    assert saves(writer).step == 10


def test_saves_finds_checkpoints_in_another_local_folder(writer: Writer, tmp_path: Path) -> None:
    writer.folder.checkpoints.rename(tmp_path / "elsewhere")
    text = writer.folder.config.read_text()
    writer.folder.config.write_text(f"{text}checkpoint:\n  folder: '{tmp_path}/elsewhere'\n")
    assert saves(writer).step == 10


def test_verdict_of_an_unsaved_last_step_is_not_finished(writer: Writer) -> None:
    finish_without_saving(writer)
    found = verdict(writer)
    assert (found.state, found.step, found.saved_step, found.skipped_saves) == ("failed", 40, 10, 3)
    assert found.reasons == ["it did all 40 steps, but only step 10 is on disk"]


def test_verdict_of_a_run_that_saves_nothing_at_the_end_is_finished(writer: Writer) -> None:
    writer.folder.config.write_text(writer.folder.config.read_text() + "checkpoint:\n  at_end: false\n")
    finish_without_saving(writer)
    assert verdict(writer).state == "finished"
    assert verdict(writer).reasons == ["only step 10 is on disk: checkpoint.at_end is false"]


def test_verdict_of_a_run_whose_checkpoints_were_removed_is_finished(writer: Writer) -> None:
    writer.take(30)
    writer.finish()
    assert (verdict(writer).state, verdict(writer).reasons) == ("finished", [])
    shutil.rmtree(writer.folder.checkpoints / "step_00000040")
    assert verdict(writer).state == "finished"
    assert "step 40 was saved, but it is not on disk any more" in verdict(writer).reasons[0]


def test_verdict_is_degraded_while_saves_fail(writer: Writer) -> None:
    writer.save_every = 1000
    writer.take(10)
    writer.fail_to_save()
    writer.now += 400
    writer.take(10)
    assert verdict(writer).state == "degraded"
    assert "saves skipped: 1, the newest of step 20" in verdict(writer).reasons
    writer.save()
    assert not verdict(writer).reasons


def test_verdict_without_a_step_does_not_report_a_step_time(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.now += 1000
    assert verdict(writer).state == "stalled"
    assert verdict(writer).reasons[0].endswith("; it has not done a step yet")
