"""The scenarios of `keepstep chaos`, each as the fault would strike a real run."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.chaos import two_hosts
from keepstep.chaos.experiment import (
    Experiment,
    Scenario,
    UnavailableError,
    kill_session,
    release_when_all_are_back,
    session_members,
    wait_for_event,
    wait_for_replacement,
    wait_for_step,
)
from keepstep.config.load import load_config, split_words
from keepstep.core import proc
from keepstep.core.errors import ConfigError, UsageError
from keepstep.data.formats.mds_writer import TokenShardWriter, write_index
from keepstep.observe.run_folder import JsonLines
from keepstep.resilience.fault_injection import ALL_RANKS, Fault

GRACE_S = 10.0
HANG_S = 10.0
HANG_MARGIN_S = 5.0
"""Beyond the limit: to dump stacks, and for a machine that is busy."""
SLOW_S = 0.5
SERVER_DOWN_S = 3.0
_TITLES = {
    "flipped-bit": "a flipped bit in the newest checkpoint",
    "torn-write": "killed in the middle of a save",
    "slow-disk": "a slow disk",
    "full-disk": "no space left for checkpoints",
    "data-server": "the data server is away",
}


def all_scenarios(experiment: Experiment) -> dict[str, Callable[[], Scenario]]:
    """Every scenario that one machine can run, by name; each is built only when it runs."""
    third, middle, last = experiment.steps // 3, experiment.middle, experiment.processes - 1
    size = experiment.replica_size

    def simple(kind: str, title: str, *faults: Fault, **options: Any) -> tuple[str, Callable[[], Scenario]]:
        return kind, partial(Scenario, kind, title, faults, **options)

    def survive(kind: str, title: str, *faults: Fault, **options: Any) -> tuple[str, Callable[[], Scenario]]:
        return kind, partial(_survive, kind, title, experiment, faults, **options)

    grace = {"overrides": [f"resilience.grace_s={GRACE_S}"]}
    slow = Fault("slow", third, last, {"steps": third, "seconds": SLOW_S})
    # The first process of the second replica, and the last one of the third.
    two = [Fault("kill", third, rank) for rank in (size, 3 * size - 1)]
    mark = experiment.folder / "kill-joining.mark"
    # The first process that copies the state of another one.
    failpoint = {"KEEPSTEP_FAILPOINT": "copying:1", "KEEPSTEP_FAILPOINT_MARK": str(mark)}
    joining = {"environment": failpoint, "mark": mark, "may_be_unnoticed": True}
    hang = {"overrides": [f"resilience.hang_s={HANG_S}"], "detect_within_s": HANG_S + HANG_MARGIN_S}
    return dict(
        [
            simple("kill-rank", "SIGKILL of one process", Fault("kill", middle, last), **grace),
            simple("kill-all", "SIGKILL of all processes", Fault("kill", middle, ALL_RANKS), **grace),
            simple("kill-launcher", "SIGKILL of the launcher", Fault("kill_launcher", middle), **grace),
            simple("terminate", f"SIGTERM with {GRACE_S:.0f} s of grace", Fault("terminate", middle), **grace),
            simple("exception", "an exception in one process", Fault("exception", middle, last), **grace),
            simple("out-of-memory", "no memory in one process", Fault("oom", middle, last), **grace),
            simple("nan", "NaN in a gradient", Fault("nan", middle, last)),
            simple("stop-rank", "SIGSTOP of one process", Fault("stop", middle, last), **hang),
            simple("slow-rank", "one process slower than the others", slow, overrides=["observe.rank_interval=2"]),
            simple("clock-jump", "the clock goes back an hour", Fault("clock", middle), may_be_unnoticed=True),
            survive("kill-replica", "SIGKILL of a replica, the others survive", Fault("kill", third, last)),
            survive("stop-replica", "SIGSTOP of a replica, the others survive", Fault("stop", third, last)),
            survive("kill-two-replicas", "SIGKILL of two replicas, one survives", *two, processes=3 * size),
            survive("kill-joining", "SIGKILL of a replica that joins others", **joining),
            survive("kill-spare", "SIGKILL of a spare replica", inject=_kill_spare, spares=1),
            ("flipped-bit", partial(_flipped_bit, experiment)),
            ("torn-write", partial(_torn_write, experiment)),
            ("slow-disk", _slow_disk),
            ("full-disk", partial(_full_disk, experiment)),
            ("data-server", partial(_data_server, experiment)),
            simple("lost-network", "no network between two hosts", run=two_hosts.lose_network),
            simple("lost-host", "a host is lost and replaced", run=two_hosts.lose_host),
            survive("split-network", "replicas on two hosts without network", run=two_hosts.split_network),
        ]
    )


def describe_scenarios(experiment: Experiment) -> dict[str, str]:
    """What each scenario does, in a few words, without building it."""
    known = all_scenarios(experiment)
    return {name: _TITLES.get(name) or str(build.args[1]) for name, build in known.items()}  # type: ignore[attr-defined]


def choose_scenarios(experiment: Experiment, names: Sequence[str]) -> dict[str, Callable[[], Scenario]]:
    """The named scenarios; all of them where none is named."""
    known = all_scenarios(experiment)
    for name in names:
        if name not in known:
            raise UsageError(f"no fault is called {name!r}", f"there are {', '.join(known)}")
    return {name: known[name] for name in names or known}


def _survive(
    kind: str, title: str, experiment: Experiment, faults: Sequence[Fault], spares: int = 0, **options: Any
) -> Scenario:
    """The run waits between its steps until whoever was lost has been replaced."""
    size, overrides = experiment.replica_size, [*two_hosts.survive_words(experiment), f"resilience.spares={spares}"]
    if experiment.processes < 2 * size:
        raise UnavailableError("one replica has no others that could survive it")
    try:
        load_config(*split_words([*experiment.words, *overrides]))
    except ConfigError as error:
        raise UnavailableError(error.message) from None
    struck_after = max((fault.step for fault in faults), default=0)
    # A step later: the time that the survivors take for the next step is measured.
    wait = wait_for_replacement(experiment, kind, struck_after + 2)
    release = partial(release_when_all_are_back, kind=kind)
    options = {"overrides": overrides, "own_baseline": True, "survivors": True, "inject": release, **options}
    return Scenario(kind, title if size == 1 else f"{title}: groups of {size}", [*faults, wait], **options)


def _kill_spare(experiment: Experiment, process: subprocess.Popen[bytes]) -> float | None:
    folder = experiment.run_folder("kill-spare")
    if not (wait_for_event(folder, "spare_ready", experiment.timeout_s) and wait_for_step(folder, 2, 60.0)):
        return None
    ready = next(event for event in JsonLines(folder.events).read() if event.get("kind") == "spare_ready")
    # The last process of the spare.
    rank = (ready["replica"] + 1) * experiment.replica_size - 1
    for pid in session_members(process.pid):
        if proc.name(pid) == f"keepstep r{rank}" and os.getpgid(pid) == pid:
            struck_at = time.time()
            os.killpg(pid, signal.SIGKILL)
            release_when_all_are_back(experiment, process, "kill-spare", struck_at)
            return struck_at
    return None


def _slow_disk() -> Scenario:
    def inject(experiment: Experiment, _: subprocess.Popen[bytes]) -> float | None:
        return time.time() if wait_for_step(experiment.run_folder("slow-disk"), 1, experiment.timeout_s) else None

    slow = {"KEEPSTEP_FAILPOINT": "before_data:sleep=1"}
    return Scenario("slow-disk", _TITLES["slow-disk"], environment=slow, inject=inject)


def _flipped_bit(experiment: Experiment) -> Scenario:
    folder = experiment.run_folder("flipped-bit")

    def inject(experiment: Experiment, process: subprocess.Popen[bytes]) -> float | None:
        if not wait_for_step(folder, experiment.middle + 1, experiment.timeout_s):
            return None
        kill_session(process.pid)
        struck_at = time.time()
        newest = max(path for path in folder.checkpoints.glob("step_*") if path.is_dir())
        file = max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[-len(data) // 3] ^= 1
        file.write_bytes(data)
        return struck_at

    return Scenario("flipped-bit", _TITLES["flipped-bit"], inject=inject)


def _torn_write(experiment: Experiment) -> Scenario:
    mark = experiment.folder / "torn-write.mark"
    failpoint = {"KEEPSTEP_FAILPOINT": "after_data:2", "KEEPSTEP_FAILPOINT_MARK": str(mark)}
    return Scenario("torn-write", _TITLES["torn-write"], environment=failpoint, mark=mark)


def _full_disk(experiment: Experiment) -> Scenario:
    """A small file system for the checkpoints, full for some steps."""
    wrap = _own_mounts()
    folder = experiment.folder / "small-disk"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = experiment.run_folder("undisturbed").checkpoints
    size_bytes = 5 * max((_size(path) for path in checkpoints.glob("step_*")), default=1 << 20) + (64 << 20)
    mount = f'mount -t tmpfs -o size={size_bytes} none "$0" && exec "$@"'
    fault = Fault("full", experiment.steps // 3, 0, {"folder": str(folder), "steps": experiment.steps // 3})
    return Scenario(
        "full-disk",
        _TITLES["full-disk"],
        [fault],
        [f"checkpoint.folder={folder}"],
        wrap=[*wrap, "sh", "-c", mount, str(folder)],
    )


def _own_mounts() -> list[str]:
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        probe = [*command, "sh", "-c", "mount -t tmpfs none /mnt"]
        if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    raise UnavailableError("mounting a small disk needs root or user namespaces")


def _data_server(experiment: Experiment) -> Scenario:
    """Data over HTTP; the server is killed and started again."""
    source = experiment.folder / "served"
    _write_tokens(source)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    servers: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(source)]
        servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    serve()

    def inject(experiment: Experiment, process: subprocess.Popen[bytes]) -> float | None:
        struck_at = None
        if wait_for_step(experiment.run_folder("data-server"), 2, experiment.timeout_s):
            servers.pop().kill()
            struck_at = time.time()
            time.sleep(SERVER_DOWN_S)
            serve()
        with suppress(subprocess.TimeoutExpired):
            process.wait(experiment.timeout_s)
        servers.pop().kill()
        return struck_at

    # Shuffled rows and a cache that holds few of the files: the run must download throughout.
    cache = [f"data.cache_dir={experiment.folder / 'cache'}", "data.cache_limit=1MiB", "data.prefetch=1"]
    overrides = [f"data.path=http://127.0.0.1:{port}", *cache]
    return Scenario(
        "data-server",
        _TITLES["data-server"],
        overrides=overrides,
        inject=inject,
        may_be_unnoticed=True,
        own_baseline=True,
    )


def _write_tokens(folder: Path) -> None:
    """A data set of many small shards, with tokens below 100, which every vocabulary has."""
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
