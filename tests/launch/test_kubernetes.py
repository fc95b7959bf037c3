"""`jobs`, `logs`, `stop` and `resume` on Kubernetes: what helm and kubectl are asked, and how answers are read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from keepstep.cli.main import main
from keepstep.core.errors import UsageError
from keepstep.launch import kubernetes
from keepstep.launch.job import Job, Target, load_record
from keepstep.launch.pod import ENDED
from keepstep.launch.profile_kinds import KubernetesProfile
from keepstep.launch.submit import ReportJob, run_report_job

PROGRAM = """#!/bin/sh
printf '%s' "$(basename "$0")" >> "$LOG"; printf ' %s' "$@" >> "$LOG"; echo >> "$LOG"
case "$*" in
  *"get pods"*) cat "$PODS" ;;
  *"list -q"*) [ -e "$LOG.stopped" ] || echo my-run ;;
  *--tail=1) cat "$LOG.ends" ;;
  *logs*) echo "[pod/my-run-node-0-0] step" ;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """helm and kubectl that write down what they are asked: there is no API server here."""
    for name in ("helm", "kubectl"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PROGRAM)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(kubernetes, "_helm", lambda: str(tmp_path / "bin" / "helm"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PODS", str(tmp_path / "pods.json"))
    monkeypatch.chdir(tmp_path)
    phases(tmp_path, "Running", "Running")
    return tmp_path


def phases(folder: Path, *found: str) -> None:
    pods = [{"metadata": {"name": f"pod-{n}"}, "status": {"phase": phase}} for n, phase in enumerate(found)]
    (folder / "pods.json").write_text(json.dumps({"items": pods}))


def asked(folder: Path) -> list[str]:
    lines = (folder / "log").read_text().splitlines()
    (folder / "log").write_text("")
    return lines


def submitted(folder: Path) -> None:
    (folder / "profile.yaml").write_text("namespace: team\ncontext: big\ngpus_per_node: 1\n")
    words = [
        "train",
        "name=my-run",
        "model=mpt-tiny",
        "data=synthetic",
        "global_batch=16",
        "--on",
        f"k8s:{folder}/profile.yaml",
        "-N",
        "2",
    ]
    assert main(words) == 0


def test_a_run_is_installed_listed_stopped_and_resumed(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(programs)
    scope = "--namespace team --kube-context big"
    uninstall, install = asked(programs)[-2:]
    assert uninstall == f"helm uninstall my-run --ignore-not-found --wait {scope}"
    assert install.startswith("helm install my-run ")
    assert install.endswith(f"runs/my-run/job/values.yaml {scope}")
    capsys.readouterr()

    assert main(["jobs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "running"
    assert main(["logs", "my-run"]) == 0
    assert "kubectl --namespace team --context big logs -l app.kubernetes.io/instance=my-run" in "\n".join(
        asked(programs)
    )

    assert main(["stop", "my-run"]) == 0
    assert asked(programs) == [f"helm uninstall my-run {scope}"]
    (programs / "log.stopped").touch()
    phases(programs)
    assert main(["resume", "my-run", "--exclude", "gpu-7"]) == 0
    assert asked(programs)[-1].startswith("helm install my-run ")
    values = yaml.safe_load(Path(load_record(Path("runs"), "my-run").script).read_text())
    assert "gpu-7" in json.dumps(values["affinity"])


@pytest.mark.parametrize(
    ("found", "state"),
    [(["Running", "Pending"], "running"), (["Pending"], "waiting"), (["Succeeded", "Failed"], "failed"),
     (["Succeeded", "Succeeded"], "finished"), ([], "waiting")],
)  # fmt: skip
def test_the_state_follows_from_the_pods(programs: Path, found: list[str], state: str) -> None:
    submitted(programs)
    phases(programs, *found)
    assert kubernetes.state(load_record(Path("runs"), "my-run")) == state


@pytest.mark.parametrize(
    ("kind", "codes", "state"),
    [
        ("leaderworkerset", [0, 0], "finished"),
        ("leaderworkerset", [0], "running"),
        ("leaderworkerset", [4], "failed"),
        ("jobset", [0, 0], "running"),
    ],
)
def test_state_of_a_leaderworkerset_follows_from_its_log(
    programs: Path, kind: str, codes: list[int], state: str
) -> None:
    submitted(programs)
    record = load_record(Path("runs"), "my-run")
    values = yaml.safe_load(Path(record.script).read_text())
    Path(record.script).write_text(yaml.safe_dump({**values, "jobKind": kind}))
    ends = [f"{ENDED} {code}" for code in codes] + ["step 3"] * (2 - len(codes))
    (programs / "log.ends").write_text("\n".join(ends))
    assert kubernetes.state(record) == state


def test_a_queue_is_one_of_volcano_for_its_jobs() -> None:
    job = Job("a", ("train", "run.yaml"), Path("runs/a"), 1)
    queue = {"queueName": "team", "requiredTopology": "block", "preferredTopology": ""}
    for kind, key, other in (("volcano", "volcano", "kueue"), ("jobset", "kueue", "volcano")):
        profile = KubernetesProfile(job_kind=kind, queue="team", required_topology="block")  # type: ignore[arg-type]
        values = kubernetes.chart_values(job, profile)
        assert values[key] == queue
        assert other not in values


@pytest.mark.parametrize("survives", [True, False])
def test_chart_knows_whether_pods_outlive_each_other(survives: bool) -> None:
    job = Job("a", ("train", "run.yaml"), Path("runs/a"), 4, survives=survives)
    assert kubernetes.chart_values(job, KubernetesProfile())["training"]["survive"] is survives


def test_a_run_that_runs_is_not_submitted_twice(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(programs)
    words = [
        "train",
        "name=my-run",
        "model=mpt-tiny",
        "data=synthetic",
        "global_batch=16",
        "--on",
        f"k8s:{programs}/profile.yaml",
        "-N",
        "2",
    ]
    assert main(words) == 2
    assert "run my-run is running" in capsys.readouterr().err


def test_resume_waits_until_old_pods_are_gone(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(programs)
    asked(programs)
    assert main(["resume", "my-run"]) == 2
    assert "run my-run is running" in capsys.readouterr().err
    # Stopped: the release is gone at once, its pods have minutes for their last save.
    (programs / "log.stopped").touch()
    assert main(["resume", "my-run", "--exclude", "gpu-7"]) == 2
    assert "pods of run my-run are still saving" in capsys.readouterr().err
    assert kubernetes.state(load_record(Path("runs"), "my-run")) == "ending"
    assert not [line for line in asked(programs) if "install" in line]
    phases(programs)
    assert main(["resume", "my-run"]) == 0
    assert asked(programs)[-1].startswith("helm install my-run ")


def test_submit_explains_taken_tensorboard_service(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = 'Error: INSTALLATION FAILED: Unable to continue with install: Service "tensorboard" in namespace "team" '
    taken += "exists and cannot be imported into the current release: invalid ownership metadata"
    (programs / "bin" / "helm").write_text(f"#!/bin/sh\n[ $1 != install ] || {{ echo '{taken}' >&2; exit 1; }}\n")
    (programs / "profile.yaml").write_text("namespace: team\ngpus_per_node: 1\n")
    words = [
        "train",
        "name=second",
        "model=mpt-tiny",
        "data=synthetic",
        "global_batch=16",
        "--on",
        f"k8s:{programs}/profile.yaml",
    ]
    assert main(words) == 2
    assert "hint: tensorboard: false, or another tensorboard_service" in capsys.readouterr().err


def test_all_pods_of_a_large_run_are_followed(programs: Path) -> None:
    submitted(programs)
    record = dataclasses.replace(load_record(Path("runs"), "my-run"), nodes=512)
    (limit,) = [word for word in kubernetes.logs_command(record, follow=True) if "max-log-requests" in word]
    assert int(limit.partition("=")[2]) >= 512


def test_an_image_without_a_tag_is_refused() -> None:
    job = Job("a", ("train", "run.yaml"), Path("runs/a"), 1)
    for image in ("keepstep", "registry:5000/keepstep", ":0.1"):
        with pytest.raises(UsageError, match="must be repository:tag"):
            kubernetes.chart_values(job, KubernetesProfile(image=image))


def test_state_ignores_replaced_pods(programs: Path) -> None:
    submitted(programs)

    def pod(node: int, name: str, minute: int, phase: str) -> dict[str, object]:
        labels = {"batch.kubernetes.io/job-completion-index": str(node)}
        made = f"2026-11-15T16:{minute:02}:00Z"
        return {"metadata": {"name": name, "labels": labels, "creationTimestamp": made}, "status": {"phase": phase}}

    drained = [pod(0, "x", 1, "Failed"), pod(1, "y", 1, "Failed")]
    for phase, state in (("Pending", "waiting"), ("Running", "running"), ("Succeeded", "finished")):
        replaced = [pod(1, "a", 9, phase), *drained, pod(0, "b", 9, phase)]
        (programs / "pods.json").write_text(json.dumps({"items": replaced}))
        assert kubernetes.state(load_record(Path("runs"), "my-run")) == state
    (programs / "pods.json").write_text(json.dumps({"items": [*drained, pod(0, "b", 9, "Failed")]}))
    assert kubernetes.state(load_record(Path("runs"), "my-run")) == "failed"


def test_report_job_uninstalls_its_release(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases(programs)
    monkeypatch.setattr(kubernetes, "log_text", lambda record: 'keepstep-report [{"node": "a"}]\n')
    job = Job("doctor-1", ("doctor", "--probe"), programs / "runs" / ".doctor" / "doctor-1", 2)
    profile = KubernetesProfile(namespace="team")
    assert run_report_job(ReportJob(job, profile, Target("k8s")), 60) == [{"node": "a"}]
    assert asked(programs)[-1] == "helm uninstall doctor-1 --namespace team"
