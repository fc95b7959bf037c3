"""Snapshots of one layout, loaded into another one and another number of processes: every tensor bit-equal.

    python -m tests.checkpoint.in_memory.resize

This process is the agent of all nodes: it owns the memory and forks the processes, as tests/checkpoint/elastic.py
does. A node here is a number of ranks: processes read the buffers of another node over the process group only.
"""

from __future__ import annotations

import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.in_memory.footer import clear_footer
from keepstep.checkpoint.in_memory.snapshots import InMemorySnapshots
from tests.checkpoint.elastic import build, full_tensors, gathered, run_world

CHAIN = [(3, "shard"), (2, "tensor"), (4, "fsdp_tp"), (1, "whole"), (3, "stages"), (2, "whole"), (4, "shard")]


class Node:
    """The memory of a node's processes: two buffers of each for its own snapshots, and two for another node's."""

    def __init__(self, processes: int) -> None:
        self.handles = [[os.memfd_create("test") for _ in range(4)] for _ in range(processes)]

    def places(self, process: int) -> list[Path]:
        return [Path(f"/proc/{os.getpid()}/fd/{handle}") for handle in self.handles[process]]


class Cluster:
    """Some nodes with `processes` each, in the order of their ranks."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes, self.processes = nodes, len(nodes[0].handles)
        # Known before the fork: /proc/PID of the one that owns the memory.
        self.places = [node.places(process) for node in nodes for process in range(self.processes)]

    @property
    def world(self) -> int:
        return len(self.places)

    def memory(self, rank: int) -> InMemorySnapshots:
        own = self.places[rank]
        return InMemorySnapshots(own[:2], own[2:], self.processes)

    def keep(self, layout: str, *steps: int) -> None:
        def action(world: int, rank: int, _: Path) -> None:
            memory = self.memory(rank)
            for step in steps:
                memory.save(step, state(layout, world, rank, step), {"step": step, "rank": rank})
            memory.join()

        run_world(self.world, Path(), action)

    def find(self, layout: str, step: int | None, generators: dict[int, int]) -> None:
        """Processes of this layout find this step, and have the random generators of the ranks before."""

        def action(world: int, rank: int, _: Path) -> None:
            memory = self.memory(rank)
            into = state(layout, world, rank, None)
            found = memory.newest(into)
            assert found == step, f"found {found}, not {step}"
            if found is None:
                return
            values = memory.load(found, into)
            assert values == {"step": step, "rank": 0}
            whole = gathered(into["model"], world, layout)
            for name, tensor in full_tensors(zero=False).items():
                assert torch.equal(whole[name], shifted(tensor, found)), f"{name} as {layout} on {world} differs"
            assert into["rank"]["random"].tolist() == [generators.get(rank, -1)] * 3
            # The step that was loaded is not the one to be overwritten, neither here nor in the copies.
            memory.save(found + 1, state(layout, world, rank, found + 1), {"step": found + 1, "rank": rank})
            memory.join()
            assert memory.newest(into) == found + 1
            assert memory.newest(into, before=found + 1) == found

        run_world(self.world, Path(), action)


def shifted(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Another value for each step."""
    return tensor + step


def state(layout: str, world: int, rank: int, step: int | None) -> dict[str, Any]:
    zero = step is None
    tensors = full_tensors(zero) if layout == "whole" else build(layout, world, rank, zero)
    if step is not None:
        tensors = {name: shifted(tensor, step) for name, tensor in tensors.items()}
    return {"model": tensors, "rank": {"random": torch.full((3,), -1 if step is None else rank)}}


def every_layout_from_the_one_before() -> None:
    """On one node, with more or fewer processes than the buffers had before."""
    node = Node(4)
    Cluster([node]).keep("shard", 4, 5)
    before = 4
    for step, (world, layout) in enumerate(CHAIN, start=5):
        # Fewer processes than buffers: the first one announces those that are nobody's.
        places = [node.places(process) for process in range(4)]
        cluster = Cluster([node])
        cluster.places = [[*places[0], *chain(*places[world:])], *places[1:world]]
        cluster.find(layout, step, {rank: rank for rank in range(before)})
        before = world
    close(node)


def nodes_leave_and_join() -> None:
    """Four nodes, then two that hold copies of the others, then three, one of them empty; and back in another order."""
    nodes = [Node(1) for _ in range(4)]
    Cluster(nodes).keep("shard", 4, 5)
    Cluster([nodes[0], nodes[2]]).find("shard", 5, {0: 0, 1: 1})
    three = [Node(1), nodes[2], nodes[0]]
    Cluster(three).find("shard", 6, {0: 0, 1: 1})
    # The processes of a node that is replaced: one of three, at the same number.
    replaced = [three[0], Node(1), three[2]]
    Cluster(replaced).find("shard", 7, {0: 0, 1: 1, 2: 2})
    Cluster([replaced[2], replaced[0]]).find("tensor", 8, {0: 0, 1: 1})
    close(*nodes, *three, *replaced)


def neighbours_lost_together() -> None:
    """What no memory holds cannot be loaded, and no part of another step or attempt takes its place."""
    nodes = [Node(1) for _ in range(4)]
    Cluster(nodes).keep("shard", 4, 5)
    Cluster([nodes[0], nodes[1]]).find("shard", None, {})
    Cluster([nodes[0], nodes[1], Node(1), Node(1)]).find("shard", None, {})
    # The same step once more, by other processes.
    Cluster([nodes[0], nodes[1]]).keep("shard", 3, 5)
    clear_footer(nodes[1].handles[0][1])
    clear_footer(nodes[0].handles[0][3])
    Cluster([nodes[0], nodes[1]]).find("shard", 3, {0: 0, 1: 1})
    close(*nodes)


def same_number_rather_repeats_a_step_than_lose_generators() -> None:
    nodes = [Node(2), Node(2)]
    Cluster(nodes).keep("tensor", 4, 5)
    # The second node is lost before its newest snapshot was copied; the first one has all tensors.
    for handles in nodes[0].handles:
        clear_footer(handles[3])
    Cluster([nodes[0], Node(2)]).find("tensor", 4, {rank: rank for rank in range(4)})
    close(*nodes)


def close(*nodes: Node) -> None:
    for handle in {handle for node in nodes for handles in node.handles for handle in handles}:
        os.close(handle)


def main() -> int:
    torch.set_num_threads(1)
    for check in (
        every_layout_from_the_one_before,
        nodes_leave_and_join,
        neighbours_lost_together,
        same_number_rather_repeats_a_step_than_lose_generators,
    ):
        check()
        print(check.__name__, "passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
