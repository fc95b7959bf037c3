"""One node of a run of several, as a process of its own: PORT NODE NODES TARGET FOLDER [SECRET]."""

from __future__ import annotations

import sys

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import KeepstepError
from keepstep.core.ranks import NodeGroup, node_range
from keepstep.resilience.agent import AgentSettings, run_processes
from keepstep.resilience.workers import Task
from tests.patience import PATIENCE_S
from tests.resilience import agent_targets


def main(port: str, node: str, nodes: str, target: str, folder: str, secret: str = "of this run") -> int:
    low, high = node_range(nodes)
    group = NodeGroup(
        low, high, f"127.0.0.1:{port}", "test", is_host=node == "0", secret=secret.encode(), join_timeout_s=PATIENCE_S
    )
    task = Task(getattr(agent_targets, target), [folder, node])
    try:
        return run_processes(task, 1, group, AgentSettings(ResilienceConfig(max_restarts=3)))
    except KeepstepError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
