"""`make bfcl` in two halves: what is packed on one machine is what the other unpacks."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT, blocks

SCRIPT = ROOT / "benchmarks" / "bfcl_pack.py"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    # Only the standard library: -S leaves out site-packages, and -I the environment.
    command = [sys.executable, "-I", "-S", str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def documented(verb: str, volumes: Path) -> list[str | Path]:
    """The words of the page's command, for this folder."""
    lines = [line for block in blocks("docs/evaluation.md", "bash") for line in block.splitlines()]
    (command,) = (line for line in lines if f"bfcl_pack.py {verb}" in line)
    words = command.partition("bfcl_pack.py ")[2].split()
    return [volumes if word == "volumes" else word for word in words if word != "--engine"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Files of three MiB that cannot be compressed, and volumes of one MiB."""
    noise = random.Random(1).randbytes
    files = {
        "bfcl/sft-0.jsonl": noise(400_000),
        "bfcl/sft-0.raw.jsonl": b"not needed any more",
        "bfcl/sft-0.found.json": b"{}",
        "bfcl/sft-0.check.json": b"{}",
        "bfcl/grpo-10.jsonl": noise(300_000),
        "bfcl/grpo-10.check.json": b"{}",
        "bfcl/mixed-0.jsonl": b"of an earlier run",
        "model.gguf": noise(2_400_000),
        "bfcl_eval/data/BFCL_v4_simple_python.json": b"{}" * 1000,
        "bfcl_eval/data/possible_answer/BFCL_v4_simple_python.json": b"{}",
        "bfcl_eval/model_handler/client.py": b"import requests",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def packed(folder: Path) -> Path:
    """The volumes."""
    words = ("--model", folder / "model.gguf", "--data", folder / "bfcl_eval", "--volume-mib", "1")
    done = run(*documented("pack", folder / "volumes"), "--folder", folder / "bfcl", *words)
    assert done.returncode == 0, done.stderr
    return folder / "volumes"


@pytest.mark.slow
def test_unpacked_files_are_the_packed_ones(prepared: Path) -> None:
    volumes = packed(prepared)
    names = sorted(path.name for path in volumes.glob("*.xz"))
    assert len(names) > 2
    assert all(path.stat().st_size <= 2**20 for path in volumes.iterdir())
    # Volumes may come in several folders.
    (prepared / "second").mkdir()
    (volumes / names[1]).rename(prepared / "second" / names[1])
    done = run(*documented("unpack", volumes), prepared / "second", "--folder", prepared / "there")
    assert done.returncode == 0, done.stderr
    assert "--stages before,sft,prompts,grpo" in done.stdout
    sent = contents(prepared / "bfcl") | {"model.gguf": (prepared / "model.gguf").read_bytes()}
    sent |= {f"bfcl_eval/{name}": content for name, content in contents(prepared / "bfcl_eval").items()}
    for name in ("sft-0.raw.jsonl", "mixed-0.jsonl", "bfcl_eval/model_handler/client.py"):
        del sent[name]
    assert contents(prepared / "there") == sent


@pytest.mark.slow
def test_missing_and_damaged_volumes_are_refused(prepared: Path) -> None:
    volumes = packed(prepared)
    last = sorted(volumes.glob("*.xz"))[-1]
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    damaged = run("unpack", volumes, "--folder", prepared / "there")
    assert damaged.returncode == 2
    assert f"{last} is damaged" in damaged.stderr
    last.unlink()
    missing = run("unpack", volumes, "--folder", prepared / "there")
    assert missing.returncode == 2
    assert f"{last.name} is missing" in missing.stderr
    nothing = run("unpack", prepared, "--folder", prepared / "there")
    assert "SHA256SUMS is in none of" in nothing.stderr
    assert not (prepared / "there").exists()


def test_rows_without_a_check_are_not_packed(prepared: Path) -> None:
    (prepared / "bfcl" / "sft-0.check.json").unlink()
    words = ("--folder", prepared / "bfcl", "--out", prepared / "volumes", "--model", prepared / "model.gguf")
    done = run("pack", *words, "--data", prepared / "bfcl_eval")
    assert done.returncode == 2
    assert "sft-0.jsonl has no report" in done.stderr


def test_documented_options_of_the_benchmark_exist() -> None:
    page = "".join(blocks("docs/evaluation.md", "bash"))
    options = re.findall(r"--[a-z-]+", "".join(line for line in page.splitlines() if "bfcl_pack" not in line))
    source = (ROOT / "benchmarks" / "bfcl.py").read_text()
    assert "--stages" in options
    assert [option for option in options if f'"{option}"' not in source] == []


def test_packed_questions_are_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question and every simulated API of bfcl-eval, from the packed files alone."""
    package = pytest.importorskip("tests.evaluate.bfcl.official").ROOT
    from keepstep.evaluate.bfcl.benchmark import CATEGORIES, open_benchmark

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bfcl_pack

    for name, path in bfcl_pack.question_entries(package):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(path)
    ours, theirs = open_benchmark(tmp_path), open_benchmark(package)
    assert ours.questions(CATEGORIES) == theirs.questions(CATEGORIES)
    assert ours.system_prompt([]) == theirs.system_prompt([])
    code = tmp_path / "bfcl_eval" / "eval_checker" / "multi_turn_eval" / "func_source_code"
    assert all((code / f"{name}.py").exists() for name in ours.modules.values())
