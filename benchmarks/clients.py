"""Measures a training while idle and slow clients hold on to its page and its metrics port.

    python benchmarks/clients.py [--seconds 60]

One run: half the time without clients, then with 1,024 idle and 200 slow clients on each port, then without again. A
client that the server closes connects again after some seconds. Writes benchmarks/results/clients.json: the ratio of
the median step times with and without clients, saves started and committed, and the slowest honest requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keepstep.observe.run_folder import JsonLines, RunFolder

ROOT = Path(__file__).resolve().parents[1]
IDLE, SLOW = 1024, 200
RECONNECT_S, BYTE_S = (5.0, 15.0), 1.0
TRAIN = [
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.vocab=512", "model.seq_len=64", "data=synthetic",
    "global_batch=8", "microbatch=8", "max_duration=10000000ba", "schedule.warmup=2ba", "checkpoint.interval=100ba",
    "evaluate.interval=0ba", "observe.tensorboard=false", "compute.threads=1", "compute.device=cpu", "name=run",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the clients stay")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "clients.json")
    parser.add_argument("--hold", type=int, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold:
        hold(args.hold)
        return 0
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), args.seconds)
    results["machine"] = f"{os.cpu_count()} cores, {platform.system()}"
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 0 if results["passed"] else 1


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    """The whole run; its verdict covers saves and honest requests, not the step time, which depends on the cores."""
    page_port, metrics_port = free_port(), free_port()
    run = RunFolder(folder / "run")
    train = ["train", *TRAIN, f"runs_dir={folder}", f"observe.metrics_port={metrics_port}"]
    targets = {"page": (page_port, "/api/runs"), "metrics": (metrics_port, "/metrics")}
    phases, cpu_s = list[tuple[float, float]](), list[float]()
    waits: dict[str, dict[str, list[float]]] = {"without": {}, "with": {}}
    with keepstep(folder / "train.log", *train) as training:
        wait_for_commit(run, training)
        with keepstep(folder / "ui.log", "ui", str(folder), "--port", str(page_port), "--no-cache"):
            visit(targets, {}, 3.0)
            for kind, part_s in (("without", seconds / 2), ("with", seconds), ("without", seconds / 2)):
                with holding(page_port, metrics_port) if kind == "with" else quiet():
                    began, began_cpu_s = time.time(), cpu_seconds(training.pid)
                    visit(targets, waits[kind], part_s)
                    phases.append((began, time.time()))
                    cpu_s.append(cpu_seconds(training.pid) - began_cpu_s)
        training.send_signal(signal.SIGTERM)
        code = training.wait(120)
    before, held, after = ([line["step_s"] for line in lines_in(run.metrics, phase)] for phase in phases)
    events = JsonLines(run.events).read()
    kinds = [event["kind"] for event in lines_in(run.events, phases[1])]
    started, committed = kinds.count("checkpoint_started"), kinds.count("checkpoint_committed")
    lost = [event for event in events if event["kind"] in ("save_skipped", "fault", "warning")]
    slowest = {kind: {name: max(took) for name, took in by.items()} for kind, by in waits.items()}
    return {
        "clients": {"idle": IDLE, "slow": SLOW, "ports": 2, "seconds": seconds},
        "step_ms": {"without": 1e3 * statistics.median(before + after), "with": 1e3 * statistics.median(held)},
        "step_ratio": statistics.median(held) / statistics.median(before + after),
        # On a machine with other work this is the ratio to trust: the training's own processor time for a step.
        "step_cpu_ratio": (cpu_s[1] / len(held)) / ((cpu_s[0] + cpu_s[2]) / len(before + after)),
        "step_ratio_of_quiet_halves": statistics.median(after) / statistics.median(before),
        "saves_started": started,
        "saves_committed": committed,
        "saves_lost": [event.get("what", event.get("message", event["kind"])) for event in lost],
        "honest_requests": {name: len(took) for name, took in waits["with"].items()},
        "slowest_honest_request_s": slowest,
        "exit_code": code,
        # A save that starts just before the end of the phase is committed after it.
        "passed": not lost and committed >= started - 1 and started > 0 and max(slowest["with"].values()) < 1.0,
    }


def cpu_seconds(root: int) -> float:
    """Processor time of a process and everything below it so far."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            stats[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {root}
    while grown := {pid for pid, (parent, _) in stats.items() if parent in family} - family:
        family |= grown
    return sum(stats[pid][1] for pid in family if pid in stats) / os.sysconf("SC_CLK_TCK")


def lines_in(path: Path, phase: tuple[float, float]) -> list[dict[str, Any]]:
    return [line for line in JsonLines(path).read() if phase[0] <= line["time"] < phase[1]]


@contextmanager
def keepstep(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        command = [sys.executable, "-m", "keepstep", *words]
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def wait_for_commit(run: RunFolder, training: subprocess.Popen[bytes]) -> None:
    while not (
        run.events.exists() and any(event["kind"] == "checkpoint_committed" for event in JsonLines(run.events).read())
    ):
        if training.poll() is not None:
            raise SystemExit(f"the training ended with exit code {training.returncode}")
        time.sleep(0.5)


def visit(targets: dict[str, tuple[int, str]], waits: dict[str, list[float]], seconds: float) -> None:
    """Ask both servers twice a second; each request is a new connection, as of a new visitor."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, (port, path) in targets.items():
            waits.setdefault(name, []).append(seconds_to_answer(port, path))
        time.sleep(0.5)


def seconds_to_answer(port: int, path: str) -> float:
    """Until the whole answer is here; a request without a good answer counts as 20 s."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return time.monotonic() - began if answer.read() and answer.status == 200 else 20.0
    except (OSError, http.client.HTTPException):
        return 20.0
    finally:
        connection.close()


@contextmanager
def quiet() -> Iterator[None]:
    yield


@contextmanager
def holding(*ports: int) -> Iterator[None]:
    """With the clients, in a process of their own."""
    words = [sys.executable, __file__, "--hold", *map(str, ports)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


def hold(ports: list[int]) -> None:
    """Connect all clients, and again those that were closed; slow ones send a byte a second or never read."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))
    waiting = [(0.0, port, number) for port in ports for number in range(IDLE + SLOW)]
    selector, trickling, next_byte, ready = selectors.DefaultSelector(), set[socket.socket](), 0.0, False
    while True:
        now = time.monotonic()
        due = [client for client in waiting if client[0] <= now]
        waiting = [client for client in waiting if client[0] > now]
        for _, port, number in due:
            client = connect(port, number)
            selector.register(client, selectors.EVENT_READ, (port, number))
            if number >= IDLE and number % 2:
                trickling.add(client)
        if not ready:
            ready = True
            print("all are connected", flush=True)
        for key, _ in selector.select(0.2):
            port, number = key.data
            if number >= IDLE and not number % 2:
                # It asked and does not read: whether it was closed cannot be seen. Leave it.
                selector.unregister(key.fileobj)
                continue
            assert isinstance(key.fileobj, socket.socket)
            if not received(key.fileobj):
                selector.unregister(key.fileobj)
                trickling.discard(key.fileobj)
                key.fileobj.close()
                waiting.append((now + random.uniform(*RECONNECT_S), port, number))
        if now >= next_byte:
            next_byte = now + BYTE_S
            for client in trickling:
                with suppress(OSError):
                    client.send(b"x")


def connect(port: int, number: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    with suppress(OSError):
        client.connect(("127.0.0.1", port))
        request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        client.sendall(b"" if number < IDLE else request[:-2] if number % 2 else request * 20)
    client.setblocking(False)
    return client


def received(client: socket.socket) -> bytes:
    with suppress(OSError):
        return client.recv(65536)
    return b""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
