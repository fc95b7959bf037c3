"""One of two processes with whole tensors: keep steps, or find those of one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.in_memory.snapshots import InMemorySnapshots


def state(value: float, rank: int, name: str = "weight") -> dict[str, Any]:
    weights = {name: torch.full((1000, 70), value, dtype=torch.bfloat16), "scalar": torch.tensor(value)}
    return {"model": weights, "rank": {"cpu": torch.full((5,), rank, dtype=torch.uint8)}}


def main(rank: int, store: str, task: str, places: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    paths = [Path(place) for place in places]
    memory = InMemorySnapshots(paths)
    if task == "keep":
        for step in (5, 6):
            memory.save(step, state(float(step), rank), {"step": step})
        memory.join()
    else:
        # A stage of a pipeline is no state for the other stages.
        assert InMemorySnapshots(paths).newest(state(0.0, 0, f"weight{rank or ''}")) is None
        into = state(0.0, 10 + rank)
        assert memory.newest(into) == 6
        assert memory.load(6, into) == {"step": 6}
        # The first process was the second one, and keeps its random generators; the new one has those of its seed.
        assert torch.equal(into["rank"]["cpu"], torch.full((5,), [1, 11][rank], dtype=torch.uint8))
        assert torch.equal(into["model"]["weight"], torch.full((1000, 70), 6.0, dtype=torch.bfloat16))
        memory.save(7, state(7.0, rank), {"step": 7})
        assert memory.newest(into, before=7) == 6, "the step that was loaded is not the one to be overwritten"
    memory.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
