"""`keepstep doctor --cluster` on a real Slurm names the node that is at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slow
PROFILE = "gpus_per_node: 0\nprocesses_per_node: 1\nexclusive: false\npartition: gpu\nvariables: {OMP_NUM_THREADS: 1}\n"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    storage = tmp_path / "storage"
    storage.mkdir()
    return [
        "doctor",
        "--cluster",
        "--on",
        f"slurm:{tmp_path}/profile.yaml",
        "--storage",
        str(storage),
        "--timeout-s",
        "600",
    ]


@pytest.mark.cluster
def test_sound_nodes_pass(rested: SlurmCluster, tmp_path: Path, words: list[str]) -> None:
    answer = json.loads(rested.keepstep(*words, "--data", str(tmp_path / "profile.yaml"), "--json", cwd=tmp_path))
    assert (answer["sound"], answer["drain"]) == (True, [])
    assert [node["node"] for node in answer["nodes"]] == ["n1", "n2", "n3"]
    assert answer["shared"][0]["name"] == "all-reduce"


def test_doctor_names_slow_link_and_read_only_disk(rested: SlurmCluster, tmp_path: Path, words: list[str]) -> None:
    rested.throttle("n2", "200mbit")
    rested.mount_read_only("n3", tmp_path / "storage", read_only=True)
    try:
        said = rested.keepstep(*words, cwd=tmp_path, code=3)
    finally:
        rested.throttle("n2", None)
        rested.mount_read_only("n3", tmp_path / "storage", read_only=False)
    failed = {(line.split()[1], line.split()[2]) for line in said.splitlines() if line.startswith("fail ")}
    assert failed == {("n2", "network"), ("n3", "storage")}, said
    assert "Read-only file system" in said
    assert "drain: n2,n3" in said
    assert "scontrol update nodename=n2,n3 state=drain" in said
