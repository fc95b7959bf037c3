"""Node-local checkpoints on two pretended nodes: a folder for each stands for its disk. Losing one loses nothing.

python -m tests.checkpoint.node_local.nodes
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol.commit import committed_steps
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.config.schema import CheckpointConfig
from tests.checkpoint.elastic import build, full_tensors, gathered, run_world


def disk(root: Path, rank: int, world: int) -> Path:
    """The first half of the ranks live on node 0, the others on node 1."""
    return root / f"node{rank * 2 // world}"


def open_checkpointer(root: Path, rank: int, world: int, events: list[Any] | None = None) -> Checkpointer:
    def on_event(kind: str, facts: dict[str, Any]) -> None:
        if events is not None:
            events.append((kind, facts))

    return Checkpointer(disk(root, rank, world), CheckpointConfig(format="local", keep=2), on_event)


def save(world: int, rank: int, root: Path) -> None:
    events: list[Any] = []
    checkpointer = open_checkpointer(root, rank, world, events)
    state = {"model": build("shard", world, rank, zero=False), "rank": {"random": torch.full((3,), rank)}}
    for step in (1, 2, 3):
        checkpointer.save_async(step, state, {})
        checkpointer.before_update()
    checkpointer.wait()
    checkpointer.close()
    problems = [
        facts["message"] for kind, facts in events if facts.get("reason", "checkpoint_delayed") != "checkpoint_delayed"
    ]
    assert not problems, problems


def load(world: int, rank: int, root: Path, expected_step: int = 3) -> None:
    into = {"model": build("shard", world, rank, zero=True), "rank": {"random": torch.full((3,), -1)}}
    checkpointer = open_checkpointer(root, rank, world)
    loaded = checkpointer.load_newest(into)
    assert loaded is not None
    assert loaded.step == expected_step
    whole = gathered(into["model"], world, "shard")
    assert all(torch.equal(whole[name], tensor) for name, tensor in full_tensors(zero=False).items())
    assert into["rank"]["random"].tolist() == [rank] * 3
    checkpointer.close()


def load_older(world: int, rank: int, root: Path) -> None:
    load(world, rank, root, expected_step=2)


def data_files(root: Path, node: int, name: str) -> list[Path]:
    return sorted((root / f"node{node}" / "step_00000003").glob(f"{name}*.safetensors"))


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run_world(4, root, save)
        # keep=2 holds on both nodes, and each has its own two files and its neighbour's two.
        for node in (0, 1):
            assert [step.step for step in committed_steps(LocalStore(root / f"node{node}"))] == [3, 2]
            assert len(data_files(root, node, "rank")) == 4
        run_world(4, root, load)
        shutil.rmtree(root / "node0")
        run_world(4, root, load)
        assert len(data_files(root, 0, "rank")) >= 2, "the lost node has back what its ranks need"
        for node in (0, 1):
            for path in data_files(root, node, "rank00003"):
                path.unlink()
        run_world(4, root, load_older)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run_world(4, root, save)
        damaged = data_files(root, 1, "rank00003")[0]
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        run_world(4, root, load)
        assert damaged.read_bytes() == content, "the damaged copy was replaced by the good one"
        for path in data_files(root, 0, "rank"):
            path.unlink()
        run_world(2, root, load)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run_world(4, root, save)
        # The first node is new, and the other one has the half of a save that was killed.
        shutil.rmtree(root / "node0")
        (root / "node1" / "step_00000007").mkdir()
        (root / "node1" / "step_00000007" / "rank00002-0123abcd.safetensors").write_bytes(bytes(1000))
        run_world(4, root, save)
        for node in (0, 1):
            folders = sorted(path.name for path in (root / f"node{node}").glob("step_*"))
            assert folders == ["step_00000002", "step_00000003"], folders
            assert len(data_files(root, node, "rank")) == 4, "of the new save alone"
        shutil.rmtree(root / "node0")
        run_world(4, root, load)
    print(json.dumps({"nodes": 2, "lost": 0}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
