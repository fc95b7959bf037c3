"""Each chart, each job kind and each documented `helm install` line renders, lints and passes the real schemas."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from documents import commands
from manifests import CHARTS, containers, helm, kubelet_expand, template, training_container

from keepstep.config.check import accumulation_steps
from keepstep.config.layout import resolve_layout
from keepstep.config.load import load_config
from keepstep.core.errors import ConfigError
from keepstep.launch.foundry import translate

KINDS = ("trainjob", "pytorchjob", "jobset")
INSTALLS = [words for words in commands("helm") if words[1] == "install"]
TRAININGS = [words for words in INSTALLS if words[3] == "charts/training"]


def name_of(words: list[str]) -> str:
    return " ".join(words[2:])[:80]


def chart_of(words: list[str]) -> str:
    return Path(words[3]).name


def test_the_documents_hold_every_helm_line_of_the_systems_people_come_from() -> None:
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
def test_documented_install_renders_lints_and_validates(words: list[str]) -> None:
    chart, flags = chart_of(words), words[4:]
    linted = helm("lint", "--strict", str(CHARTS / chart), *flags)
    assert linted.returncode == 0, linted.stdout
    for kind in KINDS if chart == "training" else ("",):
        chosen = ["--set", f"jobKind={kind}"] if kind else []
        manifests = template(words[2], chart, *flags, *chosen)
        assert manifests
        for container in containers(manifests):
            assert not container["securityContext"]["privileged"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("words", TRAININGS, ids=name_of)
def test_what_a_documented_install_trains_is_a_sound_configuration(words: list[str], tmp_path: Path) -> None:
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
    manifests = template(
        "run", "training", "--set", f"jobKind={kind}",
        "--set", "training.nodes=3", "--set", "training.minNodes=2", "--set", "training.gpusPerNode=4",
        "--set", "resources.rdmaResource=rdma/shared_ib", "--set", "resources.rdmaCount=1",
        "--set", "resources.shmSize=8Gi",
        "--set", "kueue.queueName=team", "--set", "terminationGracePeriodSeconds=900", "--set", "training.useSharp=1",
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
    assert "kueue.x-k8s.io/queue-name: team" in text
    assert "terminationGracePeriodSeconds: 900" in text
    assert "sizeLimit: 8Gi" in text
    kinds = [manifest["kind"] for manifest in manifests]
    assert "Deployment" in kinds
    assert "Service" in kinds
    assert "prometheus.io/scrape: 'true'" in text


@pytest.mark.parametrize(("grace_s", "limit_s"), [(3600, 3540), (120, 108), (30, 27)])
def test_a_save_may_take_almost_all_of_the_grace_period(grace_s: int, limit_s: int) -> None:
    container = training_container(template("run", "training", "--set", f"terminationGracePeriodSeconds={grace_s}"))
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(limit_s)


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_what_trying_again_cannot_help_is_not_tried_again(kind: str) -> None:
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


@pytest.mark.parametrize(
    ("chart", "flags", "message"),
    [
        ("training", ["training.gpuPerNode=8"], "Additional property gpuPerNode is not allowed"),
        ("training", ["training.nodes=two"], "training.nodes: Invalid type. Expected: integer, given: string"),
        ("training", ["model.size=176b"], "model.size must be one of"),
        ("training", ["model.size=custom"], "model.custom.numLayers: Invalid type"),
        ("training", ["jobKind=mpijob"], "jobKind must be one of"),
        ("training", ["training.useSharp=2"], "training.useSharp must be one of"),
        ("training", ["environment.variables.HF_TOKEN=abc"], "HF_TOKEN"),
        ("training", ["metrics.scrape=true"], "metrics.tokenSecret: String length must be greater than or equal to 1"),
        ("training", ["model.config=mpt-7b", "model.size=375m"], "model: Must not validate the schema (not)"),
        (
            "shared-storage",
            ["amlfs.skuName=AMLFS-Durable-Premium-125", "amlfs.storageCapacityTiB=20"],
            "multiple of 16",
        ),
        ("shared-storage", ["storage.skuName=Standard_LSR"], "storage.skuName must be one of"),
        ("dataset-download", ["dataset.kind=hub"], "dataset.name: String length must be greater than or equal to 1"),
        ("dataset-download", ["dataset.outputpath=x"], "Additional property outputpath is not allowed"),
        ("dataset-preprocessing", ["stages={extract,tokenize}"], "stages.1 must be one of"),
    ],
)
def test_an_unknown_or_mistyped_value_fails_with_the_schemas_message(
    chart: str, flags: list[str], message: str
) -> None:
    done = helm("template", "x", str(CHARTS / chart), *(word for flag in flags for word in ("--set", flag)))
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("chart", sorted(path.name for path in CHARTS.iterdir()))
def test_every_property_of_a_schema_stands_in_the_values_and_the_reverse(chart: str) -> None:
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())

    def compare(properties: dict[str, object], node: dict[str, object], where: str) -> None:
        assert set(properties) == set(node), where
        for name, below in properties.items():
            assert isinstance(below, dict)
            if "properties" in below:
                compare(below["properties"], node[name], f"{where}.{name}")  # type: ignore[arg-type]

    compare(schema["properties"], values, chart)


def test_stages_follow_one_another_and_only_those_wanted_run() -> None:
    jobs = template("x", "dataset-preprocessing")[0]["spec"]["replicatedJobs"]
    assert [(job["name"], job.get("dependsOn")) for job in jobs] == [
        ("extract", None),
        ("concatenate", [{"name": "extract", "status": "Complete"}]),
        ("preprocess", [{"name": "concatenate", "status": "Complete"}]),
    ]
    only = template("x", "dataset-preprocessing", "--set", "stages={concatenate}")[0]["spec"]["replicatedJobs"]
    assert [job["name"] for job in only] == ["concatenate"]


HOSTILE = """a "b" 'c' $(touch /tmp/x) $$ `id` {{ .Values }} \\ \n# next: line"""


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_values_arrive_as_they_are_and_as_one_argument(kind: str, tmp_path: Path) -> None:
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


def test_environment_profiles_are_the_same_in_the_chart_and_in_the_package() -> None:
    package = Path(__file__).parents[2] / "src/keepstep/launch/environments.yaml"
    assert (CHARTS / "training/environments.yaml").read_bytes() == package.read_bytes()


def test_the_chart_carries_the_recipes_and_a_preset_with_a_recipe_uses_it() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    ours = {path.name: path.read_text() for path in recipes.glob("*.yaml")}
    assert {path.name: path.read_text() for path in (CHARTS / "training/recipes").glob("*.yaml")} == ours
    manifests = template("x", "training", "--set", "model.config=mpt-30b")
    config = next(manifest for manifest in manifests if manifest["kind"] == "ConfigMap")
    assert config["data"]["run.yaml"] == ours["mpt-30b.yaml"]


def test_unsound_overrides_would_be_noticed() -> None:
    with pytest.raises(ConfigError):
        load_config(None, ["model.layerz=3"])


DATA_INSTALLS = [words for words in INSTALLS if chart_of(words).startswith("dataset-")]


@pytest.mark.parametrize("words", DATA_INSTALLS, ids=name_of)
def test_what_a_data_chart_runs_is_a_command_of_ours(words: list[str]) -> None:
    from keepstep.cli import data

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
def test_a_data_set_given_by_name_is_the_one_that_is_read(flags: str, sources: list[str]) -> None:
    assert data_sources("--set", flags) == sources


@pytest.mark.parametrize("subset", ["", "en", "en.noblocklist", "en.noclean", "realnewslike"])
def test_the_product_knows_every_split_that_the_chart_asks_of_c4(subset: str) -> None:
    from keepstep.data.stages import C4_SPLITS, c4_split

    splits = ",".join(C4_SPLITS)
    for source, split in zip(
        data_sources("--set", f"dataset.subset={subset},dataset.splits={{{splits}}}"), C4_SPLITS, strict=True
    ):
        files, samples = c4_split(source.removeprefix("c4:"))
        assert files.startswith(f"hf://datasets/allenai/c4/{subset or 'en'}/c4-")
        assert samples == C4_SPLITS[split][1]


@pytest.mark.parametrize(("faulty", "code"), [(False, 0), (True, 1)])
def test_the_volume_check_fails_where_the_volume_gives_back_other_bytes(
    faulty: bool, code: int, tmp_path: Path
) -> None:
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
