"""What happens after a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.resilience.failure_cause import Cause, Kind
from keepstep.resilience.restart_policy import RestartPolicy


def attempts_until_given_up(policy: RestartPolicy, cause: Cause, step: int = -1) -> int:
    for attempt in range(1, 100):
        if not policy.decide(cause, step).restart:
            return attempt
    raise AssertionError("never gives up")


@pytest.mark.parametrize(
    ("kind", "attempts"), [("crash", 9), ("peer", 9), ("hang", 9), ("storage", 9), ("data", 9), ("oom", 2)]
)
def test_policy_gives_up_after_restarts_without_progress(kind: Kind, attempts: int) -> None:
    assert attempts_until_given_up(RestartPolicy(8), Cause(kind, "it failed")) == attempts


@pytest.mark.parametrize("kind", ["config", "refused", "hardware", "taken"])
def test_policy_never_restarts_what_cannot_heal(kind: Kind) -> None:
    assert attempts_until_given_up(RestartPolicy(8), Cause(kind, "it failed")) == 1


def test_policy_counts_only_attempts_without_progress() -> None:
    policy = RestartPolicy(1)
    for step in range(20):
        assert policy.decide(Cause("crash", "it failed"), step).restart
    assert not policy.decide(Cause("crash", "it failed"), 19).restart


def test_policy_stops_for_a_missing_path_that_never_worked() -> None:
    assert attempts_until_given_up(RestartPolicy(8), Cause("access", "no such bucket")) == 1
    in_library = Cause("access", "FileNotFoundError: cache entry", traceback="Traceback ...")
    assert attempts_until_given_up(RestartPolicy(8), in_library) == 2, "it may have been a race"
    assert attempts_until_given_up(RestartPolicy(8), Cause("access", "mount lost"), step=5) == 9


def test_policy_waits_for_room_without_spending_restarts() -> None:
    policy = RestartPolicy(1)
    for _ in range(20):
        assert policy.decide(Cause("full", "no space"), -1).wait_for_room
    assert policy.decide(Cause("crash", "it failed"), -1).restart


def test_policy_pauses_grow_for_storage_and_data() -> None:
    policy = RestartPolicy(8)
    assert [policy.decide(Cause("storage", "EIO"), -1).pause_s for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 32, 60]
    assert RestartPolicy(8).decide(Cause("crash", "it failed"), -1).pause_s == 0


def test_policy_never_restarts_where_restarts_are_off() -> None:
    assert not RestartPolicy(0).decide(Cause("crash", "it failed"), 3).restart
    assert not RestartPolicy(0).decide(Cause("full", "no space"), 3).restart


def test_report_is_one_error_and_one_hint() -> None:
    logs = Path("runs/it/logs")
    policy = RestartPolicy(2)
    bug = Cause("crash", "ValueError: wrong", 1, "node7", traceback="Traceback ...")
    attempts_until_given_up(policy, bug)
    assert policy.report(bug, logs).lines() == [
        "error: rank 1 on node7: ValueError: wrong (given up after 3 attempts without progress)",
        " hint: the traceback is in runs/it/logs; keepstep runs logs runs/it prints it",
    ]
    mistake = Cause("config", "model.heads is 3", hint="model.heads=2")
    assert RestartPolicy(2).report(mistake, logs).lines() == ["error: model.heads is 3", " hint: model.heads=2"]
