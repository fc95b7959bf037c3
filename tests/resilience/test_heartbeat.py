"""Heartbeats: when a silent process counts as hanging."""

from __future__ import annotations

import pytest

from keepstep.config.schema import ResilienceConfig
from keepstep.resilience.heartbeat import Heartbeat, HeartbeatTable


def test_heartbeat_is_overdue_after_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("keepstep.resilience.heartbeat.time.monotonic", lambda: now[0])
    table = HeartbeatTable(2)
    table.clear(1000.0)
    heartbeat = Heartbeat(table.path, 1, ResilienceConfig(hang_s=1.0, start_timeout_s=1000.0))
    for step in range(1, 4):
        heartbeat.stepped(step)
    assert table.read(1).step == 3
    assert not table.read(1).overdue
    now[0] += 1.5
    assert table.read(1).overdue
    assert not table.read(0).overdue, "it is still starting, which takes long"
    heartbeat.busy()
    assert not table.read(1).overdue, "saving and evaluating have a limit of their own"
    table.close()


def test_waiting_for_data_is_overdue_only_when_reports_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("keepstep.resilience.heartbeat.time.monotonic", lambda: now[0])
    table = HeartbeatTable(1)
    heartbeat = Heartbeat(table.path, 0, ResilienceConfig(hang_s=10.0, start_timeout_s=1800.0))
    for step in range(4):
        heartbeat.stepped(step)
    for _ in range(300):
        now[0] += 1.0
        heartbeat.waiting()
        assert table.read(0).waits_for_data
        assert not table.read(0).overdue
    now[0] += 11.0
    assert table.read(0).overdue
    heartbeat.stepped(4)
    assert not table.read(0).waits_for_data
    assert heartbeat.limit_s == 10.0, "time spent on waiting says nothing about steps"
    table.close()


def test_limit_follows_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("keepstep.resilience.heartbeat.time.monotonic", lambda: now[0])
    heartbeat = Heartbeat(None, 0, ResilienceConfig(hang_s=10.0, start_timeout_s=1800.0))
    assert heartbeat.limit_s == 1800.0
    for step in range(20):
        heartbeat.stepped(step)
        now[0] += 60.0
    assert heartbeat.limit_s == pytest.approx(180.0), "three times what a step takes"
