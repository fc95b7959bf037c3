"""The kill harness: a real two-process training job is SIGKILLed again and again; nothing may be lost or differ.

    python -m tests.checkpoint.protocol.kills --kills 300 --json

A job trains a small FSDP2 model with dropout and AdamW, saves behind training every second step and keeps two steps. It
is killed at random moments (the whole process group, or the trainers alone so that their writers live on) and at every
numbered failpoint of the commit protocol. After each kill every committed step must be whole, the newest one no older
than the last commit that the job had heard of; started again, each loss must be, bit for bit, that of a run which
nobody killed. Jobs are forked from this process, which has torch imported already: a round takes about a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol import commit, parity
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError
from keepstep.core.failpoints import FAILPOINTS, VARIABLE
from keepstep.core.step_folders import MARKER

WORLD = 2
STEPS = 16
SAVE_EVERY = 2


def append_line(path: Path, text: str) -> None:
    """One whole line or none, on disk before we go on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, text.encode() + b"\n")
    os.fsync(handle)
    os.close(handle)


def build() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 128))
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.AdamW, step: int) -> dict[str, Any]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "model": {name: parameter.detach() for parameter, name in names.items()},
        "optimizer": {names[parameter]: dict(state) for parameter, state in optimizer.state.items()},
        "rank": {"random": torch.get_rng_state()},
        "progress": {"step": step},
    }


def train(rank: int, folder: Path, rendezvous: Path) -> None:
    """One process of the job: resume, train to the end, save behind training."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    model, optimizer = build()
    torch.manual_seed(1000 + rank)

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        if rank == 0 and kind == "checkpoint_committed":
            append_line(folder / "commits", str(facts["step"]))
        if kind == "warning" and facts["reason"] != "checkpoint_delayed":
            append_line(folder / "warnings", f"rank {rank}: {facts['message']}")

    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig(keep=2), on_event)
    into = state_of(model, optimizer, 0)
    loaded = checkpointer.load_newest(into)
    step = 0
    if loaded is not None:
        step = loaded.values["progress"]["step"]
        torch.set_rng_state(into["rank"]["random"])
    while step < STEPS:
        batch = torch.randn(8, 128, generator=torch.Generator().manual_seed(step * WORLD + rank))
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        checkpointer.before_update()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            append_line(folder / "losses", f"{step} {total.item().hex()}")
        checkpointer.poll()
        if step % SAVE_EVERY == 0:
            checkpointer.save_async(step, state_of(model, optimizer, step), {"loss": total.item()})
    checkpointer.close()
    if rank == 0:
        append_line(folder / "done", str(step))
    dist.destroy_process_group()


def child(action: Any) -> int:
    """Fork; the child runs `action` and ends without this process's clean-up."""
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def start_job(folder: Path, number: int, failpoint: str = "") -> int:
    """Start all ranks in a process group of their own; the leader is rank 0's parent."""

    def lead() -> None:
        os.setsid()
        # A rank that loses its peer complains at length; what matters is checked from outside.
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if failpoint:
            os.environ[VARIABLE] = failpoint
        rendezvous = folder / f"rendezvous-{number}"
        ranks = [child(lambda rank=rank: train(rank, folder, rendezvous)) for rank in range(WORLD)]
        (folder / f"ranks-{number}").write_text(" ".join(map(str, ranks)))
        codes = [os.waitpid(pid, 0)[1] for pid in ranks]
        os._exit(1 if any(codes) else 0)

    return child(lead)


@dataclass
class Tally:
    """What the harness counts."""

    kills: int = 0
    failpoint_kills: int = 0
    kill_unloadable: int = 0
    steps_lost: int = 0
    loss_mismatches: int = 0
    runs_finished: int = 0
    problems: list[str] = field(default_factory=list)


class Harness:
    """Kills jobs and looks at what is left."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.tally = Tally()
        self.rounds = 0
        self.folder = self._fresh()
        self.reference, self.run_s = self._reference()

    def _fresh(self) -> Path:
        folder = self.root / f"run-{self.rounds}"
        folder.mkdir()
        return folder

    def _reference(self) -> tuple[dict[int, str], float]:
        began = time.monotonic()
        _, status = os.waitpid(start_job(self.folder, 0), 0)
        if status:
            raise RuntimeError((self.folder / "log").read_text())
        losses = self.losses(self.folder)
        self.folder = self._next()
        return losses, time.monotonic() - began

    def _next(self) -> Path:
        self.rounds += 1
        return self._fresh()

    @staticmethod
    def losses(folder: Path) -> dict[int, str]:
        """Every loss the run ever logged; a step logged twice must be logged alike."""
        found: dict[int, str] = {}
        lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
        for line in lines:
            step, value = line.split()
            if found.setdefault(int(step), value) != value:
                found[int(step)] = f"{found[int(step)]} and {value}"
        return found

    def kill_at_random(self) -> None:
        """One round: run until a random moment, kill, look."""
        self.rounds += 1
        leader = start_job(self.folder, self.rounds)
        ends = time.monotonic() + self.random.uniform(0.0, self.run_s * 1.1)
        while time.monotonic() < ends:
            if os.waitpid(leader, os.WNOHANG)[0]:
                self._finished()
                return
            time.sleep(0.002)
        trainers_only = self.random.random() < 0.25
        with suppress(ProcessLookupError):
            if trainers_only:
                ranks = self.folder / f"ranks-{self.rounds}"
                for pid in map(int, ranks.read_text().split() if ranks.exists() else []):
                    os.kill(pid, signal.SIGKILL)
            else:
                os.killpg(leader, signal.SIGKILL)
        if trainers_only:
            # The writers may go on: wait for a moment of their choosing, then look.
            time.sleep(self.random.uniform(0, 0.3))
        with suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
        self.tally.kills += 1
        self._look(f"kill {self.tally.kills}")

    def kill_at_failpoint(self, name: str, count: int) -> None:
        """Run a fresh job into one failpoint, look, then let it finish."""
        self.folder = self._next()
        leader = start_job(self.folder, self.rounds, f"{name}:{count}")
        _, status = os.waitpid(leader, 0)
        if not os.WIFSIGNALED(status):
            self.tally.problems.append(f"failpoint {name}:{count} was never reached")
        self.tally.failpoint_kills += 1
        self._look(f"failpoint {name}:{count}")
        self.finish()

    def finish(self) -> None:
        """Let the current run go on to its end undisturbed."""
        self.rounds += 1
        os.waitpid(start_job(self.folder, self.rounds), 0)
        self._finished()

    def _look(self, what: str) -> None:
        """Every committed step whole, and none missing that the job had heard of."""
        store = LocalStore(self.folder / "checkpoints")
        damages: list[CheckpointError] = []
        steps = commit.committed_steps(store, damages.append)
        problems = [error.message for error in damages]
        for step in steps:
            try:
                manifest = commit.read_manifest(store, step)
                found = (parity.file_problem(store, step.name, manifest, index) for index in range(len(manifest.files)))
                problems += [problem for problem in found if problem]
            except (CheckpointError, OSError) as error:
                # A writer that lives on may retire a step while we look at it: that is not damage.
                if MARKER in store.names(step.name):
                    problems.append(str(error))
        if problems:
            self.tally.kill_unloadable += 1
            self.tally.problems += [f"{what}: {problem}" for problem in problems]
        commits = self.folder / "commits"
        heard = max(map(int, commits.read_text().split()), default=0) if commits.exists() else 0
        newest = steps[0].step if steps else 0
        if heard > newest:
            self.tally.steps_lost += 1
            self.tally.problems.append(f"{what}: step {heard} was committed, the newest is {newest}")

    def _finished(self) -> None:
        """The run has ended by itself: its losses are those of the run nobody killed."""
        losses = self.losses(self.folder)
        if not (self.folder / "done").exists():
            self.tally.kill_unloadable += 1
            self.tally.problems.append(
                f"run {self.folder.name} could not go on: {(self.folder / 'log').read_text()[-2000:]}"
            )
        elif losses != self.reference:
            self.tally.loss_mismatches += 1
            wrong = [step for step in self.reference if losses.get(step) != self.reference[step]]
            self.tally.problems.append(f"run {self.folder.name}: the losses of steps {wrong} differ")
        if (self.folder / "warnings").exists():
            self.tally.problems.append(f"run {self.folder.name}: {(self.folder / 'warnings').read_text()}")
        self.tally.runs_finished += 1
        self.folder = self._next()


def run(kills: int, failpoint_counts: list[int], seed: int = 1, root: Path | None = None) -> Tally:
    """`kills` random kills and each failpoint at each of the given counts."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        harness = Harness(Path(folder), seed)
        while harness.tally.kills < kills:
            harness.kill_at_random()
            if kills >= 100 and harness.tally.kills % 20 == 0:
                print(f"{harness.tally.kills} kills", file=sys.stderr, flush=True)
        harness.finish()
        for name in FAILPOINTS:
            for count in failpoint_counts:
                harness.kill_at_failpoint(name, count)
        return harness.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failpoint-counts", default="1,3", help="kill at the n-th time each failpoint is reached")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tally = run(args.kills, [int(count) for count in args.failpoint_counts.split(",")], args.seed)
    print(json.dumps(tally.__dict__, indent=None if args.json else 1))
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
