"""Start a world of processes on this machine for a list of cases, and read back what the first process found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def run_world(processes: int, cases: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run all cases in one world of this many processes; raises with the first failing process's words."""
    cases_file, results_file = folder / f"cases{processes}.json", folder / f"results{processes}.json"
    cases_file.write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [_start(rank, processes, port, cases_file, results_file) for rank in range(processes)]
    try:
        outputs = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    failed = [output for worker, output in zip(workers, outputs, strict=True) if worker.returncode]
    assert not failed, min(failed, key=lambda text: "Connection closed by peer" in text)[-6000:]
    results: dict[str, Any] = json.loads(results_file.read_text())
    return results


def _start(rank: int, processes: int, port: int, cases: Path, results: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore::FutureWarning", "-m", "tests.parallel.equality_worker"]
    command += [str(cases), str(results)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
