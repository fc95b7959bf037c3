"""Where the nodes of a run meet, as each scheduler says it."""

from __future__ import annotations

import pytest

from keepstep.core.errors import UsageError
from keepstep.core.ranks import RENDEZVOUS_SECRET, NodeGroup, group_from_environment, node_number, node_range

SECRET = {RENDEZVOUS_SECRET: "0123456789abcdef"}


@pytest.mark.parametrize(
    "environment",
    [
        {"KEEPSTEP_HEAD": "n1", "KEEPSTEP_PORT": "20001", "SLURM_NODEID": "0", "KEEPSTEP_ATTEMPT": "7.0"},
        {"PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "20001", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "20001", "RANK": "0", "WORLD_SIZE": "2"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "20001", "JOB_COMPLETION_INDEX": "0"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "20001", "VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "20001", "LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2"},
    ],
    ids=["slurm", "trainjob", "pytorchjob", "jobset", "volcano", "leaderworkerset"],
)
def test_every_scheduler_is_understood(environment: dict[str, str]) -> None:
    environment |= SECRET
    group = group_from_environment("2", 3, environment)
    assert (group.endpoint, group.is_host, group.max_nodes, group.max_restarts) == ("n1:20001", True, 2, 3)
    other = {name: "1" if value == "0" else value for name, value in environment.items()}
    assert group_from_environment("2", 3, other).is_host is False
    assert (node_number(environment), node_number(other)) == (0, 1)


def test_one_node_needs_nobody() -> None:
    assert node_number({"RANK": "x"}) == node_number({}) == 0
    assert group_from_environment("1", 0, {"MASTER_ADDR": "ignored"}) == NodeGroup()


def test_attempts_of_one_job_never_meet() -> None:
    first, second = (
        group_from_environment(
            "2", 0, {"KEEPSTEP_HEAD": "n1", "SLURM_NODEID": "0", "KEEPSTEP_ATTEMPT": f"7.{attempt}", **SECRET}
        )
        for attempt in range(2)
    )
    assert first.run_id != second.run_id


@pytest.mark.parametrize(("text", "wanted"), [("4", (4, 4)), ("2:4", (2, 4))])
def test_node_counts(text: str, wanted: tuple[int, int]) -> None:
    assert node_range(text) == wanted


@pytest.mark.parametrize("text", ["0", "4:2", "a", "", "1:2:3", "-1", "2:"])
def test_wrong_node_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes is"):
        node_range(text)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "n1"},
        {"RANK": "0"},
        {"MASTER_ADDR": "n1", "RANK": "x"},
        {"MASTER_ADDR": "n1", "RANK": "0", "MASTER_PORT": "y"},
    ],
)
def test_a_missing_meeting_point_is_a_clear_error(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        group_from_environment("2", 0, environment | SECRET)


@pytest.mark.parametrize(("secret", "said"), [(None, "is not set"), ("", "is not set"), ("short", "is too short")])
def test_several_nodes_without_a_secret_are_refused(secret: str | None, said: str) -> None:
    environment = {"MASTER_ADDR": "n1", "RANK": "0"} | ({} if secret is None else {RENDEZVOUS_SECRET: secret})
    with pytest.raises(UsageError, match=said) as raised:
        group_from_environment("2", 0, environment)
    assert "openssl rand" in str(raised.value.hint)


def test_secret_is_not_printed_with_its_group() -> None:
    group = group_from_environment("2", 0, {"MASTER_ADDR": "n1", "RANK": "0"} | SECRET)
    assert group.secret == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(group)
