"""Processes, cores and memory of this machine, mostly read from /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ProcessStatus:
    """One line of /proc/PID/stat, as far as it is needed."""

    pid: int
    state: str
    """One letter: R runs, S sleeps, D waits for a device, T is stopped, t is traced, Z is dead but not reaped."""
    parent: int
    group: int
    session: int
    start_ticks: int
    """When it started, in clock ticks since the boot: with the number it names one process, however many follow."""

    @property
    def running(self) -> bool:
        """Whether the process still exists as more than an entry that nobody has waited for."""
        return self.state not in "ZX"


def set_process_name(name: str) -> None:
    """The name that ps, top and nvidia-smi show for this process, at most 15 bytes; nothing where /proc is missing."""
    with suppress(OSError):
        (_PROC / "self" / "comm").write_text(name[:15])


def name(pid: int) -> str:
    """That name; empty when the process is gone."""
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def exists(pid: int) -> bool:
    """Whether there is a process with this number."""
    return (_PROC / str(pid)).exists()


def status(pid: int) -> ProcessStatus | None:
    """The status of one process; None when it is gone."""
    try:
        # The name in parentheses may contain spaces and parentheses: everything after the last one is plain.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessStatus(pid, fields[0], *map(int, (*fields[1:4], fields[19])))
    except (OSError, IndexError, ValueError):
        return None


def has_ended(pid: int, start_ticks: int) -> bool:
    """Whether the process with this number and start is gone; False where nothing tells."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        # It is another user's, and /proc may hide those.
        pass
    found = status(pid)
    return found is not None and (not found.running or found.start_ticks != start_ticks)


def processes() -> Iterator[ProcessStatus]:
    """The status of every process that this one can see."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (found := status(int(entry.name))) is not None:
            yield found


def socket_holder(name: str) -> int | None:
    """The process with the abstract Unix socket `name`; None when there is none, or when it is another user's."""
    with suppress(OSError):
        sockets = (_PROC / "net/unix").read_text(errors="replace").splitlines()
        inode = next((line.split()[6] for line in sockets if line.endswith(f" @{name}")), None)
        for entry in _PROC.iterdir() if inode is not None else ():
            if entry.name.isdigit() and _has_socket(entry / "fd", f"socket:[{inode}]"):
                return int(entry.name)
    return None


def _has_socket(files: Path, wanted: str) -> bool:
    with suppress(OSError):
        for file in files.iterdir():
            with suppress(FileNotFoundError):
                if str(file.readlink()) == wanted:
                    return True
    return False


def available_cores() -> int:
    """Cores that this process may use, within the limits of the container; all of the machine where nothing says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cgroup_cores()]))


def set_thread_defaults() -> None:
    """OpenMP: as many threads as the container has time for, and they sleep soon after their work.

    By default they spin, on cores that others need: a training step next to two busy processes takes a sixth of the
    time, and alone it takes the same. Libraries read this when they are loaded.
    """
    if any(cores < (os.cpu_count() or 1) for cores in _cgroup_cores()):
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "3000"


def available_memory_bytes() -> int:
    """Host memory that can be used without swapping, within the limits of the container; 0 where nothing says."""
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        machine = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))]
    except (OSError, StopIteration):
        machine = []
    return min([*machine, *_cgroup_room_bytes()], default=0)


def _cgroup_room_bytes() -> Iterator[int]:
    """What each control group around this process still allows."""
    for is_new, group in _control_groups("memory"):
        names = ("memory.max", "memory.current") if is_new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with suppress(OSError, ValueError):  # no limit ("max"), or no control group
            limit, used = (int((group / name).read_text()) for name in names)
            cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # The page cache counts as used, but the kernel drops it first.
            yield max(0, limit - used + int(cache.get("inactive_file" if is_new else "total_inactive_file", 0)))


def _cgroup_cores() -> Iterator[int]:
    """Whole cores for whose time each control group around this process has room."""
    for is_new, group in _control_groups("cpu"):
        names = ["cpu.max"] if is_new else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        with suppress(OSError, ValueError):  # no limit ("max"), or no control group
            quota_us, period_us = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota_us > 0:
                yield quota_us // period_us


def _control_groups(controller: str) -> Iterator[tuple[bool, Path]]:
    """The control groups around this process with this controller: of version 2, or of version 1 (False)."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "" or controller in controllers.split(","):
            folder = _CGROUPS / (controller if controllers else "") / path.strip("/")
            yield from ((controllers == "", group) for group in (folder, *folder.parents))


def boot_identity() -> str:
    """Names the scope in which a process number is unique: this boot of this machine and this container."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
