"""The torchft part of the survival benchmark: the same model and the same kills through torchft 0.2.0.

    python benchmarks/survive.py --only torchft

Used as its README and its train_ddp.py say: a lighthouse, and in each replica a Manager, ProcessGroupGloo and the
wrapper of the optimizer. Gradients go through Manager.allreduce: with its DistributedDataParallel the survivors end
with an AssertionError (`assert fut._fut` in ddp.py) where the sum was waiting for the killed replica. The package is
installed into a folder of its own, next to the torch of this environment. A killed replica starts again after the
others have committed some steps, so its return does not count.

`stall` is measured as for keepstep: the time between two committed steps of a survivor beyond the usual one. torchft
drops the step in flight and its samples; keepstep redoes it. The lighthouse waits for a lost replica until it has
missed heartbeats for 5 s (its default), and a survivor whose neighbour in the ring is well waits for the timeout of
the process group (5 s in train_ddp.py). `torchft_tuned_stall_s` is with 0.5 s and 1 s: too short for real steps.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

VERSION = "0.2.0"
REQUIREMENTS = ("opentelemetry-exporter-otlp-proto-http>=1.39.0", "opentelemetry-sdk>=1.39.0")
"""What torchft needs apart from torch."""
REPLICAS = 4
LIGHTHOUSE = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
"""As in torchft's README."""
GROUP_TIMEOUT_S = 5.0
"""As in torchft's train_ddp.py."""
TUNED = ["--heartbeat_timeout_ms", "500"]
TUNED_GROUP_TIMEOUT_S = 1.0
STEPS_BETWEEN = 10
TIMEOUT_S = 120.0


def measure(folder: Path, kills: int, words: Sequence[str]) -> dict[str, Any]:
    """Stalls of the survivors of the run that `words` describe; null, with the reason, where torchft cannot run."""
    stalls: dict[str, Any] = {"torchft_stall_s": None, "torchft_tuned_stall_s": None}
    why = ""
    try:
        install(folder / "packages")
        for name, options, timeout_s in (
            ("torchft", [], GROUP_TIMEOUT_S),
            ("torchft_tuned", TUNED, TUNED_GROUP_TIMEOUT_S),
        ):
            run = Run(folder / name, folder / "packages", [str(timeout_s), *words])
            stalls[f"{name}_stall_s"] = round(run.stall_s(kills, options), 4)
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()[-500:]
    except RuntimeError as error:
        why = str(error)
    return {**stalls, "torchft_kills": 2 * kills, "torchft_why": why}


def install(packages: Path) -> None:
    """Install torchft without torch, which is there; CalledProcessError where there is no wheel for this machine."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    for words in (["--no-deps", f"torchft=={VERSION}"], list(REQUIREMENTS)):
        subprocess.run([*pip, "--target", str(packages), *words], check=True, capture_output=True)


class Run:
    """The lighthouse and the replicas of one run."""

    def __init__(self, folder: Path, packages: Path, words: Sequence[str]) -> None:
        """`words` are the last arguments of `train`."""
        self._folder, self._packages, self._words = folder, packages, words
        # Last: packages of this environment, such as torch, come first.
        path = os.pathsep.join([*filter(None, sys.path), str(packages)])
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def stall_s(self, kills: int, options: Sequence[str]) -> float:
        """Median stall of the survivors over all kills, with these options of the lighthouse."""
        self._folder.mkdir(parents=True)
        lighthouse = self._packages / "bin" / "torchft_lighthouse"
        try:
            self._start("lighthouse", lighthouse, "--bind", f"[::]:{self._port}", *LIGHTHOUSE, *options)
            for number in range(REPLICAS):
                self._start_replica(number)
            return statistics.median(self._kill(kills))
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    def _start(self, name: str, script: Path, *options: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, str(script), *options], env=self._environment, stdout=log, stderr=log
            )

    def _start_replica(self, number: int) -> None:
        (self._folder / f"{number}.jsonl").unlink(missing_ok=True)
        options = [str(number), str(self._folder), f"http://localhost:{self._port}", *self._words]
        self._start(str(number), Path(__file__), *options)

    def _kill(self, kills: int) -> list[float]:
        dice = random.Random(kills)
        stalls: list[float] = []
        self._wait(range(REPLICAS), time.time())
        for _ in range(kills):
            number = dice.randrange(REPLICAS)
            survivors = [each for each in range(REPLICAS) if each != number]
            time.sleep(dice.random() * 0.2)
            killed_at = time.time()
            self._processes[str(number)].kill()
            self._processes[str(number)].wait()
            self._wait(survivors, killed_at)
            stalls += [_stall_s(self._commits(each), killed_at) for each in survivors]
            self._start_replica(number)
            self._wait(range(REPLICAS), time.time())
        return stalls

    def _wait(self, numbers: Sequence[int], since: float) -> None:
        """Until exactly these replicas have committed some steps together since then."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            together = [
                sum(each["time"] > since and each["participants"] == len(numbers) for each in self._commits(number))
                for number in numbers
            ]
            if min(together) >= STEPS_BETWEEN:
                return
            time.sleep(0.1)
        logs = "".join((self._folder / f"{number}.log").read_text()[-400:] for number in numbers)
        raise RuntimeError(f"{len(numbers)} replicas did not train together within {TIMEOUT_S:.0f} s: {logs}")

    def _commits(self, number: int) -> list[dict[str, Any]]:
        path = self._folder / f"{number}.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]


def _stall_s(commits: list[dict[str, Any]], killed_at: float) -> float:
    """The longest time between two commits since the kill, beyond the usual one before it."""
    gaps = [(after["time"], after["time"] - before["time"]) for before, after in pairwise(commits)]
    usual_s = statistics.median(gap_s for at, gap_s in gaps if at < killed_at)
    return max(gap_s for at, gap_s in gaps if at >= killed_at) - usual_s


def train(number: int, folder: Path, lighthouse: str, group_timeout_s: float, words: Sequence[str]) -> None:
    """One replica, until it is killed."""
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from keepstep.config.load import load_config
    from keepstep.models.init import init_weights
    from keepstep.models.transformer import Transformer

    torch.set_num_threads(1)
    config = load_config(None, words).config
    samples = config.global_batch // REPLICAS
    model = Transformer(config.model)
    init_weights(model, config.seed)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=group_timeout_s)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{number}",
        timeout=timedelta(seconds=30),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="localhost",
        lighthouse_addr=lighthouse,
    )
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr))
    generator = torch.Generator().manual_seed(number)
    with (folder / f"{number}.jsonl").open("a", buffering=1) as file:
        while True:
            before = manager.current_step()
            rows = torch.randint(0, config.model.vocab, (samples, config.model.seq_len + 1), generator=generator)
            optimizer.zero_grad()
            model(rows[:, :-1], rows[:, 1:]).backward()
            grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
            total = torch.cat([grad.flatten() for grad in grads])
            manager.allreduce(total).wait()
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
            optimizer.step()
            if manager.current_step() > before:
                commit = {"step": before, "time": time.time(), "participants": manager.num_participants()}
                file.write(json.dumps(commit) + "\n")


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5:])
