"""Replicas outlive each other: a step is applied by all of them or by none."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.failpoints import STEP_FAILPOINTS
from tests.resilience.survivors.protocol_kills import Job, kill_at, undisturbed


@pytest.mark.parametrize("point", STEP_FAILPOINTS)
@pytest.mark.slow
def test_replica_killed_at_each_point_leaves_equal_weights(point: str, tmp_path: Path) -> None:
    assert kill_at(point, tmp_path, occurrence=2)


@pytest.mark.slow
def test_random_kills_lose_and_repeat_no_micro_batch(tmp_path: Path) -> None:
    job = Job(tmp_path, replicas=4, steps=150, pause_s=0.004)
    assert job.run(random_kills=15, seed=1) == {undisturbed(150)}
    assert job.kills == 15
