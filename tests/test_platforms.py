"""docs/platforms.md: what needs no Linux works where Python has none of Linux's system calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.tiny_runs import TINY, committed_steps

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "before_rename"
# What Python offers on Linux only, as far as keepstep uses it.
LINUX_ONLY = ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fadvise", "O_DIRECT", "pidfd_open")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def keepstep(tmp_path: Path) -> Run:
    """A function that runs `keepstep WORDS` in a Python without these calls."""
    shutil.copytree(FIXTURE, tmp_path / "work")
    site = tmp_path / "site"
    site.mkdir()
    lines = [f"if hasattr(os, {name!r}): del os.{name}" for name in LINUX_ONLY]
    (site / "sitecustomize.py").write_text("\n".join(["import os", *lines, ""]))
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'src'}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keepstep", *words]
        return subprocess.run(command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["new", "mine"],
        ["models"],
        ["config", "check", "run.yaml"],
        ["plan", "model=llama-8b", "microbatch=1", "--cluster", "h100:8"],
        ["data", "build", "text.jsonl", "--out", "out", "--tokenizer", "text/tokenizer.json", "--workers", "2"],
        ["data", "inspect", "mds"],
        ["runs", "runs"],
        ["report", "runs/base", "-o", "report.html"],
        ["ckpt", "verify", "runs/base"],
        ["export", "runs/base", "--hf", "hf"],
        ["train", "run.yaml", "name=job", "global_batch=8", "--on", "slurm:azure-h100", "--dry-run"],
    ],
    ids=" ".join,
)
def test_what_needs_no_linux_works_without_its_system_calls(keepstep: Run, words: list[str]) -> None:
    done = keepstep(*words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_training_without_linux_is_one_error(keepstep: Run) -> None:
    done = keepstep("train", "run.yaml")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["error: training processes need Linux", " hint: see docs/platforms.md: a container or WSL is enough"],
    )


@pytest.mark.slow
def test_training_needs_no_package_that_a_bare_gpu_machine_lacks(tmp_path: Path) -> None:
    """Saves, resumes and verifies with PyTorch and what transformers brings, and nothing else."""
    lacking = ("fastokens", "matplotlib", "orjson", "pyarrow", "tensorboard", "xxhash", "zstandard")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({lacking!r}))\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "keepstep", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for steps in (2, 4):
        run("train", *TINY, f"runs_dir={tmp_path}", f"max_duration={steps}ba")
    assert committed_steps(tmp_path) == [2, 4]
    assert "every byte is as it was written" in run("ckpt", "verify", str(tmp_path / "run"))
    assert '"crc32"' in (tmp_path / "run/checkpoints/step_00000004/_SUCCESS").read_text()
