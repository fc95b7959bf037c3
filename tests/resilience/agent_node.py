"""One node of a run of several, as a process of its own: PORT NODE NODES TARGET FOLDER."""

from __future__ import annotations

import sys

import agent_targets

from keepstep.config.schema import ResilienceConfig
from keepstep.core.errors import KeepstepError
from keepstep.core.nodes import NodeGroup, node_range
from keepstep.resilience.agent import run_processes
from keepstep.resilience.workers import Task


def main(port: str, node: str, nodes: str, target: str, folder: str) -> int:
    low, high = node_range(nodes)
    group = NodeGroup(low, high, f"127.0.0.1:{port}", "test", is_host=node == "0", join_timeout_s=60)
    task = Task(getattr(agent_targets, target), [folder, node])
    try:
        return run_processes(task, 1, group, ResilienceConfig(max_restarts=3))
    except KeepstepError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
