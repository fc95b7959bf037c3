"""The real Terraform on our modules, with providers that plan without a service."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.manifests import REPOSITORY
from tests.patience import PATIENCE_S

INFRA = REPOSITORY / "infra"
MODULES = ("nebius", "aks")
FACTS = Path(__file__).parent / "upstream.yaml"
UPSTREAM: dict[str, Any] = yaml.safe_load(FACTS.read_text())
# What .envrc or the user gives besides the sample.
GIVEN: dict[str, dict[str, str]] = {
    "nebius": {
        "region": "eu-north1", "iam_project_id": "project-e00a", "iam_tenant_id": "tenant-e00b", "iam_token": "t0ken",
        "vpc_subnet_id": "vpcsubnet-e00c",
        "slurm_login_ssh_root_public_keys": '["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA you@example.com"]',
        "soperator_charts": '{repository = "oci://registry.example/soperator", version = "1.22.1"}',
    },
    "aks": {},
}  # fmt: skip


def terraform(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("terraform")
    if program is None:
        pytest.skip("terraform is not installed: rules are only parsed")
    # A user's own CLI configuration must not decide a test.
    environment = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    return subprocess.run(
        [program, *words], cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=PATIENCE_S
    )


def plan_flags(module: str, **variables: str) -> list[str]:
    return [f"-var={name}={value}" for name, value in {**GIVEN[module], **variables}.items()]


@cache
def mocked_environment() -> dict[str, str]:
    """The environment in which Terraform uses the providers of mock_provider.py instead of downloading its own."""
    # A process of their own: gRPC leaves threads behind, and other tests fork. A socket's path must be short.
    folder = tempfile.mkdtemp()
    words = [sys.executable, str(FACTS.with_name("mock_provider.py")), str(FACTS), folder]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop() -> None:
        process.communicate()
        shutil.rmtree(folder)

    atexit.register(stop)
    assert process.stdout is not None
    addresses = process.stdout.readline().strip()
    assert addresses, "the mocked providers did not start"
    return {"TF_REATTACH_PROVIDERS": addresses}


def plan_module(module: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Copy the module to `folder` unless it is there, validate and plan it; on success stdout is the plan as JSON."""
    if not list(folder.glob("*.tf")):
        # The state's bucket is no part of a plan without an account.
        for path in (INFRA / module).glob("*.tf"):
            if path.name != "backend.tf":
                shutil.copy(path, folder)
        shutil.copy(INFRA / module / "terraform.tfvars.sample", folder / "sample.tfvars")
    flags = ["-input=false", "-no-color", "-var-file=sample.tfvars", "-out=plan", *plan_flags(module, **variables)]
    for words in (["init", "-input=false"], ["validate", "-no-color"], ["plan", *flags], ["show", "-json", "plan"]):
        done = terraform(*words, cwd=folder, **mocked_environment())
        if done.returncode != 0:
            break
    return done


@cache
def planned_resources(module: str, **variables: str) -> dict[str, dict[str, Any]]:
    """The planned values of every resource by its address."""
    with tempfile.TemporaryDirectory() as folder:
        done = plan_module(module, Path(folder), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    found = {resource["address"]: resource["values"] for resource in plan["planned_values"]["root_module"]["resources"]}
    outputs = {name: output.get("value") for name, output in plan["planned_values"]["outputs"].items()}
    return {**found, "outputs": outputs}
