"""Every `keepstep` and `sbatch` command in our documents is one that works."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from documents import commands
from manifests import REPOSITORY

from keepstep.cli.main import main
from keepstep.config.load import load_config

SBATCH = commands("sbatch")


@pytest.mark.parametrize("words", commands("keepstep"), ids=lambda words: " ".join(words)[:70])
def test_keepstep_commands_of_the_documents_run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("words", SBATCH, ids=lambda words: " ".join(words)[:70])
def test_sbatch_lines_name_scripts_and_flags_that_exist(words: list[str]) -> None:
    script = next(word for word in words if word.startswith("slurm/"))
    text = (REPOSITORY / script).read_text()
    after = words[words.index(script) + 1 :]
    if script == "slurm/launch.sb":
        taken = text.split("getopts '")[1].split("'")[0]
        flags = [word for word in after if word.startswith("-")]
        assert {"-c", "-i", "-d", "-m"} <= set(flags)
        assert all(flag[1] in taken for flag in flags)
        config = after[after.index("-c") + 1]
        assert load_config(REPOSITORY / "recipes" / f"{config}.yaml").config.model.preset == config
    else:
        assert 2 <= len(after) <= 3


def test_the_seeds_slurm_lines_are_all_there() -> None:
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
