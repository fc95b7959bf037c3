"""Corruption fuzz: damage a committed step at random and load it; identical tensors or a named error, nothing else.

python -m tests.checkpoint.protocol.fuzz --rounds 10000
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from keepstep.checkpoint.storage.store import LocalStore
from keepstep.core.errors import CheckpointError
from tests.checkpoint.support import Damage, example_state, load_step, same_tensors, write_step, zeroed


def run(rounds: int, seed: int, folder: Path) -> dict[str, int]:
    """How the loads ended: `named` errors, `identical` tensors, and `silent` ones that must be zero."""
    store = LocalStore(folder)
    state = example_state(2)
    older = write_step(store, 1, example_state(1))
    newer = write_step(store, 2, state)
    rng = random.Random(seed)
    counts: Counter[str] = Counter(named=0, identical=0, silent=0, unnamed=0)
    into = zeroed(state)
    for _ in range(rounds):
        damage = Damage(rng, folder / newer.name, folder / older.name)
        try:
            load_step(store, newer.name, into)
            counts["identical" if same_tensors(state, into) else "silent"] += 1
        except (CheckpointError, FileNotFoundError):
            # A step whose marker is gone does not exist: that is the FileNotFoundError.
            counts["named"] += 1
        except Exception as error:
            counts["unnamed"] += 1
            print(f"{damage.kind} of {damage.path.name}: {error!r}", file=sys.stderr)
        damage.undo()
    return dict(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        counts = run(args.rounds, args.seed, Path(folder))
    print(json.dumps(counts))
    return 1 if counts["silent"] or counts["unnamed"] else 0


if __name__ == "__main__":
    sys.exit(main())
