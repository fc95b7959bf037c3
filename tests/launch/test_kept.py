"""What a run in a container saves lies on a volume: its own disk is lost with it, and no other node sees it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from manifests import REPOSITORY, template, training_container

from keepstep.cli.main import main
from keepstep.launch.kept import is_kept

RUN = ["train", "name=my-run", "model=mpt-tiny", "global_batch=16"]


def rendered(where: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([*RUN, *words, "--on", where, "--dry-run"])
    return code, *capsys.readouterr()


@pytest.fixture
def k8s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.yaml").write_text("gpus_per_node: 1\nmount_path: /data\n")
    return "k8s:./profile.yaml"


@pytest.mark.parametrize("folder", ["steps", "./my-run/steps", "/steps", "/data/../tmp", "/database/steps"])
def test_steps_that_would_go_with_the_pod_are_refused_before_it_is_submitted(
    folder: str, k8s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = rendered(k8s, f"checkpoint.folder={folder}", capsys=capsys)
    assert (code, out) == (2, "")
    assert f"checkpoint.folder is {folder}, which is on no volume" in error
    assert "a folder below /data" in error


@pytest.mark.parametrize("folder", ["/data/steps", "${runs_dir}/steps"])
def test_steps_on_the_volume_are_kept(folder: str, k8s: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = rendered(k8s, f"checkpoint.folder={folder}", capsys=capsys)
    assert code == 0, error


@pytest.mark.parametrize(("runs_dir", "sent"), [("mine", False), ("/home/me/runs", False), ("/data/team", True)])
def test_a_runs_dir_of_the_machine_that_submits_is_not_the_pods_(
    runs_dir: str, sent: bool, k8s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = rendered(k8s, f"runs_dir={runs_dir}", capsys=capsys)
    assert code == 0, error
    container = training_container([manifest for manifest in yaml.safe_load_all(out) if manifest])
    assert (f"runs_dir={runs_dir}" in container["args"]) is sent
    assert "runs_dir=/data/runs" in container["args"]


def test_a_pod_refuses_to_save_beside_its_volume_however_it_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--set", f"storage.mountPath={tmp_path}/data", "--set", "yamlUpdates.save_folder=./my-run/steps"]
    flags += [
        "--set",
        "training.nodes=1",
        "--set",
        "training.gpusPerNode=0",
        "--set-json",
        'overrides=["model=mpt-tiny"]',
    ]
    container = training_container(template("my-run", "training", *flags))
    for entry in container["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", ""))
    (tmp_path / "run.yaml").write_text("{model: mpt-tiny, data: synthetic, max_duration: 1ba, compute: {device: cpu}}")
    monkeypatch.chdir(tmp_path)
    words = [word.replace("/etc/keepstep", str(tmp_path)) for word in container["args"]]
    assert main([*container["command"][1:], *words]) == 2
    assert "checkpoint.folder is ./my-run/steps, which is on no volume" in capsys.readouterr().err
    assert not (tmp_path / "my-run").exists()


@pytest.mark.parametrize(
    ("profile", "folder", "code"),
    [
        ("image: a.sqsh\nmounts: ['/data:/data']\n", "/scratch/steps", 2),
        ("image: a.sqsh\nmounts: ['/nvme:/scratch:rw,/data:/data']\n", "/scratch/steps", 0),
        ("image: a.sqsh\nmounts: ['/scratch']\n", "/scratch/steps", 0),
        ("image: a.sqsh\n", "steps", 0),
        ("venv: /env\n", "/scratch/steps", 0),
    ],
)
def test_steps_of_a_slurm_container_lie_in_a_mount(
    profile: str,
    folder: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.yaml").write_text(f"{profile}gpus_per_node: 1\n")
    # The run's own folder is mounted, wherever it is.
    words = [f"checkpoint.folder={folder}", "runs_dir=/elsewhere/runs"]
    found, _, error = rendered("slurm:./profile.yaml", *words, capsys=capsys)
    assert found == code, error
    assert ("mounts: " in error) is (code == 2)


@pytest.mark.parametrize(
    ("mounts", "folder", "warned"),
    [
        ("/data:/data", "/mnt/nvme/steps", True),
        ("/data:/data,/local:/mnt/nvme:rw", "/mnt/nvme/steps", False),
        ("/data", "/data/steps", False),
        ("/data:/data", "steps", False),
    ],
)
def test_launch_sb_warns_of_steps_that_are_in_no_mount(mounts: str, folder: str, warned: bool, tmp_path: Path) -> None:
    for name, body in {"scontrol": "echo n1", "squeue": "echo COMPLETING", "srun": "true"}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    slurm = {"JOB_ID": "7", "JOB_NAME": "run", "JOB_NODELIST": "n1", "JOB_NUM_NODES": "1", "SUBMIT_DIR": str(tmp_path)}
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **{f"SLURM_{k}": v for k, v in slurm.items()}}
    flags = ["-c", "mpt-7b", "-i", "a.sqsh", "-d", "/data/c4", "-m", mounts, "-s", "-F", folder]
    script = str(REPOSITORY / "slurm/launch.sb")
    done = subprocess.run(["bash", script, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (f"-F {folder} is in no mount" in done.stderr) is warned


def test_the_root_of_a_container_may_be_a_volume() -> None:
    assert is_kept("anything", ["/"], "/image")


def test_a_model_on_the_volume_is_fine_tuned_from_a_machine_that_does_not_see_it(
    k8s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", "--from", "/data/no-such-place/base", "--data", "toolcalls", "--name", "my-run", "--dry-run"]
    assert main([*words, "--on", k8s]) == 0
    container = training_container([manifest for manifest in yaml.safe_load_all(capsys.readouterr().out) if manifest])
    assert "finetune.start_from=/data/no-such-place/base" in container["args"]
    # What the machines share is looked at here, before a job waits for hours.
    assert main([*words, "--on", "slurm:azure-h100"]) == 2
    assert "neither a run's folder nor a Hugging Face model" in capsys.readouterr().err
