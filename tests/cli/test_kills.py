"""Commands that write, killed at one change of a file after the other; repeated, each ends as an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.cli.kill_points import COMMANDS
from tests.doc_blocks import ROOT

POINTS = int(os.environ.get("KEEPSTEP_KILL_POINTS", "2"))
"""Kills of each command; every change of a file with a large number."""
WITH_TIMES = ("events.jsonl", "metrics.jsonl", ".log", "facts.json", "_SUCCESS", "-ID.json", "latest", ".metadata")
"""Files that hold times or random names: they must be there, but cannot be equal."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kills")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.kill_points", str(folder), str(POINTS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    return {name: outcome for line in done.stdout.splitlines() for name, outcome in json.loads(line).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_command_ends_well_when_repeated(name: str, found: dict[str, Any]) -> None:
    undisturbed = found[name]
    assert undisturbed["code"] == 0, undisturbed["output"]
    expected = comparable(undisturbed["content"])
    for kill in undisturbed["kills"]:
        assert kill["killed"] == -9, kill["where"]
        needed = {file for file in expected if not file.endswith("latest")}
        if name != "gc" and needed <= comparable(kill["left"]).keys():
            # All was written: a finished result is not overwritten.
            assert comparable(kill["content"]).items() >= expected.items(), kill["where"]
            continue
        assert kill["again"] == 0, f"{kill['where']}\n{kill['output']}"
        assert comparable(kill["content"]) == expected, f"{kill['where']}\n{kill['output']}"


def comparable(content: dict[str, str]) -> dict[str, str]:
    """Hashes by name, without those of files that hold times. Names have a random part in checkpoints.

    A killed process leaves the note with which it reads a step, and perhaps the temporary file of a few bytes that it
    was about to rename.
    """
    named = {re.sub(r"-[0-9a-f]{8}\.", "-ID.", name): value for name, value in content.items()}
    named = {name: value for name, value in named.items() if "reading-" not in name and not name.endswith("-ID.tmp")}
    return {name: "" if name.endswith(WITH_TIMES) else value for name, value in named.items()}
