"""What a run in a container saves lies on a volume: its own disk is lost with it, and no other node sees it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep.cli.main import main
from keepstep.launch.environments import all_environments, is_on_volume, missing_parts
from keepstep.train.telemetry.facts import _RECORDED
from tests.launch.manifests import REPOSITORY, template, training_container

RUN = ["train", "name=my-run", "model=mpt-tiny", "data=synthetic", "global_batch=16"]


def rendered(where: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([*RUN, *words, "--on", where, "--dry-run"])
    return code, *capsys.readouterr()


@pytest.fixture
def k8s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.yaml").write_text("gpus_per_node: 1\nmount_path: /data\n")
    return "k8s:./profile.yaml"


@pytest.mark.parametrize("folder", ["steps", "./my-run/steps", "/steps", "/data/../tmp", "/database/steps"])
def test_submit_refuses_checkpoints_outside_the_volume(
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
def test_submit_drops_local_runs_dir_for_pods(
    runs_dir: str, sent: bool, k8s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = rendered(k8s, f"runs_dir={runs_dir}", capsys=capsys)
    assert code == 0, error
    container = training_container([manifest for manifest in yaml.safe_load_all(out) if manifest])
    assert (f"runs_dir={runs_dir}" in container["args"]) is sent
    assert "runs_dir=/data/runs" in container["args"]


def test_pod_refuses_checkpoints_outside_the_volume(
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
def test_submit_slurm_checkpoints_must_be_in_a_mount(
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
def test_launch_sb_warns_of_checkpoints_outside_mounts(mounts: str, folder: str, warned: bool, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("where", ["k8s:aks-h100", "slurm:azure-h100"])
def test_submit_refuses_a_run_without_data(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "model=mpt-tiny", "global_batch=128", "-N", "2", "--on", where, "--dry-run"]
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert not out
    assert "the run names no data set" in error
    assert main([*words, "data=demo"]) == 0


LUSTRE = ["--set", "amlfs.skuName=AMLFS-Durable-Premium-125", "--set", "amlfs.storageCapacityTiB=16"]


def storage_class(*flags: str) -> dict[str, Any]:
    (found,) = [m for m in template("s", "shared-storage", *flags) if m["kind"] == "StorageClass"]
    return found


def test_storage_class_has_the_given_mount_options() -> None:
    assert storage_class(*LUSTRE)["mountOptions"] == ["noatime", "flock"]
    assert storage_class(*LUSTRE, "--set", "storage.mountOptions={localflock}")["mountOptions"] == ["localflock"]
    assert "--block-cache" in storage_class()["mountOptions"]
    assert storage_class("--set", "storage.mountOptions={-o allow_other}")["mountOptions"] == ["-o allow_other"]
    assert "mountOptions" not in storage_class("--set-json", "storage.mountOptions=[]")


def test_lustre_class_has_the_parameters_of_the_driver() -> None:
    created = storage_class(*LUSTRE)
    names = {"sku-name", "zone", "maintenance-day-of-week", "maintenance-time-of-day-utc"}
    assert (created["provisioner"], set(created["parameters"])) == ("azurelustre.csi.azure.com", names)
    existing = storage_class("--set", "amlfs.mgsAddress=10.0.0.4")
    assert existing["parameters"] == {"mgs-ip-address": "10.0.0.4"}
    # The driver would not delete it, and the claim must not suggest that it does.
    assert existing["reclaimPolicy"] == "Retain"


def pods(node: Any) -> list[dict[str, Any]]:
    """The specification of every pod in the manifests."""
    if isinstance(node, list):
        return [pod for value in node for pod in pods(value)]
    if not isinstance(node, dict):
        return []
    return ([node] if "containers" in node else []) + [pod for value in node.values() for pod in pods(value)]


@pytest.mark.parametrize("chart", ["training", "dataset-download", "dataset-preprocessing"])
def test_volume_owner_is_set_by_one_root_container(chart: str) -> None:
    jobs = [pod for pod in pods(template("x", chart, "--set", "storage.setOwner=true")) if "restartPolicy" in pod]
    assert jobs
    for pod in jobs:
        first, *others = [*pod["initContainers"], *pod["containers"]]
        assert [*first["command"], *first["args"]] == ["chown", "1000:1000", "/data"]
        assert first["securityContext"]["runAsUser"] == 0
        assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        assert not any("runAsUser" in container["securityContext"] for container in others)
        assert pod["securityContext"]["runAsUser"] == 1000
    assert "chown" not in str(template("x", chart))


@pytest.mark.parametrize("chart", ["training", "dataset-download", "dataset-preprocessing", "shared-storage"])
def test_pods_do_not_change_the_group_of_every_file(chart: str) -> None:
    contexts = [pod["securityContext"] for pod in pods(template("x", chart))]
    assert contexts
    assert all((c["fsGroup"], c["fsGroupChangePolicy"]) == (1000, "OnRootMismatch") for c in contexts)


@pytest.mark.parametrize(
    ("kind", "flags", "source"),
    [
        ("trainjob", "localDisk.kind=emptyDir", {"emptyDir": {}}),
        ("jobset", "localDisk.kind=emptyDir,localDisk.size=2Ti", {"emptyDir": {"sizeLimit": "2Ti"}}),
        (
            "pytorchjob",
            "localDisk.kind=hostPath,localDisk.hostPath=/mnt/nvme0",
            {"hostPath": {"path": "/mnt/nvme0", "type": "DirectoryOrCreate"}},
        ),
        (
            "trainjob",
            "localDisk.kind=storageClass,localDisk.storageClassName=local-nvme,localDisk.size=2Ti",
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "local-nvme",
                            "resources": {"requests": {"storage": "2Ti"}},
                        }
                    }
                }
            },
        ),
    ],
)
def test_local_disk_holds_the_data_cache(kind: str, flags: str, source: dict[str, Any]) -> None:
    manifests = template("x", "training", "--set", f"jobKind={kind}", "--set", flags)
    assert "data.cache_dir=/mnt/nvme/keepstep-data" in training_container(manifests)["args"]
    mounts = {mount["name"]: mount["mountPath"] for mount in training_container(manifests)["volumeMounts"]}
    assert (mounts["local"], mounts["scratch"]) == ("/mnt/nvme", "/tmp")
    for pod in pods(manifests):
        if "terminationGracePeriodSeconds" in pod:
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "local"]
            assert volume == {"name": "local", **source}
            # Only a folder of the node keeps its owner whatever fsGroup says.
            assert ("initContainers" in pod) is ("hostPath" in source)


def test_local_disk_may_be_the_tmp_of_the_pods() -> None:
    manifests = template("x", "training", "--set", "localDisk.kind=hostPath", "--set", "localDisk.mountPath=/tmp")
    mounts = [m for m in training_container(manifests)["volumeMounts"] if m["mountPath"] == "/tmp"]
    assert mounts == [{"name": "local", "mountPath": "/tmp"}]


EXTRA = [
    "--set-json",
    'extraVolumes=[{"name":"steps","persistentVolumeClaim":{"claimName":"lustre"}},{"name":"a","emptyDir":{}}]',
    "--set-json", 'extraVolumeMounts=[{"name":"steps","mountPath":"/lustre"},{"name":"a","mountPath":"/a"}]',
]  # fmt: skip


@pytest.mark.parametrize("chart", ["training", "dataset-download", "dataset-preprocessing"])
def test_extra_volumes_are_in_every_pod(chart: str) -> None:
    for pod in pods(template("x", chart, *EXTRA)):
        if "restartPolicy" in pod:
            assert {"name": "steps", "persistentVolumeClaim": {"claimName": "lustre"}} in pod["volumes"]
            assert {"name": "steps", "mountPath": "/lustre"} in pod["containers"][0]["volumeMounts"]


def test_profile_passes_further_chart_values(k8s: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("profile.yaml").write_text("gpus_per_node: 1\nvalues: {localDisk: {kind: emptyDir}, training: {nodes: 99}}\n")
    code, out, error = rendered(k8s, "-N", "2", capsys=capsys)
    assert code == 0, error
    arguments = training_container([manifest for manifest in yaml.safe_load_all(out) if manifest])["args"]
    assert "data.cache_dir=/mnt/nvme/keepstep-data" in arguments
    # The profile's own keys and the command line take priority.
    assert arguments[:2] == ["--nodes", "2"]


def test_checkpoints_may_be_on_a_persistent_extra_volume() -> None:
    environment = {
        entry["name"]: entry.get("value") for entry in training_container(template("x", "training", *EXTRA))["env"]
    }
    assert environment["KEEPSTEP_VOLUMES"] == "/data:/lustre"


def test_the_root_of_a_container_may_be_a_volume() -> None:
    assert is_on_volume("anything", ["/"], "/image")


def test_submit_finetune_from_unseen_volume(k8s: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", "--from", "/data/no-such-place/base", "--data", "toolcalls", "--name", "my-run", "--dry-run"]
    assert main([*words, "--on", k8s]) == 0
    container = training_container([manifest for manifest in yaml.safe_load_all(capsys.readouterr().out) if manifest])
    assert "finetune.start_from=/data/no-such-place/base" in container["args"]
    # What the machines share is looked at here, before a job waits for hours.
    assert main([*words, "--on", "slurm:azure-h100"]) == 2
    assert "neither a run's folder nor a Hugging Face model" in capsys.readouterr().err


def test_node_reports_a_missing_topology_file(tmp_path: Path) -> None:
    topology = tmp_path / "topo.xml"
    ((message, _),) = missing_parts({"NCCL_TOPO_FILE": str(topology)})
    assert message.startswith(f"NCCL_TOPO_FILE is {topology}, but there is no such file")
    topology.touch()
    assert not list(missing_parts({"NCCL_TOPO_FILE": str(topology)}))


def test_node_reports_sharp_without_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    sharp = all_environments()["sharp"]
    ((message, hint),) = missing_parts(sharp)
    assert "libnccl-net.so cannot be loaded: NCCL works without SHARP" in message
    assert "nccl-rdma-sharp-plugins" in hint
    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    (tmp_path / "libnccl-net.so").symlink_to(library)
    assert not list(missing_parts(sharp))
    assert not list(missing_parts({**sharp, "NCCL_COLLNET_ENABLE": "0"}))


def test_launch_node_prints_what_the_profile_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("keepstep.cli.jobs.start_processes", lambda *_: 0)
    monkeypatch.setenv("NCCL_TOPO_FILE", str(tmp_path / "topo.xml"))
    assert main(["launch", "node", "--", "doctor", "--probe"]) == 0
    assert f"warning: NCCL_TOPO_FILE is {tmp_path}/topo.xml" in capsys.readouterr().err


def test_runs_record_every_variable_of_the_profiles() -> None:
    names = [name for variables in all_environments().values() for name in variables]
    assert all(_RECORDED.fullmatch(name) for name in names)
    assert not any(map(_RECORDED.fullmatch, ("HF_TOKEN", "NCCL_TOKEN", "UCX_API_KEY", "AWS_SECRET_ACCESS_KEY", "PATH")))
