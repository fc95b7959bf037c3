"""Host memory that a process may use, on the machine and in its container."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.core import proc

GIB = 2**30


def host(tmp_path: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for group, files in groups.items():
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "groups", "gib"),
    [
        ("0::/\n", {}, 32),
        ("0::/pod/box\n", {"pod/box": {"memory.max": "max\n", "memory.current": "1", "memory.stat": "anon 1"}}, 32),
        (
            "0::/pod/box\n",
            {
                "pod/box": {"memory.max": "max", "memory.current": "0", "memory.stat": ""},
                "pod": {
                    "memory.max": str(16 * GIB),
                    "memory.current": str(6 * GIB),
                    "memory.stat": f"anon {4 * GIB}\ninactive_file {2 * GIB}\n",
                },
            },
            12,
        ),
        (
            "5:devices:/\n4:memory:/slurm/job_7\n0::/\n",
            {
                "memory/slurm/job_7": {
                    "memory.limit_in_bytes": str(8 * GIB),
                    "memory.usage_in_bytes": str(3 * GIB),
                    "memory.stat": f"total_inactive_file {GIB}\n",
                }
            },
            6,
        ),
    ],
)
def test_available_memory_respects_the_container(
    cgroup: str, groups: dict[str, dict[str, str]], gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(tmp_path, cgroup, groups)
    monkeypatch.setattr(proc, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(proc, "_CGROUPS", tmp_path / "cgroup")
    assert proc.available_memory_bytes() == gib * GIB


@pytest.mark.parametrize(
    ("cgroup", "groups", "cores"),
    [
        ("0::/\n", {}, 64),
        ("0::/pod/box\n", {"pod/box": {"cpu.max": "max 100000\n"}}, 64),
        ("0::/pod/box\n", {"pod/box": {"cpu.max": "max 100000\n"}, "pod": {"cpu.max": "250000 100000\n"}}, 2),
        ("0::/\n", {"": {"cpu.max": "50000 100000\n"}}, 1),
        (
            "4:cpu,cpuacct:/docker/seen-from-outside\n3:memory:/\n",
            {"cpu": {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}},
            4,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}}, 64),
    ],
)
def test_available_cores_respect_the_container(
    cgroup: str, groups: dict[str, dict[str, str]], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(tmp_path, cgroup, groups)
    monkeypatch.setattr(proc, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(proc, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert proc.available_cores() == cores


def test_thread_defaults_leave_what_the_user_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host(tmp_path, "0::/\n", {"": {"cpu.max": "100000 100000\n"}})
    monkeypatch.setattr(proc, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(proc, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "environ", environment := {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "8"})
    proc.set_thread_defaults()
    assert environment == {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "8"}
    environment.clear()
    proc.set_thread_defaults()
    assert environment == {"GOMP_SPINCOUNT": "3000", "OMP_NUM_THREADS": "1"}
    (tmp_path / "cgroup/cpu.max").write_text("max 100000\n")
    environment.clear()
    proc.set_thread_defaults()
    assert environment == {"GOMP_SPINCOUNT": "3000"}


def test_available_memory_is_0_where_nothing_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "_PROC", tmp_path)
    assert proc.available_memory_bytes() == 0


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_process_name_is_shown_by_the_kernel() -> None:
    code = "from keepstep.core.proc import set_process_name; set_process_name('keepstep r12345678'); "
    code += "print(open('/proc/self/comm').read())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "keepstep r12345"
