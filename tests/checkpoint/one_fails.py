"""Three processes save twice; the first time one of them cannot copy its state. Prints the step folders left.

python tests/checkpoint/one_fails.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from elastic import build, run_world

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.snapshot import Snapshot
from keepstep.config.schema import CheckpointConfig


def save_twice(world: int, rank: int, root: Path) -> None:
    checkpointer = Checkpointer(root, CheckpointConfig())
    state = {"model": build("shard", world, rank, zero=False)}
    real = Snapshot.start

    def no_memory(*words: Any) -> None:
        raise RuntimeError("out of memory")

    if rank == 1:
        Snapshot.start = no_memory  # type: ignore[method-assign]
    checkpointer.save_async(1, state, {})
    checkpointer.wait()
    Snapshot.start = real  # type: ignore[method-assign]
    checkpointer.save(2, state, {})
    checkpointer.close()


def main() -> int:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    run_world(3, root, save_twice)
    print(json.dumps(sorted(path.name for path in root.glob("step_*"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
