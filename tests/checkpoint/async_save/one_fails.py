"""Three processes save twice; the first time one of them cannot copy its state. Prints the step folders left.

python -m tests.checkpoint.async_save.one_fails FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.async_save.staging import StagingBuffer
from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.schema import CheckpointConfig
from tests.checkpoint.elastic import build, run_world


def save_twice(world: int, rank: int, root: Path) -> None:
    checkpointer = Checkpointer(root, CheckpointConfig())
    state = {"model": build("shard", world, rank, zero=False)}
    real = StagingBuffer.start

    def no_memory(*words: Any) -> None:
        raise RuntimeError("out of memory")

    if rank == 1:
        StagingBuffer.start = no_memory  # type: ignore[method-assign]
    checkpointer.save_async(1, state, {})
    checkpointer.wait()
    StagingBuffer.start = real  # type: ignore[method-assign]
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
