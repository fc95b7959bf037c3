"""Is this machine fit to train? Facts that need no torch: disk, shared memory, ports, limits, clock, driver, links."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keepstep.core.units import format_bytes
from keepstep.launch.health import Check, Status

GIB = 1024**3
DRIVER_S = 60.0
"""Without persistence mode the driver takes seconds for each GPU; a broken GPU takes for ever."""


def machine_checks(runs_dir: Path, gpus: int) -> Iterator[Check]:
    """Every check of this machine."""
    yield _python()
    yield from driver_checks()
    yield _disk(runs_dir)
    yield _shared_memory(gpus)
    yield _ports()
    yield _host_name()
    yield _open_files()
    yield from _links()
    yield _clock()


def _python() -> Check:
    version = platform.python_version()
    status: Status = "pass" if sys.version_info >= (3, 11) else "fail"
    return Check("python", status, version, "Python 3.11 or newer is needed")


def driver_checks() -> Iterator[Check]:
    """What nvidia-smi says of every GPU; nothing on a machine without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if Path("/proc/driver/nvidia").exists():
            yield Check(
                "driver", "fail", "a driver is loaded, but there is no nvidia-smi", "install the driver's tools"
            )
        return
    fields = (
        "index,name,driver_version,clocks.max.sm,clocks.applications.graphics,ecc.errors.uncorrected.volatile.total"
    )
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        answer, complaint = asked.communicate(timeout=DRIVER_S)
    except subprocess.TimeoutExpired:
        # Not waited for: what hangs inside the driver does not even die.
        asked.kill()
        told = f"nvidia-smi does not answer within {DRIVER_S:.0f} s"
        yield Check("driver", "fail", told, "a GPU hangs: see dmesg; reset it or restart the machine")
        return
    if asked.returncode:
        yield Check("driver", "fail", complaint.strip() or answer.strip(), "see dmesg; reload the driver")
        return
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines() if line.strip()]
    yield Check("driver", "pass", f"{rows[0][2]}, {len(rows)} × {rows[0][1]}" if rows else "no GPU")
    clocks = {row[4] for row in rows}
    if len(clocks) > 1:
        yield Check(
            "gpu clocks", "warn", f"differ: {', '.join(sorted(clocks))} MHz", "slurm/pin-clocks sets them alike"
        )
    for row in rows:
        if row[5].isdigit() and int(row[5]):
            yield Check(
                f"gpu {row[0]}",
                "fail",
                f"{row[5]} uncorrected memory errors",
                "reset the GPU; if they return, replace it",
            )


def _disk(folder: Path) -> Check:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Check("disk", "fail", f"cannot write to {existing}: {error.strerror}", "runs_dir= another folder")
    free = shutil.disk_usage(existing).free
    status: Status = "fail" if free < GIB else "warn" if free < 20 * GIB else "pass"
    return Check(
        "disk", status, f"{format_bytes(free)} free at {existing}", "checkpoints take 12 bytes a parameter each"
    )


def _shared_memory(gpus: int) -> Check:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Check(
            "shared memory", "fail", "there is no /dev/shm", "in a container: --shm-size, or an emptyDir in memory"
        )
    wanted = max(GIB // 4, gpus * 2 * GIB)
    status: Status = "fail" if size < 64 * 1024**2 else "warn" if size < wanted else "pass"
    return Check(
        "shared memory", status, format_bytes(size), f"{format_bytes(wanted)} or more, by --shm-size or shmSize"
    )


def _ports() -> Check:
    try:
        with (
            socket.create_server(("", 0)) as server,
            socket.create_connection(("127.0.0.1", server.getsockname()[1]), 5),
        ):
            return Check("ports", "pass", "a port can be opened and reached")
    except OSError as error:
        return Check("ports", "fail", f"no connection on loopback: {error}", "check the firewall and `ip link show lo`")


def _host_name() -> Check:
    name = socket.gethostname()
    try:
        return Check("host name", "pass", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        return Check(
            "host name", "warn", f"{name} does not resolve", "add it to /etc/hosts: other nodes find this one by name"
        )


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check("open files", "pass" if soft >= 4096 else "warn", f"{soft} (at most {hard})", "ulimit -n 65536")


def inactive_links() -> list[str]:
    """InfiniBand ports that are there but not up."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*/state")
    with contextlib.suppress(OSError):
        return [f"{path.parts[-4]}:{path.parts[-2]}" for path in ports if "ACTIVE" not in path.read_text()]
    return []


def _links() -> Iterator[Check]:
    ports = list(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    if not ports:
        return
    down = inactive_links()
    yield Check(
        "links", "fail" if down else "pass", f"{', '.join(down)} down" if down else f"{len(ports)} active", "ibstat"
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        yield Check("locked memory", "warn", format_bytes(soft), "ulimit -l unlimited: RDMA registers memory")


def _clock() -> Check:
    try:
        # STA_UNSYNC is bit 6 of the kernel's status word, the sixth field (offset 40) of struct timex.
        buffer = ctypes.create_string_buffer(256)
        state = ctypes.CDLL(None).adjtimex(buffer)
        status = ctypes.c_int.from_buffer(buffer, 40).value
    except (OSError, AttributeError):
        return Check("clock", "warn", "its state cannot be read", "clock skew makes logs hard to read")
    synchronised = state >= 0 and not status & 0x40
    value = "synchronised" if synchronised else "not synchronised by the kernel's account"
    return Check("clock", "pass" if synchronised else "warn", value, "start chrony or ntpd")
