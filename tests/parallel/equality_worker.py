"""A world of processes that trains tiny models in many layouts, one after the other.

`worlds.py` starts it with the variables that torchrun sets, except the ranks:

    python -m tests.parallel.equality_worker CASES.json RESULTS.json

Its processes are forked from this one, which has imported torch: as in a run, imports cost more than most cases.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.layout import check_layout
from keepstep.config.load import load_config
from keepstep.config.schema import CheckpointConfig, RunConfig
from keepstep.core.ranks import from_environment
from keepstep.data.batch import Batch
from keepstep.parallel import activation_offload
from keepstep.parallel.mesh import ParallelMesh, build_mesh
from keepstep.parallel.world import joined_world
from keepstep.train.build import Learner, build_learner
from tests.patience import PATIENCE_S

STEPS = 10


def micro_batches(config: RunConfig, mesh: ParallelMesh, step: int, packed: bool) -> list[Batch]:
    """This process's rows of one step; some targets carry no loss, unevenly over rows, so that wrong weights show."""
    random = np.random.default_rng([config.seed, step])
    shape = (config.global_batch, config.model.seq_len)
    tokens = random.integers(0, config.model.vocab, (shape[0], shape[1] + 1))
    targets = tokens[:, 1:].copy()
    targets[random.random(shape) < np.linspace(0.0, 0.5, shape[0])[:, None]] = -100
    documents = np.cumsum(random.random(shape) < 0.1, axis=1) if packed else None
    batches = []
    for number in range(mesh.data_rank, config.global_batch // config.microbatch, mesh.layout.data_ranks):
        rows = slice(number * config.microbatch, (number + 1) * config.microbatch)
        documents_of = None if documents is None else documents[rows]
        batches.append(Batch(tokens[rows, :-1].copy(), targets[rows], None, documents_of, rows.start))
    return batches


def fingerprints(tensors: dict[str, Any]) -> dict[str, str]:
    """A hash of each whole tensor by name, from all processes; those that hold the same name must agree."""
    digests: dict[str, str] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digests[name] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests)
    joined: dict[str, str] = {}
    for theirs in everyone:
        for name, digest in theirs.items():
            assert joined.setdefault(name, digest) == digest, f"processes hold different {name}"
    return joined


def embedding_noise(built: Learner, batch: Batch) -> float:
    """The most that training changes what an embedding returns, over all processes."""
    seen: list[torch.Tensor] = []
    embed = built.model._modules["embed"]
    if embed is not None:
        embed.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        built.step.evaluate(batch)
        built.model.eval()
        built.step.evaluate(batch)
    largest = (seen[0] - seen[1]).abs().max() if seen else torch.zeros(())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    config = load_config(None, case["words"]).config
    mesh = build_mesh(check_layout(config, dist.get_world_size()), "cpu")
    # A CPU never chooses bounds of documents by itself.
    with mock.patch("keepstep.train.build.uses_varlen_attention", return_value=case.get("use_varlen", False)):
        built = build_learner(config, mesh, torch.device("cpu"))
    packed = case.get("packed", False)
    # Tensors of these models are far below the limit of a run.
    activation_offload.MIN_BYTES = 1024
    weights = dict(built.model.named_parameters())
    state = {"model": weights, "optimizer": built.optimizers.state()}
    if case.get("load"):
        loaded = Checkpointer(case["load"], CheckpointConfig()).load_newest(state)
        assert loaded is not None
    result: dict[str, Any] = {"started": fingerprints(weights) if case.get("fingerprints") else None}
    result["numbers"] = [
        built.step.run(micro_batches(config, mesh, step, packed), lr_share=1.0)[:2].tolist()
        for step in range(case.get("steps", STEPS))
    ]
    buffers = [each for each in gc.get_objects() if isinstance(each, activation_offload.HostBuffers)]
    result["host_bytes"] = [sum(each.peak_bytes for each in buffers), sum(each.size_bytes for each in buffers)]
    if case.get("fingerprints"):
        moments = {f"{name}.{slot}": kept for name, slots in state["optimizer"].items() for slot, kept in slots.items()}
        result["ended"] = fingerprints(weights) | fingerprints(moments)
    if case.get("save"):
        Checkpointer(case["save"], CheckpointConfig()).save(1, state, {})
    if config.finetune.neftune:
        result["noise"] = embedding_noise(built, micro_batches(config, mesh, STEPS, packed)[0])
    built.model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in micro_batches(config, mesh, STEPS, packed):
            loss_sum, targets = built.step.evaluate(batch)
            totals += torch.tensor([float(loss_sum), float(targets)], dtype=torch.float64)
    dist.all_reduce(totals)
    return {**result, "valid": float(totals[0] / totals[1]), "targets": int(totals[1])}


def run_rank(rank: int, cases_file: Path, results_file: Path) -> None:
    """All cases, as one process of the world."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    # A process that ends by a signal says where.
    faulthandler.enable()
    results = {}
    ranks = from_environment()
    with joined_world(ranks, torch.device("cpu"), timeout_s=PATIENCE_S):
        for case in json.loads(cases_file.read_text()):
            started = time.perf_counter()
            print(f"process {rank}: {case['name']}", flush=True)
            results[case["name"]] = run_case(case)
            results[case["name"]]["seconds"] = time.perf_counter() - started
    if ranks.is_first:
        results_file.write_text(json.dumps(results))


def start_rank(rank: int, cases_file: Path, results_file: Path) -> int:
    """Fork one process of the world: its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run_rank(rank, cases_file, results_file)
        code = 0
    except BaseException:
        results_file.with_suffix(f".failed_{rank}").write_text(traceback.format_exc())
        traceback.print_exc()
    finally:
        # As a run's own workers leave: torch's threads may end Python's teardown with an abort, once in a thousand
        # worlds.
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    cases_file, results_file = map(Path, sys.argv[1:])
    children = [start_rank(rank, cases_file, results_file) for rank in range(int(os.environ["WORLD_SIZE"]))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(f"the processes ended with {codes}")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
