"""`--on sky`: the task against SkyPilot's own schema, and what its command line is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep.cli.main import main
from keepstep.core.ranks import RENDEZVOUS_SECRET
from keepstep.launch.job import load_record
from keepstep.launch.profile_kinds import KubernetesProfile
from keepstep.launch.profiles import load_profile
from keepstep.launch.submit import state

PROFILE = """
infra: aws/us-east-1
accelerators: H100:8
nodes: 2
use_spot: true
image: registry.example/keepstep:0.1.0
resources: {disk_size: 500, network_tier: best}
file_mounts: {/runs: {source: "s3://my-bucket/runs", mode: MOUNT}}
strategy: EAGER_NEXT_REGION
secrets: {HF_TOKEN: MY_HF_TOKEN}
variables: {NCCL_DEBUG: WARN, SOME_NUMBER: 012}
"""
WORDS = ["train", "name=my-run", "model=mpt-tiny", "data=s3://data/c4", "global_batch=128", "runs_dir=/runs"]
PROGRAM = """#!/bin/sh
printf ' %s' "$@" >> "$LOG"; echo " secret=$KEEPSTEP_RENDEZVOUS_SECRET token=$HF_TOKEN" >> "$LOG"
case "$*" in *queue*) cat "$QUEUE" ;; *logs*) echo "(my-run, pid=1) step 1" ;; esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "spot.yaml").write_text(PROFILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `sky` that writes down what it is asked: there is no cloud here."""
    path = folder / "bin" / "sky"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    monkeypatch.setenv("LOG", str(folder / "log"))
    monkeypatch.setenv("QUEUE", str(folder / "queue.json"))
    monkeypatch.setenv("MY_HF_TOKEN", "hf-value")
    queue(folder)
    return folder


def queue(folder: Path, *statuses: str) -> None:
    jobs = [{"job_id": number, "job_name": "my-run", "status": word} for number, word in enumerate(statuses)]
    (folder / "queue.json").write_text(json.dumps(jobs))


def rendered(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*WORDS, "--on", "sky:spot", "--dry-run"]) == 0
    task: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return task


def test_task_is_what_skypilot_accepts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot", exc_type=ImportError)
    from sky.task import Task
    from sky.utils import common_utils, schemas

    task = rendered(capsys)
    common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
    common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "resources: ")
    common_utils.validate_schema(task["file_mounts"]["/runs"], schemas.get_storage_schema(), "storage: ")
    # Without the bucket: SkyPilot would ask the cloud for it.
    values = [(name, "value") for name in task["secrets"]]
    parsed = Task.from_yaml_config({**task, "file_mounts": {}}, secrets_overrides=values)
    assert parsed.num_nodes == 2
    assert all(resources.job_recovery["recover_on_exit_codes"] == [75] for resources in parsed.resources)
    wrong = {**task["resources"], "job_recovery": {"recover_on_exit_codes": "75"}}
    with pytest.raises(ValueError, match="recover_on_exit_code"):
        common_utils.validate_schema(wrong, schemas.get_resources_schema(), "recover_on_exit_code: ")


def test_task_describes_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = rendered(capsys)
    assert task["num_nodes"] == 2
    recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert task["resources"] == {
        "infra": "aws/us-east-1", "accelerators": "H100:8", "use_spot": True, "disk_size": 500, "network_tier": "best",
        "image_id": "docker:registry.example/keepstep:0.1.0", "job_recovery": recovery,
    }  # fmt: skip
    assert task["secrets"] == {RENDEZVOUS_SECRET: None, "HF_TOKEN": None}
    assert task["envs"]["SOME_NUMBER"] == "012"
    assert "launch node --nodes 2:2 --processes 8 --max-restarts 3 -- train" in task["run"]
    assert "runs_dir=/runs" in task["run"]


def test_run_folder_that_dies_with_the_machine_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS[:-1], "--on", "sky:spot", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "lost when the container ends" in error
    assert "mode: MOUNT" in error


def test_run_is_launched_and_its_secret_is_in_no_command_line(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS[:-1], "runs_dir=runs", "--on", "sky:local"]
    (program / "profiles" / "local.yaml").write_text(PROFILE.replace("/runs: {", "/image/runs: {"))
    assert main(words) == 0, capsys.readouterr().err
    asked = (program / "log").read_text().splitlines()[-1]
    launch, _, secret = asked.partition(" secret=")
    script = program / "runs/my-run/job/sky.yaml"
    options = f"--secret HF_TOKEN --secret {RENDEZVOUS_SECRET}"
    assert launch == f" jobs launch --yes --detach-run {options} {script}"
    assert re.fullmatch(r"[0-9a-f]{64} token=hf-value", secret)
    assert secret[:64] not in script.read_text()

    record = load_record(Path("runs"), "my-run")
    for status, word in (("RUNNING", "running"), ("RECOVERING", "waiting"), ("SUCCEEDED", "finished"),
                         ("CANCELLED", "stopped"), ("FAILED_NO_RESOURCE", "failed")):  # fmt: skip
        queue(program, "FAILED", status)
        assert state(record) == word
    assert main(["stop", "my-run"]) == 2
    assert "loses the work since its last checkpoint" in capsys.readouterr().err
    assert main(["stop", "my-run", "--now"]) == 0
    assert " jobs cancel --yes --name my-run" in (program / "log").read_text()
    monkeypatch.setenv("HF_TOKEN", "hf-value")
    assert main(["resume", "my-run"]) == 0
    assert " jobs launch" in (program / "log").read_text().splitlines()[-1]


def test_missing_sky_and_missing_secret_have_remedies(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (program / "profiles" / "local.yaml").write_text(PROFILE.replace("/runs: {", "/image/runs: {"))
    words = [*WORDS[:-1], "--on", "sky:local"]
    monkeypatch.delenv("MY_HF_TOKEN")
    assert main(words) == 2
    assert "need MY_HF_TOKEN, which are not set here" in capsys.readouterr().err
    monkeypatch.setenv("MY_HF_TOKEN", "x")
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(words) == 2
    assert "hint: pip install 'skypilot[aws]'" in capsys.readouterr().err


def test_wrong_accelerators_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "profiles" / "bad.yaml").write_text("accelerators: H100:many\n")
    assert main([*WORDS, "--on", "sky:bad", "--dry-run"]) == 2
    assert "must be TYPE:COUNT" in capsys.readouterr().err


def test_values_for_other_programs_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "typed.yaml"
    path.write_text("values: {metrics: {scrape: true}, security: {runAsUser: 1000}}\nvariables: {A: 012}\n")
    profile = load_profile(KubernetesProfile, str(path))
    assert profile.values == {"metrics": {"scrape": True}, "security": {"runAsUser": 1000}}
    assert profile.variables == {"A": "012"}
