"""Every `keepstep` and `sbatch` command in our documents is one that works."""

from __future__ import annotations

import argparse
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from keepstep.cli.data import data
from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.resilience import agent
from keepstep.resilience.workers import Task
from tests.launch.documents import commands
from tests.launch.manifests import REPOSITORY

SBATCH = commands("sbatch")


@pytest.mark.parametrize("words", commands("keepstep"), ids=lambda words: " ".join(words)[:70])
@pytest.mark.slow
def test_keepstep_commands_of_the_documents_run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip()


# Slurm's own programs, as far as a batch script asks them; `srun` writes down what it was to run.
_SLURM = {
    "srun": r"""{ printf '%s\0' "$@"; printf '\0'; } >>"$ASKED" """,
    "scontrol": 'case "$1" in show) echo node1; echo node2 ;; *) echo "JobId=7 Command=$SCRIPT WorkDir=/" ;; esac',
    "squeue": "echo COMPLETING",
}


def srun_words(script: Path, flags: list[str], folder: Path) -> list[list[str]]:
    """Run a batch script as Slurm would on its first node; every command that it hands to srun, as words."""
    programs, asked = folder / "bin", folder / "asked"
    programs.mkdir()
    asked.touch()
    for name, text in _SLURM.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(asked), "SCRIPT": str(script),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "node[1-2]",
    }  # fmt: skip
    done = subprocess.run(["bash", str(script), *flags], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [command.split("\0") for command in asked.read_text().removesuffix("\0\0").split("\0\0")]


@pytest.mark.parametrize("words", SBATCH, ids=lambda words: " ".join(words)[:70])
def test_sbatch_lines_start_a_run_that_is_sound(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = next(word for word in words if word.startswith("slurm/"))
    flags = words[words.index(script) + 1 :]
    commands = srun_words(REPOSITORY / script, flags, tmp_path)
    if script == "slurm/prepare_c4.sb":
        assert [command[command.index("keepstep") :][:4] for command in commands[1:]] == [
            ["keepstep", "data", "build", f"c4:{split}"] for split in ("train", "val")
        ]
        parser = argparse.ArgumentParser()
        data.add_arguments(parser)
        for command in commands[1:]:
            assert parser.parse_args(command[command.index("data") + 1 :]).task == "0/1"
        return
    (command,) = commands
    options = dict(pairwise(flags))
    assert f"--container-image={options['-i']}" in command
    assert any(word.startswith(f"--container-mounts={options['-m']},") for word in command)
    started: list[tuple[list[str], int]] = []

    def note(task: Task, processes: int, *_: object) -> int:
        started.append((list(task.arguments), processes))
        return 0

    monkeypatch.setattr(agent, "run_processes", note)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPSTEP_HEAD", "node1")
    monkeypatch.setenv("KEEPSTEP_PORT", "20007")
    monkeypatch.setenv("KEEPSTEP_RENDEZVOUS_SECRET", "made by the batch shell for srun")
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert main(command[command.index("launch") :]) == 0
    (((verb, name, file, *overrides), processes),) = started
    assert (verb, name, processes) == ("train", "name=job-7", 8)
    config = load_config(Path(file), [name, *overrides]).config
    assert config.model.preset == options["-c"]
    assert config.data.path == options["-d"]
    assert (str(config.checkpoint.interval), config.checkpoint.keep) == (f"{options['-I']}ba", int(options["-N"]))
    assert config.checkpoint.folder == f"{options['-F']}/job-7"
    for pair in options.get("-y", "").split():
        assert str(getattr(config, pair.partition("=")[0])) == pair.partition("=")[2]


def test_documents_contain_every_slurm_line() -> None:
    flags = {word for words in SBATCH for word in words if word.startswith("-")}
    assert {"-c", "-i", "-d", "-s", "-I", "-N", "-F", "-S", "-m", "-y", "--reservation=paul"} <= flags


@pytest.mark.parametrize(("kind", "block", "prefetch"), [("data", 16, 16), ("checkpoints", 32, 80)])
def test_blobfuse_profiles_hold_the_measured_settings(kind: str, block: int, prefetch: int) -> None:
    settings = yaml.safe_load((REPOSITORY / f"infra/blobfuse/{kind}.yaml").read_text())
    cache = settings["block_cache"]
    assert (cache["block-size-mb"], cache["prefetch"], cache["mem-size-mb"], cache["parallelism"]) == (
        block,
        prefetch,
        65536,
        128,
    )
    assert settings["attr_cache"]["timeout-sec"] == 7200
    assert settings["azstorage"]["mode"] == "msi"


def test_the_file_cache_profile_keeps_files_on_local_disk() -> None:
    settings = yaml.safe_load((REPOSITORY / "infra/blobfuse/filecache.yaml").read_text())
    assert settings["components"] == ["libfuse", "file_cache", "attr_cache", "azstorage"]
    assert settings["file_cache"] == {"path": "/mnt/nvme/blobfuse-cache"}
