"""What a pod runs is what `--on k8s --dry-run` says, and that command, run here with the pod's environment, trains."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep.launch.environments import all_environments
from keepstep.launch.pod import ENDED
from keepstep.observe.run_folder import read_from
from tests.launch.manifests import REPOSITORY, check, kubelet_expand, template, training_container
from tests.patience import PATIENCE_S

RUN = """\
model: {preset: mpt-tiny, vocab: 512, seq_len: 32}
data: synthetic
global_batch: 4
microbatch: 1
max_duration: 4ba
evaluate: {at_end: false}
observe: {tensorboard: false}
compute: {device: cpu, threads: 1}
"""
PROFILE = "job_kind: {kind}\nnodes: 2\ngpus_per_node: 0\nrdma_resource: ''\nmount_path: {mount}\n"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}


def keepstep(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", *words], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def dry_run(folder: Path, kind: str, *overrides: str) -> list[dict[str, Any]]:
    (folder / "run.yaml").write_text(RUN)
    (folder / "profile.yaml").write_text(PROFILE.format(kind=kind, mount=folder / "data"))
    words = ["train", "run.yaml", "name=my-run", *overrides, "--on", f"k8s:{folder}/profile.yaml", "--dry-run"]
    manifests = [manifest for manifest in yaml.safe_load_all(keepstep(*words, cwd=folder)) if manifest]
    for manifest in manifests:
        check(manifest)
    return manifests


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "jobset", "volcano", "leaderworkerset"])
def test_helm_and_dry_run_give_the_same_container(kind: str, tmp_path: Path) -> None:
    said = dry_run(tmp_path, kind, "optimizer.lr=1e-4")
    flags = ["--set", f"jobKind={kind}", "--set", "training.gpusPerNode=0", "--set", "environment.profile=none"]
    flags += ["--set", f"storage.mountPath={tmp_path}/data", "--set-file", f"config={tmp_path}/run.yaml"]
    flags += ["--set-json", 'overrides=["name=my-run","optimizer.lr=1e-4"]']
    made = template("my-run", "training", *flags)
    assert training_container(said) == training_container(made)
    config = [manifest["data"] for manifest in (*said, *made) if manifest["kind"] == "ConfigMap"]
    assert config == [{"run.yaml": RUN}] * 2


def operator_environment(kind: str, rank: int, port: int) -> dict[str, str]:
    """The variables that each operator sets in the pods of a two-node job."""
    match kind:
        case "trainjob":
            return {
                "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "JOB_COMPLETION_INDEX": str(rank),
            }  # fmt: skip
        case "pytorchjob":
            return {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank),
                "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank), "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
        case "volcano" | "leaderworkerset":
            index = "VC_TASK_INDEX" if kind == "volcano" else "LWS_WORKER_INDEX"
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), index: str(rank)}
        case _:
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "JOB_COMPLETION_INDEX": str(rank)}


def _last_words(pod: subprocess.Popen[bytes], stays: bool) -> str:
    """All that the pod prints. One that stays after its run is stopped as Kubernetes does it."""
    said = b""
    while stays and ENDED.encode() not in said:
        assert pod.stdout is not None
        line = pod.stdout.readline()
        said += line
        if not line:
            break
    if stays:
        pod.terminate()
    return (said + pod.communicate(timeout=PATIENCE_S)[0]).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "trainjob",
        pytest.param("pytorchjob", marks=pytest.mark.cluster),
        pytest.param("jobset", marks=pytest.mark.cluster),
        pytest.param("volcano", marks=pytest.mark.cluster),
        pytest.param("leaderworkerset", marks=pytest.mark.cluster),
    ],
)
def test_the_pods_command_trains_in_two_processes(kind: str, tmp_path: Path) -> None:
    container = training_container(dry_run(tmp_path, kind))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pods = []
    for rank in range(2):
        values = {entry["name"]: entry.get("value", "") for entry in container["env"]} | operator_environment(
            kind, rank, port
        )
        # The kubelet reads it from the Secret.
        assert values["KEEPSTEP_RENDEZVOUS_SECRET"] == ""
        values["KEEPSTEP_RENDEZVOUS_SECRET"] = "hunter2-hunter2-hunter2"
        values |= {"NCCL_DEBUG": "WARN", "NCCL_AUTH_KEY": "hunter2", "HF_TOKEN": "hunter2"}
        arguments = [kubelet_expand(word, values) for word in container["args"]]
        # The volumes of the pod: its configuration lies here.
        arguments = [word.replace("/etc/keepstep", str(tmp_path)) for word in arguments]
        command = [sys.executable, "-m", *container["command"], *arguments]
        pods.append(
            subprocess.Popen(
                command, cwd=tmp_path, env={**ENVIRONMENT, **values}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    said = [_last_words(pod, stays=kind == "leaderworkerset") for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    steps, _ = read_from(tmp_path / "data" / "runs" / "my-run" / "metrics.jsonl")
    assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3, 4]
    facts = yaml.safe_load((tmp_path / "data" / "runs" / "my-run" / "facts.json").read_text())
    assert facts["world_size"] == 2
    recorded = facts["variables"]
    assert recorded.items() >= {**all_environments()["elastic"], "NCCL_DEBUG": "WARN"}.items()
    assert not any("hunter2" in value for value in recorded.values())
    assert not any("hunter2" in text for text in said)
