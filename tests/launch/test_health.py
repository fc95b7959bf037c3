"""The doctor's verdicts, from numbers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import REPOSITORY, template, training_container

from keepstep.cli import doctor
from keepstep.cli.main import main
from keepstep.launch.health import judge_cluster, worst
from keepstep.launch.machine import machine_checks
from keepstep.parallel.probe import node_name


def report(node: str, **changes: Any) -> dict[str, Any]:
    sound = {
        "node": node, "device": "NVIDIA H100 80GB HBM3", "gemm_tflops": 700.0, "allreduce_gb_s": 455.0,
        "write_gb_s": 5.0, "read_gb_s": 8.0, "clock_skew_s": 0.001, "inactive_links": [],
    }  # fmt: skip
    return sound | changes


def test_sound_nodes_pass() -> None:
    health = judge_cluster([report(f"n{i}") for i in range(4)])
    assert health.sound
    assert health.drain == []


@pytest.mark.parametrize(("speed", "status"), [(450, "pass"), (399, "warn"), (299, "fail")])
def test_all_reduce_on_h100_is_judged_by_the_usual_limits(speed: float, status: str) -> None:
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
def test_each_fault_is_named_with_its_node(changes: dict[str, Any], check: str) -> None:
    health = judge_cluster([*(report(f"n{i}") for i in range(4)), report("bad", **changes)])
    assert health.drain == ["bad"]
    assert not health.sound
    failed = [c.name for node in health.nodes for c in node.checks if c.status == "fail"]
    assert failed == [check]


def test_the_common_end_of_slow_links_is_blamed_and_not_its_neighbours() -> None:
    ring = [("n4", "n1", 40.0), ("n1", "n2", 2.0), ("n2", "n3", 2.1), ("n3", "n4", 41.0)]
    reports = [report(node, link_from=before, link_gb_s=speed) for before, node, speed in ring]
    assert judge_cluster(reports).drain == ["n2"]


def test_a_node_that_did_not_take_part_is_drained() -> None:
    health = judge_cluster([report("n1")], expected=["n1", "n2"])
    assert health.drain == ["n2"]
    assert not health.sound


def test_this_machine_can_be_checked_and_a_folder_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    checks = {check.name: check for check in machine_checks(tmp_path, gpus=0)}
    assert checks["python"].status == "pass"
    assert checks["disk"].status in ("pass", "warn")
    refused = {check.name: check for check in machine_checks(Path("/proc/1"), gpus=0)}
    assert refused["disk"].status == "fail"


@pytest.mark.slow
def test_doctor_answers_as_json_and_fails_with_3_on_a_broken_configuration(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", "keepstep", "doctor", "--json", "model.layerz=3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert {"name": "config", "status": "fail"}.items() <= json.loads(done.stdout)[-2].items()


def test_a_driver_that_does_not_answer_is_told(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    code = (
        "from keepstep.launch import machine; machine.DRIVER_S = 0.2; "
        "print([(check.status, check.value) for check in machine.driver_checks()])"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("[('fail', 'nvidia-smi does not answer")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--on slurm:azure-h100", "--on without --cluster"),
        ("-N 4 --storage /data --data /data/c4", "-N, --storage, --data without --cluster"),
        ("--cluster --dry-run", "--dry-run: this machine is all there is"),
        ("--cluster -N 2", "-N: this machine is all there is"),
        ("--cluster --on slurm:azure-h100 -N 0 --dry-run", "-N is 0"),
        ("--cluster --on slurm:azure-h100 -N -3 --dry-run", "-N is -3"),
    ],
)
def test_a_flag_that_would_not_be_heeded_is_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words.split()]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert told in error
    assert "hint: " in error


def played_cluster(monkeypatch: pytest.MonkeyPatch, reports: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(doctor, "_measure_there", lambda *_: (reports, []))


def test_a_slow_network_is_not_the_word_to_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played_cluster(monkeypatch, [report(f"n{i}", allreduce_gb_s=250.0) for i in range(4)])
    assert main(["doctor", "--cluster", "--on", "slurm:azure-h100", "-N", "4"]) == 3
    out = capsys.readouterr().out
    assert "fail  all-reduce" in out
    assert "may train" not in out


@pytest.mark.parametrize(("word", "code"), [("model.layerz=3", 3), ("model=mpt-tiny", 0)])
def test_a_configuration_is_checked_beside_the_nodes_too(
    word: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played_cluster(monkeypatch, [report(f"n{i}") for i in range(4)])
    assert main(["doctor", word, "--cluster", "--on", "slurm:azure-h100", "-N", "4"]) == code
    assert f"{'fail' if code else 'pass'}  config" in capsys.readouterr().out


def test_a_pod_is_measured_under_the_name_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl cordon` takes no pod, and the pod is gone when its name is read."""
    container = training_container(template("doctor-1", "training", "--set-json", 'instead=["doctor","--probe"]'))
    (source,) = [entry["valueFrom"] for entry in container["env"] if entry["name"] == "KEEPSTEP_NODE"]
    assert source == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setenv("KEEPSTEP_NODE", "aks-gpu-3")
    assert node_name() == "aks-gpu-3"
