"""Several processes: kills, and any layout loaded into any other. Short versions of what the harnesses do at length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def run_harness(module: str, *words: str) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.checkpoint.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_job_killed_a_dozen_times_loses_no_commit_and_ends_with_the_same_losses() -> None:
    tally = run_harness("protocol.kills", "--kills", "12", "--failpoint-counts", "2", "--json")
    assert (tally["kills"], tally["problems"]) == (12, [])
    assert tally["failpoint_kills"] == 10


def test_a_lost_node_costs_nothing_when_every_node_writes_to_its_own_disk() -> None:
    assert run_harness("node_local.nodes") == {"nodes": 2, "lost": 0}


def test_every_layout_loads_into_every_other_bit_for_bit() -> None:
    assert run_harness("elastic", "--worlds", "1,3,4")["pairs"] >= 60
