"""One of two processes that stand for two nodes: keep steps, or find them again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.in_memory.snapshots import InMemorySnapshots


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1000, 70), value)}, "rank": {"cpu": torch.full((5,), value)}}


def main(rank: int, store: str, task: str, places: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    paths = [Path(place) for place in places]
    memory = InMemorySnapshots(paths[:2], paths[2:], ranks_per_node=1)
    if task == "keep":
        for step in (5, 6, 7):
            memory.save(step, state(step + 0.25 * rank), {"step": step})
        memory.join()
    else:
        into = state(0.0)
        step = memory.newest(into)
        assert step == 7, step
        assert memory.load(step, into) == {"step": 7}
        assert torch.equal(into["model"]["weight"], torch.full((1000, 70), 7 + 0.25 * rank))
        assert torch.equal(into["rank"]["cpu"], torch.full((5,), 7 + 0.25 * rank))
    memory.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
