"""The faults that `keepstep chaos` knows, each as it would strike a run."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from keepstep.core.errors import UsageError
from keepstep.data.formats.mds import TokenShardWriter, write_index
from keepstep.launch import two_hosts
from keepstep.launch.rehearsal import Play, Stage, kill_session, wait_for_step
from keepstep.resilience.chaos import ALL_RANKS, Fault

GRACE_S = 10.0
HANG_S = 10.0
HANG_MARGIN_S = 5.0
"""Beyond the limit: for looking at stacks, and for a machine that is busy."""
SLOW_S = 0.5
SERVER_DOWN_S = 3.0


def all_plays(stage: Stage) -> dict[str, Callable[[], Play]]:
    """Every kind that one node can play, by name."""
    last, middle = stage.processes - 1, stage.middle
    simple = {
        "kill-rank": ("SIGKILL of one process", Fault("kill", middle, last)),
        "kill-all": ("SIGKILL of all processes", Fault("kill", middle, ALL_RANKS)),
        "kill-launcher": ("SIGKILL of the launcher", Fault("kill_launcher", middle)),
        "terminate": (f"SIGTERM with {GRACE_S:.0f} s of grace", Fault("terminate", middle)),
        "exception": ("an exception in one process", Fault("exception", middle, last)),
        "out-of-memory": ("no memory in one process", Fault("oom", middle, last)),
    }
    grace = [f"resilience.grace_s={GRACE_S}"]
    return {kind: partial(Play, kind, title, [fault], grace) for kind, (title, fault) in simple.items()} | {
        "nan": partial(Play, "nan", "NaN in a gradient", [Fault("nan", middle, last)]),
        "stop-rank": partial(_stop_rank, stage),
        "slow-rank": partial(_slow_rank, stage),
        "clock-jump": partial(_clock_jump, stage),
        "flipped-bit": partial(_flipped_bit, stage),
        "torn-write": partial(_torn_write, stage),
        "slow-disk": _slow_disk,
        "full-disk": partial(_full_disk, stage),
        "data-server": partial(_data_server, stage),
        "lost-network": partial(Play, "lost-network", "no network between two hosts", perform=two_hosts.lose_network),
        "lost-host": partial(Play, "lost-host", "a host is lost and replaced", perform=two_hosts.lose_host),
    }


def choose(stage: Stage, names: list[str]) -> dict[str, Callable[[], Play]]:
    """Those that were asked for."""
    known = all_plays(stage)
    for name in names:
        if name not in known:
            raise UsageError(f"no fault is called {name!r}", f"there are {', '.join(known)}")
    return {name: known[name] for name in names or known}


def _stop_rank(stage: Stage) -> Play:
    fault = Fault("stop", stage.middle, stage.processes - 1)
    limit = [f"resilience.hang_s={HANG_S}"]
    return Play("stop-rank", "SIGSTOP of one process", [fault], limit, detect_within_s=HANG_S + HANG_MARGIN_S)


def _clock_jump(stage: Stage) -> Play:
    return Play("clock-jump", "the clock goes back an hour", [Fault("clock", stage.middle)], unnoticed=True)


def _slow_disk() -> Play:
    def strike(stage: Stage, _: subprocess.Popen[bytes]) -> float | None:
        return time.time() if wait_for_step(stage.run_folder("slow-disk"), 1, stage.timeout_s) else None

    slow = {"KEEPSTEP_FAILPOINT": "before_data:sleep=1"}
    return Play("slow-disk", "a disk that takes its time", environment=slow, beside=strike)


def _slow_rank(stage: Stage) -> Play:
    fault = Fault("slow", stage.steps // 3, stage.processes - 1, {"steps": stage.steps // 3, "seconds": SLOW_S})
    return Play("slow-rank", "one process slower than the others", [fault], ["observe.rank_interval=2"])


def _flipped_bit(stage: Stage) -> Play:
    folder = stage.run_folder("flipped-bit")

    def strike(stage: Stage, process: subprocess.Popen[bytes]) -> float | None:
        if not wait_for_step(folder, stage.middle + 1, stage.timeout_s):
            return None
        kill_session(process.pid)
        struck_at = time.time()
        newest = max(path for path in folder.checkpoints.glob("step_*") if path.is_dir())
        file = max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[-len(data) // 3] ^= 1
        file.write_bytes(data)
        return struck_at

    return Play("flipped-bit", "a flipped bit in the newest checkpoint", beside=strike)


def _torn_write(stage: Stage) -> Play:
    mark = stage.folder / "torn-write.mark"
    failpoint = {"KEEPSTEP_FAILPOINT": "after_data:2", "KEEPSTEP_FAILPOINT_MARK": str(mark)}
    return Play("torn-write", "killed in the middle of a save", environment=failpoint, mark=mark)


def _full_disk(stage: Stage) -> Play:
    """A file system of its own for the checkpoints, filled to the last byte for a while."""
    wrap = _own_mounts()
    folder = stage.folder / "small-disk"
    folder.mkdir(parents=True, exist_ok=True)
    kept = stage.run_folder("undisturbed").checkpoints
    size_bytes = 5 * max((_size(path) for path in kept.glob("step_*")), default=1 << 20) + (64 << 20)
    mount = f'mount -t tmpfs -o size={size_bytes} none "$0" && exec "$@"'
    fault = Fault("full", stage.steps // 3, 0, {"folder": str(folder), "steps": stage.steps // 3})
    return Play(
        "full-disk",
        "no space left for checkpoints",
        [fault],
        [f"checkpoint.folder={folder}"],
        wrap=[*wrap, "sh", "-c", mount, str(folder)],
    )


def _own_mounts() -> list[str]:
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        probe = [*command, "sh", "-c", "mount -t tmpfs none /mnt"]
        if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    raise two_hosts.UnavailableError("mounting a small disk needs root or user namespaces")


def _data_server(stage: Stage) -> Play:
    """Data over HTTP; the server is killed, and comes back."""
    source = stage.folder / "served"
    _write_tokens(source)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    servers: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(source)]
        servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    serve()

    def strike(stage: Stage, process: subprocess.Popen[bytes]) -> float | None:
        struck_at = None
        if wait_for_step(stage.run_folder("data-server"), 2, stage.timeout_s):
            servers.pop().kill()
            struck_at = time.time()
            time.sleep(SERVER_DOWN_S)
            serve()
        with suppress(subprocess.TimeoutExpired):
            process.wait(stage.timeout_s)
        servers.pop().kill()
        return struck_at

    # Rows from all over, and a cache that holds few of the files: the run must fetch again and again.
    cache = [f"data.cache_dir={stage.folder / 'cache'}", "data.cache_limit=1MiB", "data.prefetch=1"]
    overrides = [f"data.path=http://127.0.0.1:{port}", *cache]
    return Play(
        "data-server", "the data server is away", overrides=overrides, beside=strike, unnoticed=True, own_reference=True
    )


def _write_tokens(folder: Path) -> None:
    """A data set in many small shards: tokens below 100, which every vocabulary has."""
    if (folder / "index.json").exists():
        return
    numbers = np.random.default_rng(0)
    writer = TokenShardWriter(folder, "shard", np.dtype(np.int32))
    for _ in range(16):
        writer.add_rows(numbers.integers(0, 100, (256, 256), dtype=np.int32))
        writer.flush()
    write_index(folder, writer.entries)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
