"""The agent's choice of the process that hangs."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

from keepstep.resilience.heartbeat import HeartbeatRecord
from keepstep.resilience.workers import WorkerState, most_suspect


def test_most_suspect_is_held_or_waits_for_nobody() -> None:
    frame = '  File "/x/distributed_c10d.py", line 1 in all_reduce'
    records = [HeartbeatRecord(20, 10, 5, 50), HeartbeatRecord(20, 10, 5, 49), HeartbeatRecord(20, 10, 5, 51)]
    waiting = [WorkerState(rank, "S", "all_reduce", frame) for rank in range(3)]
    assert most_suspect(waiting, records).local_rank == 1, "the one that got least far"
    asleep = WorkerState(2, "S", "", '  File "/x/loader.py", line 9 in read')
    assert most_suspect([*waiting[:2], asleep], records).describe() == "in read (loader.py)"
    stopped = WorkerState(0, "T", "", "")
    assert most_suspect([stopped, waiting[1], asleep], records).describe() == "stopped by a signal"


def test_hang_names_where_the_main_thread_is(tmp_path: Path) -> None:
    """Other threads of a process always wait for something, and faulthandler lists them first."""
    started, finished = threading.Event(), threading.Event()

    def waits_always() -> None:
        started.set()
        finished.wait()

    helper = threading.Thread(target=waits_always)
    helper.start()
    started.wait()
    with (tmp_path / "stacks.txt").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stack = file.read()
    finished.set()
    helper.join()
    assert "in waits_always" in stack
    state = WorkerState(0, "S", "", stack)
    assert state.describe() == "in test_hang_names_where_the_main_thread_is (test_workers.py)"
