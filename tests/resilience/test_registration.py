"""The agent of a run folder is found by the folder."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.core.errors import RunTakenError
from keepstep.resilience.failure_cause import classify
from keepstep.resilience.registration import AgentRegistration, agent_of


def test_run_taken_is_no_fault_of_the_holder() -> None:
    assert classify(RunTakenError("process 1 trains in runs/a already")) == "taken"


def test_agent_is_found_by_its_folder(tmp_path: Path) -> None:
    assert agent_of(tmp_path) is None
    first, second = AgentRegistration(tmp_path), AgentRegistration(tmp_path)
    first.refresh()
    second.refresh()
    for _ in range(200):
        assert agent_of(tmp_path) == os.getpid(), "however often it is asked for"
    first.close()
    assert agent_of(tmp_path) is None
    second.refresh()
    assert agent_of(tmp_path) == os.getpid(), "an agent takes the place of one that ended"
    second.close()
