"""What others publish and we deploy: our modules and files against upstream's names, types and required values."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.manifests import helm, template
from tests.launch.terraform import INFRA, MODULES, UPSTREAM, plan_module, planned_resources

SAMPLE = (INFRA / "nebius/terraform.tfvars.sample").read_text()
CLUSTER, STORAGE = "helm-slurm-cluster", "helm-slurm-cluster-storage"


@pytest.mark.parametrize("module", MODULES)
def test_module_plans_with_mocked_providers(module: str) -> None:
    assert len(planned_resources(module)) > 5


def test_mocked_provider_refuses_unknown_and_missing_arguments(tmp_path: Path) -> None:
    for name, old, new, message in (
        ("unknown", "gpu_driver ", "gpu_drivers ", 'An argument named "gpu_drivers" is not expected here'),
        ("missing", "  sku_name               = var.lustre.sku_name\n", "", 'The argument "sku_name" is required'),
        ("type", "node_count            = var.gpu_nodes", "node_count            = [var.gpu_nodes]", "number required"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for path in (INFRA / "aks").glob("*.tf"):
            text = path.read_text()
            assert path.name != "main.tf" or old in text
            (folder / path.name).write_text(text.replace(old, new))
        done = plan_module("aks", folder)
        assert done.returncode != 0
        assert message in done.stderr


@pytest.mark.parametrize(
    ("module", "variables", "message"),
    [
        ("nebius", {"infiniband_fabric": ""}, "infiniband_fabric is required"),
        ("nebius", {"filestore_jail_submounts": "SCRATCH"}, "each name must be unique"),
        ("aks", {"lustre_from_claims": "true"}, "either lustre or lustre_from_claims"),
    ],
)
def test_module_refuses_what_does_not_fit_together(
    module: str, variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    scratch = '[{name="scratch", mount_path="/mnt/s", spec={size_gibibytes=1, block_size_kibibytes=4}}]'
    given = {name: scratch if value == "SCRATCH" else value for name, value in variables.items()}
    done = plan_module(module, tmp_path, **given)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.replace("│", " ").split())


def chart_copy(name: str, folder: Path) -> Path:
    """A chart with upstream's defaults that refuses what upstream's refuses and prints the merged values."""
    facts = UPSTREAM["charts"][name]
    lines = [f'{{{{- $_ := required "{path} must be provided" .Values.{path} }}}}' for path in facts["required"]]
    for rule in facts["each"]:
        checks = "".join(f'{{{{- $_ := required "{path} must be provided" .{path} }}}}' for path in rule["required"])
        condition = f"{{{{- if .{rule['when']} }}}}{checks}{{{{- end }}}}" if "when" in rule else checks
        lines.append(f"{{{{- range .Values.{rule['list']} }}}}{condition}{{{{- end }}}}")
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text(yaml.safe_dump({"apiVersion": "v2", "name": name, "version": "1.22.1"}))
    (folder / "values.yaml").write_text(yaml.safe_dump(facts["defaults"]))
    (folder / "templates/values.yaml").write_text("\n".join([*lines, "{{ .Values | toJson }}"]))
    return folder


def rendered(name: str, values: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    chart = chart_copy(name, folder / name)
    (folder / "given.yaml").write_text(yaml.safe_dump(values))
    return helm("template", "release", str(chart), "-f", str(folder / "given.yaml"))


def releases(**variables: str) -> dict[str, dict[str, Any]]:
    """The planned Helm releases of the Nebius module by chart, with their values parsed."""
    planned = planned_resources("nebius", **variables)
    found = [values for address, values in planned.items() if address.startswith("helm_release.")]
    return {
        release["chart"]: {**release, "values": yaml.safe_load((release["values"] or ["{}"])[0])} for release in found
    }


def merged(folder: Path, **variables: str) -> dict[str, dict[str, Any]]:
    out = {}
    for name, release in releases(**variables).items():
        done = rendered(name, release["values"], folder)
        assert done.returncode == 0, done.stderr
        out[name] = yaml.safe_load(done.stdout)
    return out


def unknown_keys(given: Any, known: Any, path: str = "") -> list[str]:
    # What upstream leaves empty, a list or a free mapping, has no names to compare.
    if not isinstance(given, dict) or not isinstance(known, dict) or not known:
        return []
    found = [f"{path}{key}" for key in given.keys() - known.keys() if key != "volumeSourceName"]
    return found + [
        k for key in given.keys() & known.keys() for k in unknown_keys(given[key], known[key], f"{path}{key}.")
    ]


def test_every_helm_release_renders_with_its_chart(tmp_path: Path) -> None:
    found = releases()
    assert found.keys() == UPSTREAM["charts"].keys()
    for name, release in found.items():
        assert release["version"] == "1.22.1"
        assert release["repository"] == "oci://registry.example/soperator"
        done = rendered(name, release["values"], tmp_path)
        assert done.returncode == 0, done.stderr
        # Helm takes a misspelt value in silence.
        assert unknown_keys(release["values"], UPSTREAM["charts"][name]["defaults"]) == []
    assert found[CLUSTER]["namespace"] == found[STORAGE]["namespace"]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (CLUSTER, {"volumeSources": [{"name": "jail", "createPVC": True, "size": "1Gi"}]}, "nil pointer"),
        (CLUSTER, {"slurmNodes": {"worker": {"slurmd": {"resources": {"gpu": None}}}}}, "gpu must be provided"),
        (STORAGE, {"volume": {"jailSubMounts": [{"name": "data", "size": "1Gi"}]}}, "filestoreDeviceName must be"),
    ],
)
def test_chart_copy_refuses_what_upstream_refuses(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    done = rendered(name, values, tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


def found_values(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from [value for name, value in node.items() if name == key]
        for value in node.values():
            yield from found_values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from found_values(value, key)


def test_slurm_cluster_refers_only_to_what_exists(tmp_path: Path) -> None:
    values = merged(tmp_path)
    cluster, storage = values[CLUSTER], values[STORAGE]
    assert set(found_values(cluster, "k8sNodeFilterName")) == {node["name"] for node in cluster["k8sNodeFilters"]}
    sources = {source["name"]: source for source in cluster["volumeSources"]}
    assert set(found_values(cluster["slurmNodes"], "volumeSourceName")) <= sources.keys()
    # The storage chart names a claim after its volume; a submount's has a prefix.
    volumes = ["jail", "controller-spool", *[f"jail-submount-{m['name']}" for m in storage["volume"]["jailSubMounts"]]]
    claims = {
        source["persistentVolumeClaim"]["claimName"] for name, source in sources.items() if name != "worker-spool"
    }
    assert claims == {f"{volume}-pvc" for volume in volumes}
    for component in cluster["slurmNodes"].values():
        for volume in [*component.get("volumes", {}).values()]:
            for mount in volume if isinstance(volume, list) else [volume]:
                assert len({"volumeSourceName", "volumeClaimTemplateSpec"} & mount.keys()) == 1, mount


def test_filestores_reach_every_node_under_the_tag_that_is_mounted(tmp_path: Path) -> None:
    values = merged(tmp_path)
    storage, cluster = values[STORAGE], values[CLUSTER]
    devices = {volume["filestoreDeviceName"] for volume in storage["volume"]["jailSubMounts"]}
    devices |= {storage["volume"][name]["filestoreDeviceName"] for name in ("jail", "controllerSpool")}
    groups = [group for name, group in planned_resources("nebius").items() if "_node_group." in name]
    assert len(groups) == 2
    labels = [group["template"]["metadata"]["labels"] for group in groups]
    for group in groups:
        assert {mount["mount_tag"] for mount in group["template"]["filesystems"]} == devices
    for expression in storage["storage"]["jail"]["matchExpressions"]:
        assert all(label[expression["key"]] in expression["values"] for label in labels)
    for terms in found_values(cluster["k8sNodeFilters"], "nodeSelectorTerms"):
        (expression,) = terms[0]["matchExpressions"]
        assert len([label for label in labels if label[expression["key"]] in expression["values"]]) == 1
    taint = planned_resources("nebius")['nebius_mk8s_v1_node_group.workers["0"]']["template"]["taints"][0]["key"]
    tolerations = {
        t["key"] for node in cluster["k8sNodeFilters"] for t in node["tolerations"] if node["name"] == "worker"
    }
    assert tolerations == {taint} == {t["key"] for t in storage["storage"]["jail"]["tolerations"]}


def workers(preset: str) -> str:
    disk = '{type="NETWORK_SSD", size_gibibytes=512, block_size_kibibytes=4}'
    return f'[{{size=2, resource={{platform="gpu-h200-sxm", preset="{preset}"}}, boot_disk={disk}}}]'


@pytest.mark.parametrize(("preset", "gpus"), [("8gpu-128vcpu-1600gb", 8), ("1gpu-16vcpu-200gb", 1)])
def test_worker_pods_fit_their_nodes(preset: str, gpus: int, tmp_path: Path) -> None:
    given = {} if preset in SAMPLE else {"slurm_nodeset_workers": workers(preset)}
    worker = merged(tmp_path, **given)[CLUSTER]["slurmNodes"]["worker"]
    slurmd = worker["slurmd"]["resources"]
    (cpus, memory_gb) = map(int, re.findall(r"(\d+)(?:vcpu|gb)", preset))
    assert slurmd["gpu"] == gpus
    assert worker["munge"]["resources"] == {"cpu": "100m", "memory": "512Mi", "ephemeralStorage": "5Gi"}
    # Nebius takes a CPU, 5% of the memory and 2 GiB, and 15% of the disk and 48 GiB for the node itself.
    assert cpus / 2 < int(slurmd["cpu"]) <= cpus - 1 - 0.1
    assert memory_gb / 2 < int(slurmd["memory"].removesuffix("Gi")) <= memory_gb * 0.95 - 2 - 0.5
    assert 256 < int(slurmd["ephemeralStorage"].removesuffix("Gi")) <= 512 * 0.85 - 48 - 5


def test_scratch_is_a_disk_of_each_worker_alone(tmp_path: Path) -> None:
    nodes = merged(tmp_path)[CLUSTER]["slurmNodes"]
    mounts = {mount["mountPath"]: mount for mount in nodes["worker"]["volumes"]["jailSubMounts"]}
    claim = mounts["/mnt/scratch"]["volumeClaimTemplateSpec"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert claim["resources"]["requests"]["storage"] == "186Gi"
    assert "volumeClaimTemplateSpec" not in mounts["/mnt/checkpoints"]
    assert {mount["mountPath"] for mount in nodes["login"]["volumes"]["jailSubMounts"]} == mounts.keys() - {
        "/mnt/scratch"
    }
    planned = planned_resources("nebius")
    (made,) = [value for name, value in planned.items() if name.startswith("kubernetes_storage_class.")]
    assert made["metadata"][0]["name"] == claim["storageClassName"]
    assert made["parameters"] == {"type": "NETWORK_SSD_NON_REPLICATED", "csi.storage.k8s.io/fstype": "ext4"}
    assert [name for name in planned if name.startswith("nebius_compute_v1_filesystem.") and "scratch" in name] == []


def test_gpu_driver_has_one_installer() -> None:
    planned = planned_resources("nebius")
    slugs = [value["product_slug"] for name, value in planned.items() if "_k8s_release." in name]
    assert sorted(slugs) == ["nebius/nvidia-gpu-operator", "nebius/nvidia-network-operator"]
    assert planned['nebius_mk8s_v1_node_group.workers["0"]']["template"]["gpu_settings"] is None


def addresses(**variables: str) -> set[str]:
    return planned_resources("aks", **variables).keys() - {"outputs"}


def test_aks_lustre_has_one_owner_and_a_driver() -> None:
    driver, file_system = "terraform_data.lustre_driver[0]", "azurerm_managed_lustre_file_system.this[0]"
    roles = {f'azurerm_role_assignment.lustre["{role}"]' for role in UPSTREAM["lustre_driver"]["roles"].values()}
    terraform_owns, claims_own = addresses(), addresses(lustre="null", lustre_from_claims="true")
    assert {driver, file_system} <= terraform_owns
    assert not roles & terraform_owns
    assert {driver, *roles} <= claims_own
    assert file_system not in claims_own
    assert not {driver, file_system, *roles} & addresses(lustre="null")
    scopes = planned_resources("aks", lustre="null", lustre_from_claims="true")
    assert scopes['azurerm_role_assignment.lustre["Reader"]']["scope"].startswith("/subscriptions/00000000-")


def test_aks_storage_command_mounts_the_file_system_of_terraform() -> None:
    outputs = planned_resources("aks")["outputs"]
    words = shlex.split(outputs["storage"])
    assert words[:4] == ["helm", "install", "shared-storage", "charts/shared-storage"]
    assert words[5::2] == [f"amlfs.mgsAddress={outputs['lustre_address']}", "amlfs.storageCapacityTiB=16"]
    flags = [word.replace(outputs["lustre_address"], "10.241.0.4") for word in words[4:]]
    (made,) = [m for m in template("shared-storage", "shared-storage", *flags) if m["kind"] == "StorageClass"]
    assert made["provisioner"] == UPSTREAM["lustre_driver"]["name"]
    assert list(made["parameters"]) == UPSTREAM["lustre_driver"]["parameters"]["existing"]["required"]


def test_lustre_class_has_the_parameters_of_the_driver() -> None:
    flags = ["--set", "amlfs.skuName=AMLFS-Durable-Premium-125", "--set", "amlfs.storageCapacityTiB=16"]
    (made,) = [m for m in template("s", "shared-storage", *flags) if m["kind"] == "StorageClass"]
    names = UPSTREAM["lustre_driver"]["parameters"]["new"]
    # The driver takes the older `zones` too.
    given = {"zone" if name == "zones" else name for name in made["parameters"]}
    assert made["provisioner"] == UPSTREAM["lustre_driver"]["name"]
    assert set(names["required"]) <= given <= {*names["required"], *names["optional"]}
    assert all("," not in value for value in made["parameters"].values())


FAKE_COMMAND = """#!/bin/sh
echo "{name} $@" >> "$LOG"
{then}
"""


def fake_commands(folder: Path, **then: str) -> dict[str, str]:
    for name, body in then.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE_COMMAND.format(name=name, then=body))
        path.chmod(0o755)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "LOG": str(folder / "log"), "TMPDIR": str(folder)}


def test_lustre_driver_is_installed_as_upstream_does(tmp_path: Path) -> None:
    environment = fake_commands(tmp_path, kubectl='[ "$1" != apply ] || [ "$(cat "$KUBECONFIG")" = "s3cret" ]')
    script = str(INFRA / "aks/install-lustre-driver")
    given = environment | {"KUBECONFIG_TEXT": "s3cret"}
    facts = UPSTREAM["lustre_driver"]
    done = subprocess.run([script, facts["version"]], env=given, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log").read_text()
    found = re.findall(r"apply -f https://\S+/azurelustre-csi-driver/v0\.4\.0/deploy/(\S+)\.yaml", log)
    assert found == facts["manifests"]
    assert re.findall(rf"-n {facts['namespace']} rollout status (\S+)", log) == facts["workloads"]
    # The cluster's credentials do not stay.
    assert not list(tmp_path.glob("tmp.*"))
    assert facts["version"] in (INFRA / "aks/variables.tf").read_text()
    refused = subprocess.run([script], env=given, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "hint: install-lustre-driver v0.4.0" in refused.stderr


CYCLECLOUD = UPSTREAM["cyclecloud"]
PYTHON_TYPES = {"string": str, "int": int, "bool": bool, "array": list, "object": dict}


def sample_parameters() -> dict[str, Any]:
    sample = json.loads((INFRA / "cyclecloud/parameters.json.sample").read_text())
    return {name: entry["value"] for name, entry in sample["parameters"].items()}


def type_problems(value: Any, kind: str, path: str) -> list[str]:
    """Where a value is not of upstream's type."""
    kind = kind.removeprefix("optional ")
    if kind in PYTHON_TYPES:
        return [] if type(value) is PYTHON_TYPES[kind] else [f"{path} is no {kind}"]
    members = CYCLECLOUD["types"][kind]
    if all(isinstance(member, dict) for member in members.values()):
        if value.get("type") not in members:
            return [f"{path}.type is none of {sorted(members)}"]
        members = {"type": "string", **members[value["type"]]}
    return field_problems(value, members, path)


def field_problems(value: dict[str, Any], members: dict[str, str], path: str) -> list[str]:
    missing = {name for name, kind in members.items() if not kind.startswith("optional ")} - value.keys()
    problems = [f"{path}.{name} is missing" for name in missing] + [
        f"{path}.{name} is unknown" for name in value.keys() - members.keys()
    ]
    for name in value.keys() & members.keys():
        problems += type_problems(value[name], members[name], f"{path}.{name}")
    return problems


def test_cyclecloud_parameters_exist_upstream_with_their_types() -> None:
    given = sample_parameters()
    # The password is not in a file that is kept.
    assert not set(CYCLECLOUD["secure"]) & given.keys()
    assert field_problems({**given, "adminPassword": "secret"}, CYCLECLOUD["parameters"], "parameters") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"adminSshPublicKey": "ssh-ed25519 A"}, "parameters.adminSshPublicKey is unknown"),
        ({"gpu": {"sku": "a", "osImage": "b", "maxNodes": "4"}}, "parameters.gpu.maxNodes is no int"),
        (
            {"sharedFilesystem": {"type": "anf-new", "anfServiceTier": "x"}},
            "sharedFilesystem.anfServiceLevel is missing",
        ),
        ({"additionalFilesystem": {"type": "lustre"}}, "additionalFilesystem.type is none of"),
    ],
)
def test_cyclecloud_parameters_check_finds_a_wrong_one(change: dict[str, Any], problem: str) -> None:
    problems = field_problems({**sample_parameters(), **change}, CYCLECLOUD["parameters"], "parameters")
    assert problem in "\n".join(problems)


def test_cyclecloud_sample_fits_what_the_seed_asks_for() -> None:
    given = sample_parameters()
    lustre, network = given["additionalFilesystem"], ipaddress.ip_network(given["network"]["addressSpace"])
    assert given["gpu"]["sku"] in {"Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5"}
    assert lustre["type"] == "aml-new"
    assert lustre["lustreCapacityInTib"] % CYCLECLOUD["lustre_step_tib"][lustre["lustreTier"]] == 0
    assert lustre["lustreCapacityInTib"] <= CYCLECLOUD["lustre_largest_tib"][network.prefixlen]
    assert given["slurmSettings"]["version"] in CYCLECLOUD["slurm_versions"]
    assert set(found_values(given, "osImage")) <= set(CYCLECLOUD["images"])


def deploy(folder: Path, *words: str, **given: str) -> subprocess.CompletedProcess[str]:
    shown = 'for word in "$@"; do case $word in @*) cat "${word#@}" >> "$LOG" ;; esac; done'
    environment = fake_commands(folder, az=shown, git='for last; do :; done; mkdir -p "$last"')
    script = str(INFRA / "cyclecloud/deploy")
    return subprocess.run([script, *words], env=environment | given, cwd=folder, capture_output=True, text=True)


def test_cyclecloud_deploy_runs_upstreams_template_at_its_release(tmp_path: Path) -> None:
    sample = str(INFRA / "cyclecloud/parameters.json.sample")
    done = deploy(tmp_path, sample, "--what-if", CCW_ADMIN_PASSWORD='p"w')
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log").read_text()
    assert f"--branch {CYCLECLOUD['version']} https://github.com/Azure/cyclecloud-slurm-workspace.git" in log
    (command,) = re.findall(r"^az (.+)$", log, re.MULTILINE)
    assert command.startswith("deployment sub create --name keepstep-ccw-")
    assert "--location southcentralus --template-file" in command
    assert re.search(r"/workspace/bicep/mainTemplate\.bicep --parameters @\S+ --parameters @\S+ --what-if$", command)
    assert 'p"w' not in command
    assert '{"parameters": {"adminPassword": {"value": "p\\"w"}}}' in log
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        ([], {"CCW_ADMIN_PASSWORD": "x"}, "no parameters file"),
        (["absent.json"], {"CCW_ADMIN_PASSWORD": "x"}, "absent.json cannot be read"),
        (["wrong.json"], {}, "CCW_ADMIN_PASSWORD is empty"),
        (["wrong.json"], {"CCW_ADMIN_PASSWORD": "x"}, "is not a parameters file with a location"),
    ],
)
def test_cyclecloud_deploy_says_what_is_missing(
    words: list[str], given: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    done = deploy(tmp_path, *words, **given)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "log").exists()
