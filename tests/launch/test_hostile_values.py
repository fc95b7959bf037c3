"""Hostile Helm values arrive in the pod's arguments as they are, or values.schema.json refuses them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch.manifests import CHARTS, Manifest, containers, helm, kubelet_expand, template, training_container

HOSTILE = """a "b" 'c' $(HOME) $$ $(touch x) `id` {{ .Values }} ${HOME} \\ \t\n# next: line\n---\n- é"""
ENVIRONMENT = {"HOME": "expanded", "touch x": "expanded", "JOB_COMPLETION_INDEX": "0"}
COMMAND_LINE_VALUES = {
    "dataset-download": {
        "storage": {"mountPath": f"/{HOSTILE}", "setOwner": True},
        "dataset": {
            "kind": "hub", "name": "a/b", "subset": HOSTILE, "tokenizer": HOSTILE, "eosText": HOSTILE,
            "bosText": HOSTILE, "outputPath": HOSTILE,
        },
    },
    "dataset-preprocessing": {
        "storage": {"mountPath": f"/{HOSTILE}", "setOwner": True},
        "dataset": {
            "inputPath": HOSTILE, "outputPath": HOSTILE, "tokenizer": HOSTILE, "eosText": HOSTILE, "textField": HOSTILE,
        },
    },
    "training": {
        "runName": HOSTILE, "overrides": [f"a={HOSTILE}"],
        "storage": {
            "mountPath": f"/{HOSTILE}", "setOwner": True, "datasetPath": HOSTILE, "checkpointPath": HOSTILE,
            "logsPath": HOSTILE,
        },
    },
}  # fmt: skip
"""Every free text that reaches a command line. The script of the shared-storage chart contains no value."""
NAMES = {
    "dataset-download": {"serviceAccountName", "priorityClassName", "kueue.queueName", "storage.pvcName"},
    "dataset-preprocessing": {"serviceAccountName", "priorityClassName", "kueue.queueName", "storage.pvcName"},
    "shared-storage": {"storage.pvcName", "storage.storageClassName"},
    "training": {
        "serviceAccountName", "priorityClassName", "kueue.queueName", "storage.pvcName", "tensorboard.serviceName",
    },
}  # fmt: skip


def _values(folder: Path, values: dict[str, Any]) -> list[str]:
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    return ["-f", str(file)]


def _words(manifests: list[Manifest]) -> list[str]:
    """What the programs of all containers get as their arguments."""
    words = [word for container in containers(manifests) for word in (*container["command"], *container["args"])]
    return [kubelet_expand(word, ENVIRONMENT) for word in words]


def _leaves(values: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        found += _leaves(value, f"{above}{name}.") if isinstance(value, dict) else [f"{above}{name}"]
    return found


def test_hostile_download_values_arrive_literally(tmp_path: Path) -> None:
    words = _words(template("x", "dataset-download", *_values(tmp_path, COMMAND_LINE_VALUES["dataset-download"])))
    for wanted in (f"/{HOSTILE}", f"/{HOSTILE}/{HOSTILE}/train", f"hf://datasets/a/b/{HOSTILE}/train*"):
        assert wanted in words
    assert [words[place + 1] for place, word in enumerate(words) if word in ("--eos", "--bos")] == [HOSTILE] * 4
    assert words[words.index("download") + 1] == HOSTILE
    assert "0/1" in words


def test_hostile_preprocessing_values_arrive_literally(tmp_path: Path) -> None:
    chart = "dataset-preprocessing"
    words = _words(template("x", chart, *_values(tmp_path, COMMAND_LINE_VALUES[chart])))
    assert {f"/{HOSTILE}/{HOSTILE}", f"/{HOSTILE}/{HOSTILE}/3-concatenate"} <= set(words)
    assert [words[place + 1] for place, word in enumerate(words) if word in ("--eos", "--field")] == [HOSTILE] * 2
    assert words[words.index("download") + 1] == HOSTILE


def test_hostile_training_values_arrive_literally(tmp_path: Path) -> None:
    manifests = template("x", "training", *_values(tmp_path, COMMAND_LINE_VALUES["training"]))
    words = _words(manifests)
    assert {f"a={HOSTILE}", f"name={HOSTILE}", f"/{HOSTILE}/{HOSTILE}", f"data.path=/{HOSTILE}/{HOSTILE}"} <= set(words)
    assert {f"checkpoint.folder=/{HOSTILE}/{HOSTILE}", f"runs_dir=/{HOSTILE}/{HOSTILE}"} <= set(words)
    instead = template("x", "training", *_values(tmp_path, {"instead": ["doctor", HOSTILE]}))
    assert HOSTILE in [kubelet_expand(word, ENVIRONMENT) for word in training_container(instead)["args"]]


@pytest.mark.parametrize("chart", COMMAND_LINE_VALUES)
@pytest.mark.parametrize("wrong", [7, 1.5, False, ["a"], {"a": "b"}], ids=repr)
def test_chart_refuses_other_types_for_text(chart: str, wrong: Any, tmp_path: Path) -> None:
    texts = {
        name for name in _leaves(COMMAND_LINE_VALUES[chart]) if name.endswith(("Path", "Text", "tokenizer", "Name"))
    }
    values: dict[str, Any] = {}
    for name in texts:
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = wrong
    done = helm("template", "x", str(CHARTS / chart), *_values(tmp_path, values))
    assert done.returncode != 0
    # Some versions of Helm write the place as /a/b.
    refused = {place.strip("./").replace("/", ".") for place in re.findall(r"[\w./]+", done.stderr)}
    assert texts <= refused, done.stderr


@pytest.mark.parametrize("chart", NAMES)
@pytest.mark.parametrize("word", ["123", "true", "null", "0"])
def test_name_that_looks_like_another_type_stays_text(chart: str, word: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    for name in NAMES[chart]:
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = word
    # The API server's schemas refuse a number where a name belongs; `template` checks every manifest with them.
    manifests = template(word if word != "null" else "run", chart, *_values(tmp_path, values))
    text = json.dumps(manifests)
    assert text.count(f'"{word}"') >= len(NAMES[chart])
