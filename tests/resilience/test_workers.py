"""The agent's choice of the process that hangs."""

from __future__ import annotations

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
