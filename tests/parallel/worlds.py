"""Start a world of processes on this machine for a list of cases, and read back what the first process found."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
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
    environment = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore::FutureWarning", "-m", "tests.parallel.equality_worker"]
    # A session of its own: all of the world ends with this call.
    world = subprocess.Popen(
        [*command, str(cases_file), str(results_file)],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output = world.communicate(timeout=PATIENCE_S)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(world.pid, signal.SIGKILL)
        world.wait()
    failed = [file.read_text()[-6000:] for file in sorted(folder.glob(f"{results_file.stem}.failed_*"))]
    # A process that loses its peer fails too: the cause is in another one's words, or in how that one ended.
    failed.sort(key=lambda words: "by peer" in words)
    assert not failed, "\n".join([*failed, output[-6000:]])
    assert world.returncode == 0, output[-6000:]
    results: dict[str, Any] = json.loads(results_file.read_text())
    return results
