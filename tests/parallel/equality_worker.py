"""One process of a world that trains tiny models in many layouts, one after the other.

Run by `worlds.py` with the variables torchrun would set: `python equality_worker.py CASES.json RESULTS.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.load import load_config
from keepstep.config.schema import CheckpointConfig, RunConfig
from keepstep.core.ranks import from_environment
from keepstep.data.loader import Batch
from keepstep.parallel.mesh import Grid, build_grid
from keepstep.parallel.world import joined_world
from keepstep.train.run import build_step, check_layout

STEPS = 10


def global_batch(config: RunConfig, step: int, packed: bool) -> Batch:
    """Random rows of one step; some targets carry no loss, unevenly over rows, so that wrong weights show."""
    random = np.random.default_rng([config.seed, step])
    shape = (config.global_batch, config.model.seq_len)
    tokens = random.integers(0, config.model.vocab, (shape[0], shape[1] + 1))
    targets = tokens[:, 1:].copy()
    targets[random.random(shape) < np.linspace(0.0, 0.5, shape[0])[:, None]] = -100
    documents = np.cumsum(random.random(shape) < 0.1, axis=1) if packed else None
    return Batch(tokens[:, :-1].copy(), targets, None, documents, step * config.global_batch)


def micro_batches(config: RunConfig, grid: Grid, step: int, packed: bool) -> list[Batch]:
    batch = global_batch(config, step, packed)
    size = config.microbatch
    numbers = range(grid.data_rank, config.global_batch // size, grid.layout.data_ranks)

    def rows(number: int) -> slice:
        return slice(number * size, (number + 1) * size)

    return [
        Batch(
            batch.inputs[rows(number)],
            batch.targets[rows(number)],
            None,
            None if batch.documents is None else batch.documents[rows(number)],
            number * size,
        )
        for number in numbers
    ]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    ranks = from_environment()
    config = load_config(None, case["words"]).config
    grid = build_grid(check_layout(config, ranks.world_size), "cpu")
    built = build_step(config, grid, torch.device("cpu"))
    packed = bool(case.get("packed"))
    state = {"model": dict(built.model.named_parameters()), "optimizer": built.optimizers.state()}
    if case.get("load"):
        Checkpointer(case["load"], CheckpointConfig()).load_newest(state)
    first = micro_batches(config, grid, 1000, packed)[0]
    numbers = []
    for step in range(case.get("steps", STEPS)):
        result = built.step.run(micro_batches(config, grid, step, packed), lr_share=1.0)
        numbers.append(result[:2].tolist())
    if case.get("save"):
        Checkpointer(case["save"], CheckpointConfig()).save(len(numbers), state, {})
    built.model.eval()
    with torch.no_grad():
        loss, targets = built.step.evaluate(first)
    totals = torch.tensor([float(loss), float(targets)], dtype=torch.float64)
    torch.distributed.all_reduce(totals)
    # Every data rank evaluates other rows; what all see alike is the sum over all of them only with one data rank.
    valid = float(totals[0] / totals[1]) if grid.layout.data_ranks == 1 else None
    return {"numbers": numbers, "valid": valid, "targets": int(totals[1])}


def main() -> None:
    cases_file, results_file = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    results = {}
    ranks = from_environment()
    with joined_world(ranks, torch.device("cpu"), timeout_s=120):
        for case in json.loads(cases_file.read_text()):
            started = time.perf_counter()
            results[case["name"]] = run_case(case)
            results[case["name"]]["seconds"] = time.perf_counter() - started
    if ranks.is_first:
        results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
