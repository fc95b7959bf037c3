"""Terraform, the Dockerfile and the scripts beside them: parsed, and every rule tried by the real tools."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch.manifests import REPOSITORY
from tests.launch.terraform import INFRA, MODULES, plan_flags, terraform


def parsed(module: str) -> dict[str, list[Any]]:
    import hcl2

    blocks: dict[str, list[Any]] = {}
    for path in sorted((INFRA / module).glob("*.tf")):
        with path.open() as file:
            for kind, found in hcl2.load(file).items():
                blocks.setdefault(kind, []).extend(found if isinstance(found, list) else [found])
    return blocks


def names(blocks: list[Any]) -> set[str]:
    return {name.strip('"') for block in blocks for name in block if not name.startswith("__")}


@pytest.mark.parametrize("module", MODULES)
def test_terraform_is_formatted(module: str) -> None:
    assert terraform("fmt", "-check", "-recursive", cwd=INFRA / module).returncode == 0


@pytest.mark.parametrize("module", MODULES)
def test_every_variable_is_described_checked_and_used(module: str) -> None:
    blocks = parsed(module)
    text = "\n".join(path.read_text() for path in (INFRA / module).glob("*.tf") if path.name != "variables.tf")
    used = set(re.findall(r"\bvar\.([a-z0-9_]+)", text))
    declared = names(blocks["variable"])
    assert used <= declared
    # The tenant and the region are what .envrc and the state's backend ask for; no resource needs them.
    assert declared - used <= {"region", "iam_tenant_id"}
    for block in blocks["variable"]:
        for name, body in block.items():
            assert body["description"], name
            assert "validation" in body or name.strip('"') == "infiniband_fabric", name
    for block in blocks["output"]:
        assert all(body["description"] for body in block.values())
    if module == "nebius":
        assert "slurm_login_ip" in names(blocks["output"])
    sample = (INFRA / module / "terraform.tfvars.sample").read_text()
    given = set(re.findall(r"^([a-z_]+)\s*=", sample, re.MULTILINE))
    assert given
    assert given <= declared


def workers(platform: str = "gpu-h200-sxm", preset: str = "8gpu-128vcpu-1600gb", size: int = 4, disk: int = 512) -> str:
    resource = {"platform": platform, "preset": preset}
    boot = {"type": "NETWORK_SSD", "size_gibibytes": disk, "block_size_kibibytes": 4}
    return json.dumps([{"size": size, "resource": resource, "boot_disk": boot}])


def two_presets() -> str:
    return json.dumps(json.loads(workers()) + json.loads(workers(preset="1gpu-16vcpu-200gb")))


def local_disk(
    size: int = 186, disk: str = "NETWORK_SSD_NON_REPLICATED", filesystem: str = "ext4", path: str = "/mnt/scratch",
    name: str = "scratch",
) -> str:  # fmt: skip
    mount = {"name": name, "mount_path": path, "size_gibibytes": size, "disk_type": disk, "filesystem_type": filesystem}
    return json.dumps([mount])


def plan(module: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Let Terraform itself judge the variables: the module's own file, with the sample's values, and no provider."""
    shutil.copy(INFRA / module / "variables.tf", folder)
    sample = (INFRA / module / "terraform.tfvars.sample").read_text()
    (folder / "sample.tfvars").write_text(sample)
    assert terraform("init", "-input=false", cwd=folder).returncode == 0
    flags = plan_flags(module, **variables)
    return terraform("plan", "-input=false", "-no-color", "-var-file=sample.tfvars", *flags, cwd=folder)


@pytest.mark.parametrize("module", MODULES)
def test_the_sample_values_obey_every_rule(module: str, tmp_path: Path) -> None:
    done = plan(module, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        ("nebius", "company_name", "Your Company", "lower-case letters"),
        ("nebius", "region", "north", "must look like eu-north1"),
        ("nebius", "iam_project_id", "tenant-e00a", "must start with project-"),
        ("nebius", "iam_tenant_id", "project-e00a", "must start with tenant-"),
        ("nebius", "vpc_subnet_id", "subnet-1", "must start with vpcsubnet-"),
        ("nebius", "iam_token", "", "source .envrc first"),
        ("nebius", "slurm_nodeset_workers", workers(platform="gpu-h200"), "platform must be"),
        ("nebius", "slurm_nodeset_workers", workers(preset="8gpu"), "preset must look like"),
        ("nebius", "slurm_nodeset_workers", workers(disk=256), "at least 512"),
        ("nebius", "slurm_nodeset_workers", workers(size=0), "whole number from 1"),
        ("nebius", "slurm_nodeset_workers", "[]", "at least one node set"),
        ("nebius", "slurm_nodeset_workers", two_presets(), "same platform and preset"),
        ("nebius", "node_local_jail_submounts", local_disk(size=100), "multiple of 93"),
        ("nebius", "node_local_jail_submounts", local_disk(disk="NVME"), "disk_type must be"),
        ("nebius", "node_local_jail_submounts", local_disk(filesystem="btrfs"), "filesystem_type must be ext4 or xfs"),
        ("nebius", "node_local_jail_submounts", local_disk(path="scratch"), "must be an absolute path"),
        ("nebius", "node_local_jail_submounts", local_disk(name="My Disk"), "lower-case letters"),
        ("nebius", "slurm_login_ssh_root_public_keys", '["my key"]', "at least one public key"),
        ("nebius", "k8s_version", "latest", "must look like 1.32"),
        ("nebius", "soperator_charts", '{repository="https://x", version="1.2.3"}', "oci:// repository"),
        ("aks", "subscription_id", "mine", "must be a GUID"),
        ("aks", "name", "A", "3 to 20 lower-case letters"),
        ("aks", "gpu_vm_size", "Standard_NC6", "must be an ND"),
        ("aks", "gpu_nodes", "-1", "whole number from 0"),
        ("aks", "lustre", '{sku_name="AMLFS-Durable-Premium-125", size_tib=20, zone="1"}', "multiple of"),
        ("aks", "lustre_driver_version", "main", "must look like v0.4.0"),
        ("aks", "lustre_from_claims", "maybe", "a bool is required"),
        ("aks", "lustre", '{sku_name="AMLFS-Premium", size_tib=16, zone="1"}', "lustre.sku_name must be"),
    ],
)
def test_each_rule_refuses_what_it_should(module: str, name: str, value: str, message: str, tmp_path: Path) -> None:
    done = plan(module, tmp_path, **{name: value})
    assert done.returncode != 0
    assert message in " ".join(done.stderr.replace("│", " ").split())


NEBIUS_COMMAND = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  "iam get-access-token") echo s3cret-token ;;
  *"group get-by-name"*) printf '{\\n  "metadata": {\\n    "id": "group-e00g"\\n  }\\n}\\n' ;;
  *"access-key create"*) printf '{\\n  "id": "operation-e00o",\\n  "resource_id": "accesskey-e00k"\\n}\\n' ;;
  *"access-key get-by-id"*) printf '{\\n  "status": {\\n    "aws_access_key_id": "NAKIE00"\\n  }\\n}\\n' ;;
  *"access-key get-secret-once"*) printf '{\\n  "secret": "s3cret-key"\\n}\\n' ;;
  *service-account*get-by-name*) exit 1 ;;
  *service-account*create*) printf '{\\n  "metadata": {\\n    "id": "serviceaccount-e00x"\\n  }\\n}\\n' ;;
  *bucket*get-by-name*) exit 1 ;;
  *subnet*list*) printf '{\\n  "items": [\\n    {\\n      "id": "vpcsubnet-e00c"\\n    }\\n  ]\\n}\\n' ;;
esac
"""


SHOW = "env | grep -E '^(TF_|AWS_)' | sed 's/s3cret-token/TOKEN/; s/s3cret-key/KEY/' | sort"


def envrc(tmp_path: Path, then: str = SHOW, **given: str) -> subprocess.CompletedProcess[str]:
    command = tmp_path / "nebius"
    command.write_text(NEBIUS_COMMAND)
    command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), **given}
    words = ["bash", "-c", f"source {INFRA}/nebius/.envrc && {then}"]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


def test_envrc_sets_what_terraform_needs_and_prints_no_secret(tmp_path: Path) -> None:
    done = envrc(tmp_path, NEBIUS_TENANT_ID="tenant-e00b", NEBIUS_PROJECT_ID="project-e00a", NEBIUS_REGION="eu-north1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "AWS_ACCESS_KEY_ID=NAKIE00", "AWS_ENDPOINT_URL_S3=https://storage.eu-north1.nebius.cloud:443",
        "AWS_REGION=eu-north1", "AWS_SECRET_ACCESS_KEY=KEY",
        "TF_CLI_ARGS_init=-backend-config=bucket=keepstep-tfstate-e00a", "TF_VAR_iam_project_id=project-e00a",
        "TF_VAR_iam_tenant_id=tenant-e00b", "TF_VAR_iam_token=TOKEN", "TF_VAR_region=eu-north1",
        "TF_VAR_vpc_subnet_id=vpcsubnet-e00c",
    ]  # fmt: skip
    assert "s3cret" not in done.stdout + done.stderr
    assert "bucket create" in (tmp_path / "log").read_text()
    # A key of an account that may not write the bucket would be of no use.
    assert (
        "group-membership create --parent-id group-e00g --member-id serviceaccount-e00x"
        in (tmp_path / "log").read_text()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_state_lies_in_the_bucket_and_not_on_this_machine(tmp_path: Path) -> None:
    """The real Terraform with the module's own backend and what .envrc says, and a stand-in for the object store."""
    boto3, moto_server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    server = moto_server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        key = {"aws_access_key_id": "NAKIE00", "aws_secret_access_key": "s3cret-key", "region_name": "us-east-1"}
        store = boto3.client("s3", endpoint_url=address, **key)
        store.create_bucket(Bucket="keepstep-tfstate-e00a")
        module = tmp_path / "module"
        module.mkdir()
        shutil.copy(INFRA / "nebius" / "backend.tf", module)
        (module / "main.tf").write_text('resource "terraform_data" "cluster" {}\n')
        given = {"NEBIUS_TENANT_ID": "tenant-e00b", "NEBIUS_PROJECT_ID": "project-e00a", "NEBIUS_REGION": "eu-north1"}
        given |= {"TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "HOME": str(tmp_path)}
        then = f"cd {module} && export AWS_ENDPOINT_URL_S3={address} && terraform init -input=false"
        done = envrc(tmp_path, f"{then} && terraform apply -auto-approve -input=false", **given)
        assert done.returncode == 0, done.stdout + done.stderr
        found = store.get_object(Bucket="keepstep-tfstate-e00a", Key="soperator.tfstate")["Body"].read()
        assert [resource["name"] for resource in json.loads(found)["resources"]] == ["cluster"]
        assert not (module / "terraform.tfstate").exists()
    finally:
        server.stop()


@pytest.mark.parametrize("missing", ["NEBIUS_TENANT_ID", "NEBIUS_PROJECT_ID", "NEBIUS_REGION"])
def test_envrc_says_what_is_missing(missing: str, tmp_path: Path) -> None:
    given = {"NEBIUS_TENANT_ID": "tenant-e00b", "NEBIUS_PROJECT_ID": "project-e00a", "NEBIUS_REGION": "eu-north1"}
    del given[missing]
    done = envrc(tmp_path, **given)
    assert done.returncode != 0
    assert f"error: {missing} is ''" in done.stderr


def test_the_dockerfile_is_pinned_and_ends_as_a_plain_user() -> None:
    text = (REPOSITORY / "docker/Dockerfile").read_text()
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d+\.\d+", base[1])
    assert re.search(r"^ARG TORCH=torch==\d+\.\d+\.\d+$", text, re.MULTILINE)
    final = text.split("\nFROM ")[-1]
    assert re.findall(r"^USER (.+)$", final, re.MULTILINE) == ["1000:1000"]
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (REPOSITORY / path).exists() or path == "README.md", path


def test_the_build_script_tags_and_pushes(tmp_path: Path) -> None:
    def build(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(REPOSITORY / "docker/build"), *words], capture_output=True, text=True, cwd=tmp_path)

    done = build("--registry", "registry.example/team", "--tag", "v1.0", "--push", "--dry-run")
    assert done.returncode == 0
    assert "--tag registry.example/team/keepstep:v1.0 --tag registry.example/team/keepstep:latest" in done.stdout
    assert (
        "docker push registry.example/team/keepstep:v1.0\ndocker push registry.example/team/keepstep:latest"
        in done.stdout
    )
    for wrong, message in (
        (["--tag"], "needs a value"),
        (["--tag", "a b"], "but it must consist of"),
        (["now"], "unknown argument"),
    ):
        refused = build(*wrong)
        assert refused.returncode == 2
        assert message in refused.stderr


@pytest.mark.parametrize(
    "script",
    [
        "infra/aks/install-lustre-driver",
        "infra/cyclecloud/deploy",
        "slurm/launch.sb",
        "slurm/prepare_c4.sb",
        "slurm/squash",
        "slurm/pin-clocks",
        "docker/build",
    ],
)
def test_scripts_parse_and_can_be_run(script: str) -> None:
    path = REPOSITORY / script
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
