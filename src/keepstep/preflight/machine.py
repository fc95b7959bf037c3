"""Checks of this machine: disk, shared memory, ports, limits, clock, driver, links, torch, and a configuration."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep import __version__
from keepstep.config.load import load_config, split_words
from keepstep.core.errors import KeepstepError
from keepstep.core.proc import available_cores, available_memory_bytes
from keepstep.core.units import format_bytes
from keepstep.preflight.health import Check, Status

GIB = 1024**3
DRIVER_S = 60.0
"""Without persistence mode the driver takes seconds for each GPU; with a broken GPU it never answers."""


def machine_checks(runs_dir: Path, gpus: int) -> Iterator[Check]:
    """Every check of this machine that needs no torch."""
    python: Status = "pass" if sys.version_info >= (3, 11) else "fail"
    yield Check("python", python, platform.python_version(), "Python 3.11 or newer is needed")
    yield Check("keepstep", "pass", f"{__version__} on {platform.system()} {platform.machine()}")
    yield Check("cores", "pass", str(available_cores()))
    yield _memory()
    yield from list(driver_checks()) or [_NO_GPU]
    yield _disk(runs_dir)
    yield _shared_memory(gpus)
    yield _ports()
    yield _host_name()
    yield _open_files()
    yield from _links()
    yield _clock()


_NO_GPU = Check("gpu", "pass", "none: training runs on the CPU, which suits small models (keepstep demo)")


def _memory() -> Check:
    free = available_memory_bytes()
    status: Status = "warn" if 0 < free < 2 * GIB else "pass"
    return Check("memory", status, f"{format_bytes(free)} free" if free else "not known", "close other programs")


def driver_checks() -> Iterator[Check]:
    """What nvidia-smi reports about every GPU; nothing on a machine without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if Path("/proc/driver/nvidia").exists():
            yield Check("driver", "fail", "a driver is loaded, but nvidia-smi is missing", "install the driver's tools")
        return
    fields = (
        "index,name,driver_version,clocks.max.sm,clocks.applications.graphics,ecc.errors.uncorrected.volatile.total"
    )
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        answer, complaint = asked.communicate(timeout=DRIVER_S)
    except subprocess.TimeoutExpired:
        # Not waited for: a process that hangs inside the driver does not die even by SIGKILL.
        asked.kill()
        value = f"nvidia-smi does not answer within {DRIVER_S:.0f} s"
        yield Check("driver", "fail", value, "a GPU hangs: see dmesg; reset it or restart the machine")
        return
    if asked.returncode:
        yield Check("driver", "fail", complaint.strip() or answer.strip(), "see dmesg; reload the driver")
        return
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines() if line.strip()]
    yield Check("driver", "pass", f"{rows[0][2]}, {len(rows)} × {rows[0][1]}" if rows else "no GPU")
    clocks = {row[4] for row in rows}
    if len(clocks) > 1:
        value = f"differ: {', '.join(sorted(clocks))} MHz"
        yield Check("gpu clocks", "warn", value, "slurm/pin-clocks sets them alike")
    for row in rows:
        if row[5].isdigit() and int(row[5]):
            hint = "reset the GPU; if they return, replace it"
            yield Check(f"gpu {row[0]}", "fail", f"{row[5]} uncorrected memory errors", hint)


def _disk(folder: Path) -> Check:
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Check("disk", "fail", f"cannot write to {existing}: {error.strerror}", "runs_dir= another folder")
    free = shutil.disk_usage(existing).free
    status: Status = "fail" if free < GIB else "warn" if free < 20 * GIB else "pass"
    hint = "checkpoints take 12 bytes a parameter each"
    return Check("disk", status, f"{format_bytes(free)} free at {existing}", hint)


def _shared_memory(gpus: int) -> Check:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        hint = "in a container: --shm-size, or an emptyDir in memory"
        return Check("shared memory", "fail", "there is no /dev/shm", hint)
    wanted = max(GIB // 4, gpus * 2 * GIB)
    status: Status = "fail" if size < 64 * 1024**2 else "warn" if size < wanted else "pass"
    hint = f"{format_bytes(wanted)} or more, by --shm-size or shmSize"
    return Check("shared memory", status, format_bytes(size), hint)


def _ports() -> Check:
    try:
        with socket.create_server(("", 0)) as server:
            socket.create_connection(("127.0.0.1", server.getsockname()[1]), 5).close()
            return Check("ports", "pass", "a port can be opened and reached")
    except OSError as error:
        return Check("ports", "fail", f"no connection on loopback: {error}", "check the firewall and `ip link show lo`")


def _host_name() -> Check:
    name = socket.gethostname()
    try:
        return Check("host name", "pass", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        hint = "add it to /etc/hosts: other nodes find this one by name"
        return Check("host name", "warn", f"{name} does not resolve", hint)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check("open files", "pass" if soft >= 4096 else "warn", f"{soft} (at most {hard})", "ulimit -n 65536")


def inactive_links() -> list[str]:
    """InfiniBand ports that exist but are not active."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*/state")
    with contextlib.suppress(OSError):
        return [f"{path.parts[-4]}:{path.parts[-2]}" for path in ports if "ACTIVE" not in path.read_text()]
    return []


def _links() -> Iterator[Check]:
    ports = list(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    if not ports:
        return
    down = inactive_links()
    value = f"{', '.join(down)} down" if down else f"{len(ports)} active"
    yield Check("links", "fail" if down else "pass", value, "ibstat")
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
    value = "synchronised" if synchronised else "not synchronised, as the kernel reports"
    return Check("clock", "pass" if synchronised else "warn", value, "start chrony or ntpd")


def torch_checks() -> list[Check]:
    """Whether torch can be imported, is a tested version, and finds the GPUs it was built for."""
    try:
        import torch
    except ImportError as error:
        return [Check("torch", "fail", f"cannot be imported: {error}", "pip install 'torch>=2.11,<2.14'")]
    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    known = (2, 11) <= number < (2, 14)
    checks = [Check("torch", "pass" if known else "warn", torch.__version__, "tested with 2.11 to 2.13")]
    if torch.version.cuda:
        found = torch.cuda.is_available()
        count = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"
        value = count if found else f"built for CUDA {torch.version.cuda}"
        hint = "nvidia-smi must work here, and its driver be new enough for this CUDA"
        checks.append(Check("cuda", "pass" if found else "fail", value, hint))
    return checks


def config_checks(words: Sequence[str]) -> list[Check]:
    """Whether a configuration is valid; nothing where none is given."""
    if not words:
        return []
    try:
        config = load_config(*split_words(words)).config
    except KeepstepError as error:
        return [Check("config", "fail", line.removeprefix("error: ").strip()) for line in error.lines()]
    return [Check("config", "pass", f"run {config.name}, model {config.model.preset}")]
