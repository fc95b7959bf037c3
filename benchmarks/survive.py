"""Kills replicas of a run that survives, and compares it with an undisturbed run and with the restart path.

    python benchmarks/survive.py [--kills 1000] [--protocol-kills 50]

Writes benchmarks/results/survive.json. Four replicas train on CPUs without snapshots, and save only at the
end. Random ones get SIGKILL (three of four) or SIGSTOP, also while they join, as long as two others are members.
`losses_equal` and `weights_equal` compare with one process that nobody killed, bit for bit. Stalls are the time of a
step beyond the usual one, in steps: `stall_*` when a replica left, `join_stall_steps` when one joined. `overhead` is
the usual step against that of the same run without `resilience.survive`, medians of alternating runs.
`stall_over_torchft` divides our stall by that of survive_torchft.py with torchft's documented settings,
`stall_over_torchft_tuned` by that with shorter timeouts. --only measures one part again.
`copy_over_loopback` is the speed of a state copy from three members, with its checks, over that of the bare sockets.
`cable_*` is the same run on two hosts whose cable is pulled and plugged in again (survive_cables.py, needs root).
`protocol_kills` are those of tests/resilience/survivors/protocol_kills.py. What was not measured is null.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import survive_cables
import survive_copy
import survive_torchft
from safetensors.numpy import load_file

from keepstep.core import proc
from keepstep.observe.run_folder import JsonLines, RunFolder

ROOT = Path(__file__).resolve().parents[1]
REPLICAS = 4
WORDS = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=32", "data=synthetic",
    "global_batch=8", "microbatch=1", "optimizer.lr=1e-2", "schedule.name=constant", "schedule.warmup=2ba",
    "evaluate.at_end=false", "evaluate.interval=0ba", "observe.tensorboard=false", "checkpoint.interval=0ba",
    "reproducible=elastic", "compute.threads=1", "compute.device=cpu",
]  # fmt: skip
LARGER = ["model.hidden=256", "model.layers=4", "model.vocab=4096", "model.seq_len=128"]
SURVIVE = ["resilience.survive=true", "resilience.snapshot_interval=0"]
STEPS_A_KILL = 5
FIRST_STEPS = 5
"""Nobody is killed before: only one replica has the state of the run, and a usual step is not known."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(folder: Path, name: str, steps: int, processes: int, *words: str) -> list[str]:
    run = [*WORDS, f"runs_dir={folder}", f"name={name}", f"max_duration={steps}ba", *words]
    return [sys.executable, "-m", "keepstep", "train", *run, "--procs", str(processes)]


def run(folder: Path, name: str, steps: int, processes: int, *words: str) -> None:
    line = command(folder, name, steps, processes, *words)
    subprocess.run(line, env=ENVIRONMENT, check=True, capture_output=True)


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in JsonLines(RunFolder(folder / name).metrics).read() if "loss" in line]


@dataclass
class Killer:
    """Kills random replicas of one run, never the last ones that have the state."""

    folder: Path
    agent: subprocess.Popen[bytes]
    dice: random.Random
    survives: bool = True
    kills: int = 0
    moved: int = 0
    """Survivors whose process id changed although nobody killed them."""
    _members: set[int] = field(default_factory=lambda: set(range(REPLICAS)))
    _pending: set[int] = field(default_factory=set)
    _seen: int = 0
    _pids: dict[int, int] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)

    def run(self, kills: int, pause_s: float) -> int:
        """Kill until there were `kills`, or the run ends; returns its exit code."""
        while self.agent.poll() is None and len(JsonLines(RunFolder(self.folder).metrics).read()) < FIRST_STEPS:
            time.sleep(0.05)
        while self.kills < kills and self.agent.poll() is None:
            time.sleep(pause_s * self.dice.random() * 2)
            self._read_events()
            replicas = self._replicas()
            if len(replicas) == REPLICAS and len(self._members - self._pending) >= (3 if self.survives else 4):
                self._kill(*self.dice.choice(list(replicas.items())))
        return self.agent.wait()

    def _kill(self, number: int, pid: int) -> None:
        self._killed.add(pid)
        os.kill(pid, signal.SIGSTOP if self.survives and self.dice.random() < 0.25 else signal.SIGKILL)
        self._pending.add(number)
        self.kills += 1

    def _read_events(self) -> None:
        events = JsonLines(RunFolder(self.folder).events).read()
        for event in events[self._seen :]:
            if event["kind"] == "left":
                self._members.discard(event["replica"])
                self._pending.discard(event["replica"])
            elif event["kind"] == "joined":
                self._members.add(event["replica"])
                self._pending.discard(event["replica"])
            elif event["kind"] in ("start", "resume"):
                # All processes are new.
                self._members, self._pending = set(range(REPLICAS)), set()
        self._seen = len(events)

    def _replicas(self) -> dict[int, int]:
        found = dict(_replicas(self.agent.pid))
        for number, pid in found.items():
            self.moved += self._pids.get(number, pid) not in (pid, *self._killed)
        self._pids = found
        return found


def _replicas(agent: int) -> Iterator[tuple[int, int]]:
    """Number and process id of every replica that an agent has started."""
    processes = {process.pid: process for process in proc.processes()}
    for process in processes.values():
        ancestor = process
        while ancestor.parent in processes and ancestor.pid != agent:
            ancestor = processes[ancestor.parent]
        if process.group == process.pid and ancestor.pid == agent:
            try:
                name = re.match(r"keepstep r(\d+)", Path(f"/proc/{process.pid}/comm").read_text())
            except OSError:
                continue
            if name:
                yield int(name[1]), process.pid


def killed_run(folder: Path, name: str, steps: int, kills: int, pause_s: float, *words: str) -> Killer:
    with (folder / f"{name}.log").open("w") as log:
        agent = subprocess.Popen(command(folder, name, steps, REPLICAS, *words), env=ENVIRONMENT, stderr=log)
        killer = Killer(folder / name, agent, random.Random(kills), survives=SURVIVE[0] in words)
        code = killer.run(kills, pause_s)
    if code:
        sys.exit(f"{name} ended with {code}:\n{(folder / f'{name}.log').read_text()[-2000:]}")
    return killer


def survival(folder: Path, kills: int) -> dict[str, Any]:
    """One run, many kills, and the same run undisturbed."""
    steps = STEPS_A_KILL * kills
    killer = killed_run(folder, "survive", steps, kills, 0.1, *SURVIVE)
    run(folder, "alone", steps, 1)
    ours, alone = records(folder, "survive"), records(folder, "alone")
    events = JsonLines(RunFolder(folder / "survive").events).read()
    left, joined = ([each for each in events if each["kind"] == kind] for kind in ("left", "joined"))
    step_s = statistics.median(each["usual_step_s"] for each in left)
    stalls = sorted(each["stall_s"] for each in left)
    done = [line["step"] for line in ours]
    return {
        "kills": killer.kills,
        "steps": steps,
        "restarts": sum(each["kind"] == "restart" for each in events),
        "survivors_moved": killer.moved,
        "losses_equal": [line["loss"] for line in ours] == [line["loss"] for line in alone],
        "weights_equal": weights_equal(folder / "survive", folder / "alone"),
        "samples_lost": (len(alone) - len(set(done))) * 8,
        "samples_repeated": (len(done) - len(set(done))) * 8,
        "step_s": round(step_s, 4),
        "stall_median_s": round(statistics.median(stalls), 4),
        "stall_p99_s": round(stalls[int(0.99 * (len(stalls) - 1))], 4),
        "stall_median_steps": round(statistics.median(stalls) / step_s, 3),
        "stall_p99_steps": round(stalls[int(0.99 * (len(stalls) - 1))] / step_s, 3),
        "join_stall_s": round(statistics.median(each["stall_s"] for each in joined), 4),
        "join_stall_steps": round(statistics.median(each["stall_s"] for each in joined) / step_s, 3),
    }


def cables(folder: Path, pulls: int) -> dict[str, Any]:
    """A run on two hosts whose cable is pulled, and the same run undisturbed."""
    results = survive_cables.pull(folder, pulls, [*WORDS, *SURVIVE])
    if results["cables_left_out"] is not None:
        return results
    ours = records(folder, survive_cables.NAME)
    run(folder, "alone-cables", len(ours), 1)
    return results | {
        "cable_losses_equal": [line["loss"] for line in ours]
        == [line["loss"] for line in records(folder, "alone-cables")],
        "cable_weights_equal": weights_equal(folder / survive_cables.NAME, folder / "alone-cables"),
    }


def weights_equal(one: Path, other: Path) -> bool:
    """Whether weights and optimizer state of the last checkpoints have the same bits."""
    first, second = (_tensors(run_folder) for run_folder in (one, other))
    return first.keys() == second.keys() and all(
        np.array_equal(first[name].view(np.uint8), second[name].view(np.uint8)) for name in first
    )


def _tensors(run_folder: Path) -> dict[str, Any]:
    newest = max((run_folder / "checkpoints").glob("step_*"))
    files = [load_file(path) for path in newest.glob("*.safetensors")]
    found = {name: np.atleast_1d(part) for file in files for name, part in file.items()}
    # Random generators are those of the process that saved.
    return {name: part for name, part in found.items() if not name.startswith("rank")}


def restart_stall_s(folder: Path, kills: int) -> float:
    """The same kills through the restart path, with its snapshots: the median stall."""
    killed_run(folder, "restart", STEPS_A_KILL * 4 * kills, kills, 1.0)
    times: list[float] = [line["time"] for line in records(folder, "restart")]
    gaps = [after - before for before, after in pairwise(times)]
    usual_s = statistics.median(gaps)
    return statistics.median(sorted(gaps)[-kills:]) - usual_s


def overhead(folder: Path, turns: int) -> float:
    """Usual step of a larger model with `resilience.survive` over that without, minus one."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(turns):
        for mode, words in (("without", []), ("with", SURVIVE[:1])):
            name = f"{mode}-{turn}"
            run(folder, name, 30, 2, *LARGER, *words, "resilience.snapshot_interval=0")
            seconds[mode] += [line["step_s"] for line in records(folder, name)][5:]
    return statistics.median(seconds["with"]) / statistics.median(seconds["without"]) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--restarts", type=int, default=20, help="kills of the same run through the restart path")
    parser.add_argument("--protocol-kills", type=int, default=50, help="at each point of the protocol")
    parser.add_argument("--cables", type=int, default=10, help="how often the cable between two hosts is pulled")
    parser.add_argument("--turns", type=int, default=3, help="alternating runs that measure the overhead")
    parser.add_argument("--torchft", type=int, default=5, help="kills of the same model through torchft, twice")
    parser.add_argument("--only", choices=["survival", "cables", "restart", "overhead", "copy", "protocol", "torchft"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "survive.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "survival": lambda: survival(folder, args.kills),
            "cables": lambda: cables(folder, args.cables),
            "restart": lambda: {"restart_stall_s": round(restart_stall_s(folder, args.restarts), 4)},
            "overhead": lambda: {"overhead": round(overhead(folder, args.turns), 4)},
            "copy": lambda: survive_copy.measure(folder / "copy"),
            "protocol": lambda: protocol(args.protocol_kills),
            "torchft": lambda: survive_torchft.measure(folder / "torchft", args.torchft, WORDS),
        }
        for part, measure in parts.items():
            if args.only in (None, part):
                results |= measure()
                print(json.dumps(results, indent=1), file=sys.stderr, flush=True)
    if args.only:
        # Read late: another part may have been measured meanwhile.
        results = json.loads(args.output.read_text()) | results
    for other in ("restart", "torchft", "torchft_tuned"):
        stall_s = results[f"{other}_stall_s"]
        results[f"stall_over_{other}"] = round(results["stall_median_s"] / stall_s, 3) if stall_s else None
    results["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    cables_right = results.get("cable_losses_equal") in (None, True) and results.get("cable_weights_equal") in (
        None,
        True,
    )
    right = results["losses_equal"] and results["weights_equal"] and not results["protocol_mismatches"] and cables_right
    return 0 if right and (args.only or results["kills"] == args.kills) else 1


def protocol(kills: int) -> dict[str, Any]:
    words = ["-m", "tests.resilience.survivors.protocol_kills", "--kills", str(kills), "--json"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    sys.exit(main())
