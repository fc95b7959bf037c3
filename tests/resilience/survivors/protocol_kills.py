"""The kill harness of the step protocol: replicas that train a vector of whole numbers are SIGKILLed again and again.

    python -m tests.resilience.survivors.protocol_kills --kills 50 --json

Every replica is a process that runs the real coordinator's protocol; only the model is a toy, so that a replacement
takes milliseconds. Replicas are killed at each failpoint of the protocol, and at random. The weights of all replicas
must be, bit for bit, those of one process that nobody killed, and every micro batch must be in each sum exactly once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import Store

from keepstep.core import failpoints
from keepstep.core.errors import KeepstepError
from keepstep.core.ranks import COORDINATOR
from keepstep.resilience.survivors.coordinator import Coordinator
from keepstep.resilience.survivors.device_exchange import Group, MakeGroup
from keepstep.resilience.survivors.replica import MembershipChangedError, Replica
from keepstep.resilience.survivors.state_copy import Bytes, part_bounds

MICROBATCHES = 8
SIZE = 4000
WHEN_JOINING = ("view_received", "exchange_formed", "serving", "entering", "copying", "copied", "replayed")
"""Failpoints that a replica reaches more than once only if others join."""
Weights = NDArray[np.int64]
MAKE_GROUP: MakeGroup | None = None
"""What replicas sum with in the place of their own exchange."""


def gloo_group(store: Store, rank: int, size: int) -> Group:
    """Gloo in the place of NCCL: a collective that waits for a lost process is the same to both."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))


def gradient(step: int, microbatch: int, weights: Weights) -> Weights:
    return np.random.default_rng(step * 1000 + microbatch).integers(-1000, 1000, SIZE) * (1 + (weights > 0))


def undisturbed(steps: int) -> str:
    weights = np.zeros(SIZE, np.int64)
    for step in range(1, steps + 1):
        weights += sum(gradient(step, microbatch, weights) for microbatch in range(MICROBATCHES))
    return hashlib.sha256(weights.tobytes()).hexdigest()


@dataclass
class ToyState:
    """What replicas of the toy have in common."""

    weights: Weights
    clock: NDArray[np.int64]

    def part(self, part: int, parts: int) -> Bytes:
        everything = np.concatenate([self.weights, self.clock]).view(np.uint8)
        start, end = part_bounds(len(everything), part, parts)
        return everything[start:end].copy()

    def values(self) -> dict[str, Any]:
        return {"step": int(self.clock[0])}

    def buffers(self) -> list[memoryview]:
        return [self.weights.view(np.uint8).data, self.clock.view(np.uint8).data]

    def install(self) -> None:
        pass

    def replay(self, facts: Mapping[str, Any], sums: Weights) -> None:
        assert facts == {"after": int(self.clock[0])}
        self.weights += sums[:SIZE]
        self.clock[0] += 1


def train(coordinator: Path, number: int, steps: int, pause_s: float) -> None:
    """One replica."""
    os.setpgid(0, 0)
    weights, clock = np.zeros(SIZE, np.int64), np.zeros(1, np.int64)
    state = ToyState(weights, clock)
    replica = Replica(os.environ.get(COORDINATOR) or coordinator, number)
    replica.make_group = MAKE_GROUP
    total = replica.shared_numbers(SIZE + MICROBATCHES)
    if replica.leads:
        replica.enter(0)
    else:
        values = replica.copy_from_members(state)
        assert values == {"step": int(clock[0])}
    while clock[0] < steps:
        replica.at_boundary(state)
        step = int(clock[0]) + 1
        _sum_step(replica, step, weights, total, pause_s)
        weights += total[:SIZE]
        clock[0] = step
        failpoints.reach("applied")
    replica.finish()
    result = coordinator.with_name(f"weights-{number}-{os.getpid()}")
    result.write_text(hashlib.sha256(weights.tobytes()).hexdigest())
    replica.close()


def _sum_step(replica: Replica, step: int, weights: Weights, total: Weights, pause_s: float) -> None:
    while True:
        try:
            total[:] = 0
            for microbatch in replica.share(MICROBATCHES):
                total[:SIZE] += gradient(step, microbatch, weights)
                total[SIZE + microbatch] += 1
                time.sleep(pause_s)
            replica.sum_(total if MAKE_GROUP is None else torch.from_numpy(total))
            assert (total[SIZE:] == 1).all(), f"micro batches in the sum: {total[SIZE:]}"
            replica.commit(step, hashlib.sha256(total.tobytes()).hexdigest())
        except MembershipChangedError:
            replica.rejoin()
            continue
        replica.relay(lambda: {"after": step - 1}, lambda: total)
        return


def _in_process(*arguments: Any) -> None:
    try:
        train(*arguments)
    except KeepstepError as error:
        sys.exit(error.exit_code)


@dataclass
class Job:
    """Replicas and their coordinator, as an agent would hold them."""

    folder: Path
    replicas: int
    steps: int
    pause_s: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    environment_of_replacements: dict[str, str] = field(default_factory=dict)
    kills: int = 0
    losses: int = 0
    lost_or_joined: int = 0
    """Replicas that joined and have done a step, less those who left."""
    processes: dict[int, BaseProcess] = field(default_factory=dict)

    def run(self, random_kills: int = 0, seed: int = 0) -> set[str]:
        """Hashes of the weights of all replicas that finished. Raises if nobody is left to continue."""
        coordinator = Coordinator(self.folder / "membership", self.replicas)
        dice, next_kill = random.Random(seed), time.monotonic() + 0.3
        try:
            os.environ.update(self.environment)
            for number in range(self.replicas):
                self._start(coordinator, number)
            os.environ.update(self.environment_of_replacements)
            while any(process.exitcode is None for process in self.processes.values()):
                time.sleep(0.002)
                # Never the last one that has the state: wait until each loss has been noticed and made up for.
                while not coordinator.events.empty():
                    event = coordinator.events.get()
                    self.losses += event["kind"] == "left"
                    self.lost_or_joined += {"left": -1, "joined": 1}[event["kind"]]
                full = not self.lost_or_joined and len(coordinator.membership.members) == self.replicas
                noticed = self.losses >= self.kills and full
                complete = noticed and coordinator.can_replace
                if self.kills < random_kills and time.monotonic() > next_kill and complete:
                    self._kill(dice)
                    next_kill = time.monotonic() + dice.random() * 0.1
                self._replace(coordinator)
        finally:
            for name in {**self.environment, **self.environment_of_replacements}:
                os.environ.pop(name)
            for process in self.processes.values():
                process.kill()
                process.join()
            coordinator.close()
        return {path.read_text() for path in self.folder.glob("weights-*")}

    def _start(self, coordinator: Coordinator, number: int) -> None:
        context = multiprocessing.get_context("fork")
        arguments = (coordinator.path, number, self.steps, self.pause_s)
        self.processes[number] = context.Process(target=_in_process, args=arguments)
        self.processes[number].start()

    def _kill(self, dice: random.Random) -> None:
        victim = dice.choice(list(self.processes.values()))
        if victim.pid and victim.exitcode is None:
            os.kill(victim.pid, signal.SIGKILL)
            self.kills += 1

    def _replace(self, coordinator: Coordinator) -> None:
        for number, process in list(self.processes.items()):
            if process.exitcode in (None, 0):
                continue
            if coordinator.can_replace:
                self._start(coordinator, number)
            elif coordinator.membership.over:
                del self.processes[number]
            else:
                raise AssertionError(f"replica {number} ended with {process.exitcode}, and nobody is left")


def kill_at(point: str, folder: Path, occurrence: int) -> bool:
    """Kill the first replica that reaches a failpoint for the nth time; whether all weights are right afterwards."""
    mark = folder / "mark"
    environment = {failpoints.VARIABLE: f"{point}:{occurrence}", failpoints.MARK_VARIABLE: str(mark)}
    if point in WHEN_JOINING:
        # At the start only one replica has a state; later ones join because others are killed at random.
        environment[failpoints.VARIABLE] = f"{point}:1"
        job = Job(folder, replicas=3, steps=150, pause_s=0.004, environment_of_replacements=environment)
        weights = job.run(random_kills=6, seed=occurrence)
    else:
        job = Job(folder, replicas=3, steps=12, environment=environment)
        weights = job.run()
    assert mark.exists(), f"nobody reached {point}"
    return weights == {undisturbed(job.steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="at each failpoint")
    parser.add_argument("--collective", action="store_true", help="at random, of replicas that sum with gloo")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = kill_in_collectives(args.kills) if args.collective else kill_at_all_points(args.kills)
    print(json.dumps(result) if args.json else result)


def kill_in_collectives(kills: int) -> dict[str, int]:
    """Kill replicas at random that sum with gloo."""
    global MAKE_GROUP
    MAKE_GROUP = gloo_group
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), replicas=3, steps=60, pause_s=0.004)
        weights = job.run(random_kills=kills)
    return {"protocol_kills": job.kills, "protocol_mismatches": len(weights - {undisturbed(job.steps)})}


def kill_at_all_points(each: int) -> dict[str, int]:
    """Kill replicas at each failpoint."""
    kills, mismatches = 0, 0
    for point in failpoints.STEP_FAILPOINTS:
        for number in range(each):
            with tempfile.TemporaryDirectory() as folder:
                kills += 1
                mismatches += not kill_at(point, Path(folder), occurrence=1 + number % 10)
        print(f"{point}: {each} kills, {mismatches} mismatches so far", file=sys.stderr)
    return {"protocol_kills": kills, "protocol_mismatches": mismatches}


if __name__ == "__main__":
    main()
