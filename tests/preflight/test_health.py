"""The doctor's verdicts, from given numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.launch import submit
from keepstep.preflight.health import judge_cluster, worst
from keepstep.preflight.machine import machine_checks
from keepstep.preflight.node_probe import node_name
from tests.launch.manifests import REPOSITORY, template, training_container
from tests.patience import PATIENCE_S


def report(node: str, **changes: Any) -> dict[str, Any]:
    sound = {
        "node": node, "device": "NVIDIA H100 80GB HBM3", "gemm_tflops": 700.0, "allreduce_gb_s": 455.0,
        "write_gb_s": 5.0, "read_gb_s": 8.0, "clock_skew_s": 0.001, "inactive_links": [],
    }  # fmt: skip
    return sound | changes


def test_judge_passes_sound_nodes() -> None:
    health = judge_cluster([report(f"n{i}") for i in range(4)])
    assert health.sound
    assert health.drain == []


@pytest.mark.parametrize(("speed", "status"), [(450, "pass"), (399, "warn"), (299, "fail")])
def test_judge_all_reduce_by_limits_of_h100(speed: float, status: str) -> None:
    health = judge_cluster([report("n1", allreduce_gb_s=speed), report("n2", allreduce_gb_s=speed)])
    assert worst(health.shared) == status


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"gemm_tflops": 300.0}, "matrix"),
        ({"write_gb_s": 0.5}, "storage write"),
        ({"storage_error": "/data: Read-only file system", "write_gb_s": None, "read_gb_s": None}, "storage"),
        ({"data_error": "/data/c4: no file there"}, "data"),
        ({"clock_skew_s": -30.0}, "clock"),
        ({"inactive_links": ["mlx5_3:1"]}, "links"),
    ],
)
def test_judge_names_fault_and_node(changes: dict[str, Any], check: str) -> None:
    health = judge_cluster([*(report(f"n{i}") for i in range(4)), report("bad", **changes)])
    assert health.drain == ["bad"]
    assert not health.sound
    failed = [c.name for node in health.nodes for c in node.checks if c.status == "fail"]
    assert failed == [check]


def test_judge_blames_common_end_of_slow_links() -> None:
    ring = [("n4", "n1", 40.0), ("n1", "n2", 2.0), ("n2", "n3", 2.1), ("n3", "n4", 41.0)]
    reports = [report(node, link_from=before, link_gb_s=speed) for before, node, speed in ring]
    assert judge_cluster(reports).drain == ["n2"]


def test_judge_drains_absent_node() -> None:
    health = judge_cluster([report("n1")], expected=["n1", "n2"])
    assert health.drain == ["n2"]
    assert not health.sound


def test_machine_checks_fail_for_unwritable_folder(tmp_path: Path) -> None:
    checks = {check.name: check for check in machine_checks(tmp_path, gpus=0)}
    assert checks["python"].status == "pass"
    assert checks["disk"].status in ("pass", "warn")
    assert {"keepstep", "cores", "memory", "disk"} <= set(checks)
    assert int(checks["cores"].value) > 0
    # One line either way: what the driver says, or that there is no GPU and what that means.
    assert ("driver" in checks) != ("gpu" in checks)
    refused = {check.name: check for check in machine_checks(Path("/proc/1"), gpus=0)}
    assert refused["disk"].status == "fail"


@pytest.mark.slow
def test_doctor_json_exits_3_for_broken_config(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", "keepstep", "doctor", "--json", "model.layerz=3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert {"name": "config", "status": "fail"}.items() <= json.loads(done.stdout)[-2].items()


def test_driver_checks_report_hanging_driver(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    code = (
        "from keepstep.preflight import machine; machine.DRIVER_S = 0.2; "
        "print([(check.status, check.value) for check in machine.driver_checks()])"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.startswith("[('fail', 'nvidia-smi does not answer")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--on slurm:azure-h100", "--on without --cluster"),
        ("-N 4 --storage /data --data /data/c4", "-N, --storage, --data without --cluster"),
        ("--cluster --dry-run", "--dry-run needs a cluster, and --on names none"),
        ("--cluster -N 2", "-N needs a cluster, and --on names none"),
        ("--cluster --on slurm:azure-h100 -N 0 --dry-run", "-N is 0"),
        ("--cluster --on slurm:azure-h100 -N -3 --dry-run", "-N is -3"),
    ],
)
def test_doctor_refuses_options_without_effect(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words.split()]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert message in error
    assert "hint: " in error


def simulated_cluster(monkeypatch: pytest.MonkeyPatch, reports: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(submit, "run_report_job", lambda *_: reports)


def test_doctor_slow_network_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    simulated_cluster(monkeypatch, [report(f"n{i}", allreduce_gb_s=250.0) for i in range(4)])
    assert main(["doctor", "--cluster", "--on", "slurm:azure-h100", "-N", "4"]) == 3
    out = capsys.readouterr().out
    assert "fail  all-reduce" in out
    assert "may train" not in out


@pytest.mark.parametrize(("word", "code"), [("model.layerz=3", 3), ("model=mpt-tiny", 0)])
def test_doctor_cluster_checks_configuration_too(
    word: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated_cluster(monkeypatch, [report(f"n{i}") for i in range(4)])
    assert main(["doctor", word, "--cluster", "--on", "slurm:azure-h100", "-N", "4"]) == code
    assert f"{'fail' if code else 'pass'}  config" in capsys.readouterr().out


def test_node_name_of_pod_is_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl cordon` takes no pod, and the pod is gone when its name is read."""
    container = training_container(template("doctor-1", "training", "--set-json", 'instead=["doctor","--probe"]'))
    (source,) = [entry["valueFrom"] for entry in container["env"] if entry["name"] == "KEEPSTEP_NODE"]
    assert source == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setenv("KEEPSTEP_NODE", "aks-gpu-3")
    assert node_name() == "aks-gpu-3"
