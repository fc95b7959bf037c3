"""Each chart, each job kind and each documented `helm install` line renders, lints and passes the real schemas."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import keepstep
from keepstep.config.layout import accumulation_steps, resolve_layout
from keepstep.config.load import load_config
from keepstep.config.presets import ALIASES, PRESETS
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError
from keepstep.launch.foundry import translate
from tests.launch.documents import commands
from tests.launch.manifests import CHARTS, containers, helm, kubelet_expand, template, training_container

KINDS = ("trainjob", "pytorchjob", "jobset", "volcano", "leaderworkerset")
INSTALLS = [words for words in commands("helm") if words[1] == "install"]
TRAININGS = [words for words in INSTALLS if words[3] == "charts/training"]


LUSTRE = ["amlfs.skuName=AMLFS-Durable-Premium-125", "amlfs.storageCapacityTiB=16"]


def name_of(words: list[str]) -> str:
    return " ".join(words[2:])[:80]


def chart_of(words: list[str]) -> str:
    return Path(words[3]).name


def test_documents_contain_every_known_helm_line() -> None:
    assert len(TRAININGS) >= 6
    assert {chart_of(words) for words in INSTALLS} == {path.name for path in CHARTS.iterdir()}
    # Every value name those systems' users have in their scripts.
    known = {
        "storage.pvcName", "amlfs.skuName", "amlfs.storageCapacityTiB", "pvc.name", "storage.mountOptions",
        "dataset.outputPath", "dataset.inputPath", "dataset.splits", "dataset.fullDataset", "dataset.sampleFiles",
        "dataset.targetFiles", "image.tag", "model.config", "model.size", "model.custom.numLayers",
        "model.custom.hiddenSize", "model.custom.numAttentionHeads", "model.custom.seqLength",
        "model.custom.tensorModelParallelSize", "model.custom.pipelineModelParallelSize", "training.nodes",
        "training.gpusPerNode", "training.iterations", "training.globalBatchSize", "training.saveInterval",
        "training.evalInterval", "training.useSharp", "storage.datasetPath", "storage.checkpointPath",
        "storage.logsPath", r"yamlUpdates.train_loader\.dataset\.split", "yamlUpdates.save_folder",
    }  # fmt: skip
    used = {word.partition("=")[0] for words in INSTALLS for word in words if "=" in word}
    assert known <= used


@pytest.mark.parametrize("words", INSTALLS, ids=name_of)
@pytest.mark.slow
def test_documented_install_renders_lints_and_validates(words: list[str]) -> None:
    chart, flags = chart_of(words), words[4:]
    linted = helm("lint", "--strict", str(CHARTS / chart), *flags)
    assert linted.returncode == 0, linted.stdout
    for kind in KINDS if chart == "training" else ("",):
        chosen = ["--set", f"jobKind={kind}"] if kind else []
        # Volcano has queues of its own.
        queued = [flag.replace("kueue.", "volcano.") if kind == "volcano" else flag for flag in flags]
        manifests = template(words[2], chart, *queued, *chosen)
        assert manifests
        for container in containers(manifests):
            assert not container["securityContext"]["privileged"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("words", TRAININGS, ids=name_of)
def test_documented_install_trains_a_valid_configuration(words: list[str], tmp_path: Path) -> None:
    manifests = template(words[2], "training", *words[4:])
    container = training_container(manifests)
    arguments = [kubelet_expand(word, {}) for word in container["args"]]
    split = arguments.index("--")
    updates = [arguments[i + 1] for i, word in enumerate(arguments[:split]) if word == "--foundry-update"]
    overrides = [*arguments[split + 3 :], *translate(updates)]
    file = tmp_path / "run.yaml"
    file.write_text(next(manifest["data"]["run.yaml"] for manifest in manifests if manifest["kind"] == "ConfigMap"))
    config = load_config(file, overrides).config
    processes = int(arguments[1]) * int(arguments[3])
    assert accumulation_steps(
        config.global_batch, config.microbatch, resolve_layout(config.parallel, processes).data_ranks
    )
    assert config.name == words[2]
    if any("mpt-30b" in word for word in words):
        assert (config.model.preset, str(config.checkpoint.interval), config.checkpoint.keep) == (
            "mpt-30b",
            "1000ba",
            10,
        )
        assert config.checkpoint.folder == "/data/checkpoints"
        assert config.data.path == "/data/my-copy-c4/train"
    if "model.size=175b" in words:
        assert (config.parallel.tensor, config.parallel.pipeline) == (8, 16)
    if "model.size=375m" in words:
        assert (config.model.hidden, str(config.max_duration), config.global_batch) == (512, "100ba", 32)
        assert config.data.path == "/data/slimpajama/preprocessed"


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_reaches_the_pod(kind: str) -> None:
    queues = "volcano" if kind == "volcano" else "kueue"
    manifests = template(
        "run", "training", "--set", f"jobKind={kind}",
        "--set", "training.nodes=3", "--set", "training.minNodes=2", "--set", "training.gpusPerNode=4",
        "--set", "resources.rdmaResource=rdma/shared_ib", "--set", "resources.rdmaCount=1",
        "--set", "resources.shmSize=8Gi",
        "--set", f"{queues}.queueName=team", "--set", f"{queues}.requiredTopology=example.com/block",
        "--set", "schedulerName=packer",
        "--set", "terminationGracePeriodSeconds=900", "--set", "training.useSharp=1",
        "--set", "metrics.scrape=true", "--set", "metrics.tokenSecret=metrics", "--set", "metrics.podMonitor=true",
        "--set-json", 'secrets=[{"name":"HF_TOKEN","secretName":"hub","secretKey":"token"}]',
    )  # fmt: skip
    container = training_container(manifests)
    limits = container["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "4", "rdma/shared_ib": "1"}
    assert container["args"][:4] == ["--nodes", "2:3", "--processes", "4"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["NCCL_COLLNET_ENABLE"]["value"] == "1"
    # The launcher ends what does not stop, and Kubernetes kills everything at the end of the grace.
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"] == "840"
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert environment["KEEPSTEP_METRICS_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "metrics", "key": "token"}
    assert "observe.metrics_port=9464" in container["args"]
    text = yaml.safe_dump_all(manifests)
    pods = 2 if kind == "pytorchjob" else 1
    if kind == "volcano":
        (job,) = [manifest["spec"] for manifest in manifests if manifest["apiVersion"] == "batch.volcano.sh/v1alpha1"]
        assert (job["queue"], job["schedulerName"]) == ("team", "volcano")
        assert job["networkTopology"] == {"mode": "hard", "highestTierName": "example.com/block"}
    else:
        assert "kueue.x-k8s.io/queue-name: team" in text
        # On the template of every pod of the job, where Kueue reads it; not on TensorBoard's, another workload.
        assert text.count("kueue.x-k8s.io/podset-required-topology: example.com/block") == pods
    assert text.count("schedulerName: packer") == pods
    assert "terminationGracePeriodSeconds: 900" in text
    assert "sizeLimit: 8Gi" in text
    kinds = [manifest["kind"] for manifest in manifests]
    assert "Deployment" in kinds
    assert "Service" in kinds
    assert "prometheus.io/scrape: 'true'" in text


@pytest.mark.parametrize(("grace_s", "limit_s"), [(3600, 3540), (120, 108), (30, 27)])
def test_chart_save_may_take_the_grace_period(grace_s: int, limit_s: int) -> None:
    container = training_container(template("run", "training", "--set", f"terminationGracePeriodSeconds={grace_s}"))
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(limit_s)


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_chart_does_not_retry_permanent_failures(kind: str) -> None:
    for manifest in template("run", "training", "--set", f"jobKind={kind}"):
        match manifest["kind"]:
            case "TrainingRuntime":
                spec = manifest["spec"]["template"]["spec"]
            case "JobSet":
                spec = manifest["spec"]
            case _:
                continue
        (job,) = spec["replicatedJobs"]
        ends = [rule for rule in job["template"]["spec"]["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
        assert [rule["onExitCodes"]["values"] for rule in ends] == [[2, 4]]
        # By itself JobSet makes a Job that has failed anew, whatever it failed of.
        (rule,) = spec["failurePolicy"]["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        return
    pytest.fail("nothing that runs jobs")


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize("survive", [True, False])
def test_chart_replaces_only_a_lost_pod_of_survivors(kind: str, survive: bool) -> None:
    flags = ["--set", f"jobKind={kind}", "--set", f"training.survive={str(survive).lower()}"]
    text = yaml.safe_dump_all(template("run", "training", *flags, "--set", "training.backoffLimit=5"))
    # One pod that fails again and again must not use up what all of them have in common.
    assert ("backoffLimitPerIndex: 5" in text) is survive
    assert ("backoffLimit: 5" in text) is not survive
    # Else pods that were given up would let the job fail after the run is done.
    assert ("succeededIndexes: '0'" in text) is survive


def job_spec(kind: str, *flags: str) -> dict[str, Any]:
    values = [word for flag in (f"jobKind={kind}", *flags) for word in ("--set", flag)]
    named = {"volcano": "Job", "leaderworkerset": "LeaderWorkerSet"}[kind]
    (spec,) = [manifest["spec"] for manifest in template("run", "training", *values) if manifest["kind"] == named]
    return dict(spec)


def test_volcano_restarts_by_exit_code() -> None:
    spec = job_spec("volcano", "training.nodes=3", "training.backoffLimit=2")
    (task,) = spec["tasks"]
    # A gang: none of the pods starts before there is room for all.
    assert (spec["minAvailable"], task["minAvailable"], task["replicas"]) == (3, 3, 3)
    # Volcano fails the job as soon as it has counted maxRetry restarts.
    assert spec["maxRetry"] == 3
    actions = {policy["exitCode"]: policy["action"] for policy in task["policies"]}
    assert {code for code, action in actions.items() if action == "TerminateJob"} == {2, 4}
    assert {code for code, action in actions.items() if action == "RestartJob"} == {1, 3, 5, 6, 137}
    # Volcano counts what any policy restarts, so 75 must have none: the launcher continues by itself.
    assert 75 not in actions
    assert not any("event" in policy or "events" in policy for policy in task["policies"])
    container = training_container([{"spec": spec}])
    assert "--again" in container["args"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["MASTER_ADDR"] == "run-node-0.run"
    assert spec["plugins"] == {"env": [], "svc": ["--publish-not-ready-addresses"]}
    assert task["template"]["spec"]["restartPolicy"] == "Never"


def test_volcano_replaces_one_pod_of_survivors() -> None:
    spec = job_spec("volcano", "training.nodes=3", "training.survive=true")
    (task,) = spec["tasks"]
    # All of them start together.
    assert (spec["minAvailable"], task["minAvailable"], task["replicas"]) == (3, 3, 3)
    assert {p["action"] for p in task["policies"] if p["exitCode"] not in (2, 4)} == {"RestartPod"}


def test_volcano_replaces_one_pod_of_an_elastic_run() -> None:
    spec = job_spec("volcano", "training.nodes=3", "training.minNodes=2")
    (task,) = spec["tasks"]
    assert (spec["minAvailable"], task["minAvailable"], task["replicas"]) == (2, 2, 3)
    assert {p["action"] for p in task["policies"] if p["exitCode"] not in (2, 4)} == {"RestartPod"}


def test_leaderworkerset_is_one_group_whose_pods_stay() -> None:
    spec = job_spec("leaderworkerset", "training.nodes=3", "training.backoffLimit=2")
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (1, 3, "None")
    assert group["workerTemplate"]["spec"]["restartPolicy"] == "Always"
    container = training_container([{"spec": spec}])
    assert container["args"][container["args"].index("--hold") + 1] == "2"
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["MASTER_ADDR"] == "run-0.run"


@pytest.mark.parametrize(
    ("chart", "flags", "message"),
    [
        ("training", ["jobKind=volcano", "kueue.queueName=team"], "set volcano.queueName"),
        (
            "training",
            ["jobKind=volcano", "volcano.requiredTopology=a", "volcano.preferredTopology=b"],
            "volcano.requiredTopology and volcano.preferredTopology exclude each other",
        ),
        ("training", ["training.gpuPerNode=8"], "Additional property gpuPerNode is not allowed"),
        ("training", ["training.nodes=two"], "training.nodes: Invalid type. Expected: integer, given: string"),
        ("training", ["model.size=176b"], "model.size must be one of"),
        ("training", ["model.size=custom"], "model.custom.numLayers: Invalid type"),
        ("training", ["jobKind=mpijob"], "jobKind must be one of"),
        ("training", ["kueue.requiredTopology=a b"], "kueue.requiredTopology: Does not match pattern"),
        ("training", ["kueue.requiredTopology=a", "kueue.preferredTopology=b"], "exclude each other"),
        ("training", ["training.useSharp=2"], "training.useSharp must be one of"),
        ("training", ["environment.variables.HF_TOKEN=abc"], "HF_TOKEN"),
        ("training", ["metrics.scrape=true"], "metrics.tokenSecret: String length must be greater than or equal to 1"),
        ("training", ["model.config=mpt-7b", "model.size=375m"], "model: Must not validate the schema (not)"),
        (
            "training",
            ["model.config=mpt-99b"],
            "model.config is mpt-99b, which is neither a preset nor a recipe; known",
        ),
        ("training", ["model.config=llama-8b"], "the run names no data set: set storage.datasetPath"),
        ("training", ["config=model: mpt-125m"], "the run names no data set: set storage.datasetPath"),
        (
            "shared-storage",
            ["amlfs.skuName=AMLFS-Durable-Premium-125", "amlfs.storageCapacityTiB=20"],
            "multiple of 16",
        ),
        (
            "shared-storage",
            [*LUSTRE, "storage.mountOptions={-o allow_other}"],
            "storage.mountOptions has -o allow_other, an option of blobfuse, but amlfs selects Lustre",
        ),
        ("shared-storage", [*LUSTRE, "amlfs.mgsAddress=10.0.0.4"], "set only one of them"),
        ("shared-storage", [*LUSTRE, "amlfs.zones={1,2}"], "Array must have at most 1 items"),
        ("training", ["localDisk.kind=storageClass"], "localDisk.storageClassName: String length must be greater"),
        ("training", ["extraVolumes[0].name=shared"], "extraVolumes.0.name: Must not validate the schema (not)"),
        ("dataset-download", ["dataset.rate=50MB"], "dataset.rate limits the download of slimpajama; c4 is read while"),
        ("dataset-preprocessing", ["jobKind=job"], "set tasks=1, or install one stage after the other"),
        ("shared-storage", ["storage.skuName=Standard_LSR"], "storage.skuName must be one of"),
        ("dataset-download", ["dataset.kind=hub"], "dataset.name: String length must be greater than or equal to 1"),
        ("dataset-download", ["dataset.outputpath=x"], "Additional property outputpath is not allowed"),
        ("dataset-preprocessing", ["stages={extract,tokenize}"], "stages.1 must be one of"),
    ],
)
def test_chart_schema_refuses_wrong_values(chart: str, flags: list[str], message: str) -> None:
    done = helm("template", "x", str(CHARTS / chart), *(word for flag in flags for word in ("--set", flag)))
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("chart", sorted(path.name for path in CHARTS.iterdir()))
def test_chart_schema_and_values_have_the_same_keys(chart: str) -> None:
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())

    def compare(properties: dict[str, object], node: dict[str, object], where: str) -> None:
        assert set(properties) == set(node), where
        for name, below in properties.items():
            assert isinstance(below, dict)
            if "properties" in below:
                compare(below["properties"], node[name], f"{where}.{name}")  # type: ignore[arg-type]

    compare(schema["properties"], values, chart)


def test_data_chart_runs_chosen_stages_in_order() -> None:
    jobs = template("x", "dataset-preprocessing")[0]["spec"]["replicatedJobs"]
    assert [(job["name"], job.get("dependsOn")) for job in jobs] == [
        ("extract", None),
        ("concatenate", [{"name": "extract", "status": "Complete"}]),
        ("preprocess", [{"name": "concatenate", "status": "Complete"}]),
    ]
    only = template("x", "dataset-preprocessing", "--set", "stages={concatenate}")[0]["spec"]["replicatedJobs"]
    assert [job["name"] for job in only] == ["concatenate"]


def test_data_chart_without_jobset_runs_stages_in_one_pod() -> None:
    (job,) = template("x", "dataset-preprocessing", "--set", "jobKind=job,tasks=1")
    assert (job["kind"], job["spec"]["completions"]) == ("Job", 1)
    pod = job["spec"]["template"]["spec"]
    # Init containers run one after the other, the container after them.
    order = [container["name"] for container in (*pod["initContainers"], *pod["containers"])]
    assert order == ["extract", "concatenate", "tokenizer", "preprocess"]
    (job,) = template("dataset-extract", "dataset-preprocessing", "--set", "jobKind=job,stages={extract},tasks=8")
    assert (job["metadata"]["name"], job["spec"]["completions"]) == ("dataset-extract-extract", 8)


@pytest.mark.parametrize(
    ("chart", "kind", "needed"),
    [
        ("dataset-preprocessing", "jobset", "jobset.x-k8s.io/v1alpha2"),
        ("training", "trainjob", "trainer.kubeflow.org/v1alpha1/TrainJob"),
        ("training", "pytorchjob", "kubeflow.org/v1/PyTorchJob"),
        ("training", "jobset", "jobset.x-k8s.io/v1alpha2/JobSet"),
    ],
)
def test_chart_says_which_operator_the_cluster_lacks(chart: str, kind: str, needed: str) -> None:
    # A group that every API server has, and `helm template` without a cluster does not know.
    cluster = ["--set", f"jobKind={kind}", "--api-versions", "apiregistration.k8s.io/v1"]
    done = helm("template", "x", str(CHARTS / chart), *cluster)
    assert done.returncode != 0
    assert "this cluster has no" in done.stderr
    assert template("x", chart, *cluster, "--api-versions", needed)


HOSTILE = """a "b" 'c' $(touch /tmp/x) $$ `id` {{ .Values }} \\ \n# next: line"""


@pytest.mark.parametrize("kind", KINDS)
def test_chart_passes_hostile_values_as_one_argument(kind: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {
                "jobKind": kind,
                "runName": HOSTILE,
                "config": f"name: {json.dumps(HOSTILE)}\n",
                "overrides": [f"data.path={HOSTILE}"],
                "yamlUpdates": {"save_folder": HOSTILE},
                "storage": {"datasetPath": HOSTILE},
                "environment": {"variables": {"NOTE": HOSTILE}},
            }
        )
    )
    manifests = template("run", "training", "-f", str(values))
    container = training_container(manifests)
    arguments = [kubelet_expand(word, {"touch /tmp/x": "expanded"}) for word in container["args"]]
    for wanted in (f"name={HOSTILE}", f"data.path={HOSTILE}", f"save_folder={HOSTILE}", f"data.path=/data/{HOSTILE}"):
        assert wanted in arguments
    environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert kubelet_expand(environment["NOTE"], {}) == HOSTILE
    config = next(manifest for manifest in manifests if manifest["kind"] == "ConfigMap")
    assert yaml.safe_load(config["data"]["run.yaml"])["name"] == HOSTILE


def test_chart_environments_equal_the_packages() -> None:
    package = Path(__file__).parents[2] / "src/keepstep/launch/environments.yaml"
    assert (CHARTS / "training/environments.yaml").read_bytes() == package.read_bytes()


def test_chart_contains_recipes_and_uses_them() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    ours = {path.name: path.read_text() for path in recipes.glob("*.yaml")}
    assert {path.name: path.read_text() for path in (CHARTS / "training/recipes").glob("*.yaml")} == ours
    manifests = template("x", "training", "--set", "model.config=mpt-30b")
    config = next(manifest for manifest in manifests if manifest["kind"] == "ConfigMap")
    assert config["data"]["run.yaml"] == ours["mpt-30b.yaml"]


def trained(folder: Path, *flags: str) -> RunConfig:
    """The configuration that the pods of the training chart load."""
    manifests = template("run", "training", *flags)
    arguments = [kubelet_expand(word, {}) for word in training_container(manifests)["args"]]
    file = folder / "run.yaml"
    file.write_text(next(manifest["data"]["run.yaml"] for manifest in manifests if manifest["kind"] == "ConfigMap"))
    return load_config(file, arguments[arguments.index("--") + 3 :]).config


def default_values(chart: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())
    return values


def test_chart_refusal_lists_every_known_model() -> None:
    done = helm("template", "x", str(CHARTS / "training"), "--set", "model.config=mpt-99b")
    known = done.stderr.partition("; known are ")[2].split("\n")[0].split(", ")
    recipes = {path.stem for path in (CHARTS / "training/recipes").glob("*.yaml")}
    assert set(known) == {*PRESETS, *ALIASES, *recipes}


# The number of tokens of the public tokenizers that the charts use by default.
VOCABULARIES = {"openai-community/gpt2": 50257, "EleutherAI/gpt-neox-20b": 50277}


@pytest.mark.parametrize("size", ["175b", "375m"])
def test_gpt_chart_trains_on_what_preprocessing_wrote(size: str, tmp_path: Path) -> None:
    dataset = default_values("dataset-preprocessing")["dataset"]
    config = trained(tmp_path, "--set", f"model.size={size}", "--set", "training.useSharp=1")
    assert config.data.path == f"/data/{dataset['outputPath']}"
    assert VOCABULARIES[dataset["tokenizer"]] <= config.model.vocab


@pytest.mark.parametrize("flags", [[], ["--set", "model.config=mpt-30b"], ["--set", "model.config=mpt-tiny"]])
def test_mpt_chart_trains_on_what_download_wrote(flags: list[str], tmp_path: Path) -> None:
    dataset = default_values("dataset-download")["dataset"]
    config = trained(tmp_path, *flags)
    assert [config.data.path, config.data.valid_path] == [
        f"/data/{dataset['outputPath']}/{split}" for split in dataset["splits"]
    ]
    assert VOCABULARIES[dataset["tokenizer"]] <= config.model.vocab


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        (["model.size=125m", "overrides={data=demo}"], "demo"),
        (["model.config=llama-8b", "overrides={variables.data=/data/mine}"], "/data/mine"),
        (["model.config=mpt-7b", "storage.datasetPath=mine"], "/data/mine"),
        (["model.config=toolcalls-demo"], "toolcalls"),
        (["model.size=125m", "config=data: {path: /data/mine}"], "/data/mine"),
        (["config=data: demo"], "demo"),
    ],
)
def test_chart_keeps_the_named_data_set(flags: list[str], path: str, tmp_path: Path) -> None:
    assert trained(tmp_path, *(word for flag in flags for word in ("--set", flag))).data.path == path


def test_unsound_overrides_would_be_noticed() -> None:
    with pytest.raises(ConfigError):
        load_config(None, ["model.layerz=3"])


DATA_INSTALLS = [words for words in INSTALLS if chart_of(words).startswith("dataset-")]


@pytest.mark.parametrize("words", DATA_INSTALLS, ids=name_of)
def test_data_chart_runs_known_commands(words: list[str]) -> None:
    from keepstep.cli.data import data

    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    ours = [
        c for c in containers(template(words[2], chart_of(words), *words[4:])) if c["command"] == ["keepstep", "data"]
    ]
    assert ours
    for container in ours:
        parsed = parser.parse_args([kubelet_expand(word, {"JOB_COMPLETION_INDEX": "0"}) for word in container["args"]])
        assert parsed.task.startswith("0/")
        assert str(parsed.out).startswith("/data/")


def test_data_chart_limits_the_download_rate() -> None:
    flags = ["--set", "dataset.fullDataset=true", "--set", "dataset.rate=50MB"]
    (container,) = containers(template("data", "dataset-download", *flags))
    arguments = container["args"]
    assert arguments[arguments.index("--rate") + 1] == "50MB"
    assert "--rate" not in containers(template("data", "dataset-download", *flags[:2]))[0]["args"]


def notes(release: str, chart: str, folder: Path, *flags: str) -> str:
    """What helm prints after an install, rendered as a value by a copy of the chart: `helm template` leaves it out."""
    copy = folder / chart
    shutil.copytree(CHARTS / chart, copy)
    shutil.copy(copy / "templates/NOTES.txt", copy)
    (copy / "templates/notes.yaml").write_text('{{ dict "notes" (tpl (.Files.Get "NOTES.txt") .) | toYaml }}\n')
    done = helm("template", release, str(copy), "--show-only", "templates/notes.yaml", *flags)
    assert done.returncode == 0, done.stderr
    text: str = yaml.safe_load(done.stdout)["notes"]
    return text


def test_data_chart_notes_name_the_folder_of_each_stage(tmp_path: Path) -> None:
    from keepstep.data.prepare.stage_files import folder_name

    flags = ["--set", "dataset.fullDataset=false", "--set", "dataset.outputPath=slimpajama"]
    text = notes("data", "dataset-download", tmp_path, *flags)
    assert f"/data/slimpajama/{folder_name('download')}/*.zst" in text
    (following,) = [line.split()[1:] for line in text.splitlines() if line.startswith("Next")]
    assert template(following[2], chart_of(following), *following[4:])


def data_sources(*flags: str) -> list[str]:
    """What the pods of the download chart are told to read."""
    ours = [c for c in containers(template("data", "dataset-download", *flags)) if c["command"] == ["keepstep", "data"]]
    return [container["args"][1] for container in ours]


@pytest.mark.parametrize(
    ("flags", "sources"),
    [
        ("dataset.name=allenai/c4", ["c4:train", "c4:val"]),
        ("dataset.name=allenai/c4,dataset.kind=hub,dataset.splits={val_small}", ["c4:val_small"]),
        ("dataset.subset=realnewslike", ["c4:realnewslike/train", "c4:realnewslike/val"]),
        ("dataset.name=owner/set,dataset.subset=,dataset.splits={train}", ["hf://datasets/owner/set/train*"]),
        ("dataset.name=owner/set,dataset.subset=data,dataset.splits={train}", ["hf://datasets/owner/set/data/train*"]),
        ("dataset.name=cerebras/SlimPajama-627B,dataset.fullDataset=false", ["slimpajama"]),
        ("dataset.name=owner/copy,dataset.fullDataset=true", ["hf://datasets/owner/copy/*train*"]),
    ],
)
def test_data_chart_reads_the_named_data_set(flags: str, sources: list[str]) -> None:
    assert data_sources("--set", flags) == sources


@pytest.mark.parametrize("subset", ["", "en", "en.noblocklist", "en.noclean", "realnewslike"])
def test_data_chart_c4_splits_are_known(subset: str) -> None:
    from keepstep.data.prepare.stages import C4_SPLITS, c4_split

    splits = ",".join(C4_SPLITS)
    for source, split in zip(
        data_sources("--set", f"dataset.subset={subset},dataset.splits={{{splits}}}"), C4_SPLITS, strict=True
    ):
        files, samples = c4_split(source.removeprefix("c4:"))
        assert files.startswith(f"hf://datasets/allenai/c4/{subset or 'en'}/c4-")
        assert samples == C4_SPLITS[split][1]


@pytest.mark.parametrize(("faulty", "code"), [(False, 0), (True, 1)])
@pytest.mark.slow
def test_volume_check_fails_for_wrong_bytes(faulty: bool, code: int, tmp_path: Path) -> None:
    (container,) = containers([m for m in template("s", "shared-storage") if m["kind"] == "Pod"])
    volume, programs = tmp_path / "volume", tmp_path / "bin"
    volume.mkdir()
    programs.mkdir()
    # A volume that spoils what is written: dd to it ends well, and the file is another.
    spoil = f"case $2 in of={volume}/*) printf x >> ${{2#of=}} ;; esac" if faulty else ""
    (programs / "dd").write_text(f'#!/bin/sh\n{shutil.which("dd")} "$@" || exit\n{spoil}\n')
    (programs / "dd").chmod(0o755)
    script = kubelet_expand(container["args"][0], {}).replace("/data", str(volume))
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOSTNAME": "pod", "TMPDIR": str(tmp_path)}
    done = subprocess.run([*container["command"], script], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("other bytes than were written" in done.stderr) is faulty
    assert not list(volume.iterdir())


def test_volume_check_explains_a_volume_of_root(tmp_path: Path) -> None:
    (container,) = containers([m for m in template("s", "shared-storage") if m["kind"] == "Pod"])
    (tmp_path / "touch").write_text("#!/bin/sh\necho 'touch: Permission denied' >&2\nexit 1\n")
    (tmp_path / "touch").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTNAME": "pod"}
    done = subprocess.run(
        [*container["command"], container["args"][0]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "cannot write to the volume" in done.stderr
    assert "storage.setOwner=true" in done.stderr


@pytest.mark.parametrize("chart", sorted(path.name for path in CHARTS.iterdir()))
def test_chart_defaults_use_only_our_image(chart: str) -> None:
    done = helm("template", "x", str(CHARTS / chart))
    images = {container["image"] for container in containers(list(yaml.safe_load_all(done.stdout)))}
    assert images == {f"keepstep:{keepstep.__version__}"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_pods_of_several_nodes_share_a_random_secret(kind: str) -> None:
    def secrets_of(nodes: int) -> list[str]:
        manifests = template("run", "training", "--set", f"jobKind={kind}", "--set", f"training.nodes={nodes}")
        found = [manifest for manifest in manifests if manifest["kind"] == "Secret"]
        entries = [entry for entry in training_container(manifests)["env"] if "RENDEZVOUS" in entry["name"]]
        wanted = {"name": "run-rendezvous", "key": "secret"}
        assert [entry["valueFrom"]["secretKeyRef"] for entry in entries] == [wanted] * len(found)
        assert [manifest["metadata"]["name"] for manifest in found] == ["run-rendezvous"] * len(found)
        return [manifest["data"]["secret"] for manifest in found]

    assert secrets_of(1) == []
    first, second = secrets_of(2), secrets_of(2)
    assert [len(secret) for secret in first] == [64]
    assert first != second
