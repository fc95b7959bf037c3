"""How long a save blocks, and how long a save and a load take, compared with torch's DCP: 2 processes, 100M parameters.

    make bench-checkpoint        writes benchmarks/results/checkpoint.json

The two sides alternate on the same disk, so that a busy machine affects both. The kill harness runs at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol.layout import local_shard, split_state
from keepstep.config.schema import CheckpointConfig

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "checkpoint.json"
WIDTH, LAYERS, VOCAB = 768, 12, 24576


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


class Training:
    """A real FSDP2 model with AdamW; `step` calls a hook between backward and update."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Model()
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, VOCAB, (1, 64))
        self.step()

    def step(self, before_update: Callable[[], None] = lambda: None) -> float:
        start_s = time.perf_counter()
        self.model(self.tokens).backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start_s

    def state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            "model": {name: parameter.detach() for parameter, name in names.items()},
            "optimizer": {names[parameter]: dict(state) for parameter, state in self.optimizer.state.items()},
        }


def flat_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return split_state(state)[0]


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    start_s = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def slowest(seconds: float) -> float:
    worst = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def measure_memcpy(state: dict[str, Any], rounds: int) -> list[float]:
    """One plain copy of this rank's state into an existing buffer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    locals_ = [local_shard(name, tensor, rank, world).local for name, tensor in flat_tensors(state).items()]
    targets = [torch.zeros_like(local) for local in locals_]

    def copy() -> None:
        for target, local in zip(targets, locals_, strict=True):
            target.copy_(local)

    copy()
    return [timed(copy) for _ in range(rounds)]


def measure_stall(training: Training, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds for which an asynchronous save blocks the loop, and how much it slows the step that runs meanwhile."""
    blocked, during, plain, totals = [], [], [], []
    committed: list[dict[str, Any]] = []

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        if kind == "checkpoint_committed":
            committed.append(facts)
        elif kind == "warning":
            raise RuntimeError(facts["message"])

    checkpointer = Checkpointer(folder, CheckpointConfig(keep=1), on_event)
    checkpointer.prepare(training.state())
    for number in range(rounds + 1):
        plain.append(timed(training.step))
        waits = []

        def before_update(waits: list[float] = waits) -> None:
            start_s = time.perf_counter()
            checkpointer.before_update()
            waits.append(time.perf_counter() - start_s)

        state = training.state()
        dist.barrier()
        start_s = time.perf_counter()
        checkpointer.save_async(number, state, {})
        waits.append(time.perf_counter() - start_s)
        during.append(timed(lambda: training.step(before_update)))
        blocked.append(slowest(sum(waits)))
        checkpointer.wait()
        totals.append(slowest(time.perf_counter() - start_s))
    checkpointer.close()
    remove(folder)
    # The first round warms up disk and writer.
    extra = [with_save - without for with_save, without in zip(during[1:], plain[1:], strict=True)]
    return {"blocked_s": blocked[1:], "extra_step_s": extra, "step_s": plain[1:], "until_committed_s": totals[1:]}


def measure_saves(state: dict[str, Any], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Complete saves, alternating: ours with hashes and fsync, DCP by default (fsync, no hashes), DCP without fsync."""
    ours, dcp_default, dcp_unsynced = [], [], []
    checkpointer = Checkpointer(folder / "ours", CheckpointConfig(keep=1))
    checkpointer.prepare(state)
    for number in range(rounds + 1):
        ours.append(timed(lambda: checkpointer.save(number, state, {})))  # noqa: B023
        target = folder / "dcp"
        dcp_default.append(timed(lambda: dcp.save(flat_tensors(state), checkpoint_id=str(target))))  # noqa: B023
        remove(target)
        writer = dcp.FileSystemWriter(target, sync_files=False)
        dcp_unsynced.append(timed(lambda: dcp.save(flat_tensors(state), storage_writer=writer)))  # noqa: B023
        remove(target)
    checkpointer.close()
    remove(folder / "ours")
    return {"keepstep_s": ours[1:], "dcp_s": dcp_default[1:], "dcp_unsynced_s": dcp_unsynced[1:]}


def measure_loads(state: dict[str, Any], folder: Path, rounds: int) -> dict[str, Any]:
    """Complete loads in place, alternating, from files that were just written."""
    checkpointer = Checkpointer(folder / "ours", CheckpointConfig(keep=1))
    checkpointer.save(1, state, {})
    dcp.save(flat_tensors(state), checkpoint_id=str(folder / "dcp"))
    ours, theirs, read = [], [], 0
    for _ in range(rounds + 1):
        results: list[Any] = []
        ours.append(timed(lambda: results.append(checkpointer.load_newest(state))))  # noqa: B023
        theirs.append(timed(lambda: dcp.load(flat_tensors(state), checkpoint_id=str(folder / "dcp"))))
        total = torch.tensor(results[0].bytes_read)
        dist.all_reduce(total)
        read = int(total)
    stored = checkpointer.find()
    assert stored is not None
    checkpointer.close()
    grown = bytes_read_when_grown(state, folder / "one")
    remove(folder)
    ratio = read / stored.marker.data_bytes
    return {"keepstep_s": ours[1:], "dcp_s": theirs[1:], "bytes_read_over_stored": ratio, "bytes_read_grown": grown}


def bytes_read_when_grown(state: dict[str, Any], folder: Path) -> float:
    """Bytes that two processes read from a checkpoint of one process, relative to the bytes stored."""
    checkpointer = Checkpointer(folder, CheckpointConfig(format="full"))
    checkpointer.save(1, state, {})
    loaded = checkpointer.load_newest(state)
    assert loaded is not None
    total = torch.tensor(loaded.bytes_read)
    dist.all_reduce(total)
    checkpointer.close()
    return int(total) / loaded.where.marker.data_bytes


def worker(rank: int, world: int, port: int, folder: str, rounds: int, answer: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    training = Training()
    state = training.state()
    place = Path(folder)
    results = {
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "state_bytes": sum(tensor.numel() * tensor.element_size() for tensor in flat_tensors(state).values()),
        "memcpy": {"keepstep_s": measure_memcpy(state, rounds)},
        "stall": measure_stall(training, place / "stall", rounds),
        "save": measure_saves(training.state(), place / "save", rounds),
        "load": measure_loads(training.state(), place / "load", rounds),
    }
    if rank == 0:
        Path(answer).write_text(json.dumps(results))
    dist.destroy_process_group()


def run_kills(kills: int) -> dict[str, Any]:
    """Run the kill harness in a separate process."""
    command = [sys.executable, "-m", "tests.checkpoint.protocol.kills", "--kills", str(kills), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, cwd=ROOT)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """The published figures, computed from the raw seconds."""
    median = statistics.median
    memcpy_s, save_s = median(raw["memcpy"]["keepstep_s"]), median(raw["save"]["keepstep_s"])
    return {
        "stall_over_memcpy": median(raw["stall"]["blocked_s"]) / memcpy_s,
        "save_over_dcp": save_s / median(raw["save"]["dcp_s"]),
        "save_over_dcp_unsynced": save_s / median(raw["save"]["dcp_unsynced_s"]),
        "load_vs_dcp": median(raw["load"]["dcp_s"]) / median(raw["load"]["keepstep_s"]),
        "bytes_read_over_stored": raw["load"]["bytes_read_over_stored"],
        "bytes_read_over_stored_grown": raw["load"]["bytes_read_grown"],
        "memcpy_s": memcpy_s,
        "blocked_s": median(raw["stall"]["blocked_s"]),
        "extra_step_s": median(raw["stall"]["extra_step_s"]),
        "save_s": save_s,
        "dcp_save_s": median(raw["save"]["dcp_s"]),
        "load_s": median(raw["load"]["keepstep_s"]),
        "dcp_load_s": median(raw["load"]["dcp_s"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="repeats of each measurement; medians are reported")
    parser.add_argument("--kills", type=int, default=300, help="SIGKILLs at random moments; 0 skips the kill harness")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        answer = Path(folder) / "answer.json"
        mp.spawn(worker, (2, port, folder, args.rounds, str(answer)), nprocs=2)
        raw = json.loads(answer.read_text())
    results = {**summary(raw), "processes": 2, "parameters": raw["parameters"], "state_bytes": raw["state_bytes"]}
    if args.kills:
        results |= run_kills(args.kills)
    results |= {"torch": torch.__version__, "machine": f"{os.cpu_count()} cores, {platform.system()}", "raw": raw}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({key: value for key, value in results.items() if key != "raw"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
