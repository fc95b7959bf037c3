"""Completion in a real bash, a real zsh and a real fish: a Tab at a terminal, and what the shell makes of it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.cli.main import VERBS, main
from keepstep.config.load import load_config
from tests.doc_blocks import ROOT, commands
from tests.patience import PATIENCE_S

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}


def script(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    assert main(["completion", shell]) == 0
    path = tmp_path / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


class Terminal:
    """An interactive shell at a pseudo terminal."""

    def __init__(self, shell: str, folder: Path) -> None:
        parent, child = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "HOME": str(folder), "PS1": "$ ", "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            START[shell], stdin=child, stdout=child, stderr=child, cwd=folder, env=environment, start_new_session=True
        )
        os.close(child)
        self.handle = parent
        self.seen = ""

    def type(self, text: str, until: str) -> str:
        """Type, and read until the text appears; what was read."""
        self.seen = ""
        os.write(self.handle, text.encode())
        deadline = time.monotonic() + PATIENCE_S
        while until not in self.seen and time.monotonic() < deadline:
            if select.select([self.handle], [], [], 1)[0]:
                self.seen += os.read(self.handle, 65536).decode(errors="replace")
        assert until in self.seen, self.seen
        return self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.handle)


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(START))
def test_tab_completes_at_a_terminal(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (scripts/system-packages installs it)")
    path = script(shell, capsys, tmp_path)
    (tmp_path / "runs/my-first-run").mkdir(parents=True)
    (tmp_path / "some.yaml").touch()
    terminal = Terminal(shell, tmp_path)
    try:
        prepare = "autoload -Uz compinit && compinit -u; zstyle ':completion:*' insert-tab false; "
        prepare = prepare if shell == "zsh" else ""
        # Stands for the program and prints its words: what the Tab made of the line.
        echo = "keepstep() { printf '<%s>' \"$@\"; echo; }"
        terminal.type(f"{prepare}. {path}; {echo}; echo rea''dy\n", "ready")
        for typed, expected in (
            ("fine\t", "<finetune>"),
            ("train --proc\t2", "<train><--procs><2>"),
            ("plan model=smol\tx", "<plan><model=smollm-135m><x>"),
            ("train optimizer.weight\t0", "<train><optimizer.weight_decay=0>"),
            ("plan --cluster azure-nd-h200\t4", "<plan><--cluster><azure-nd-h200-v5:4>"),
            ("ckpt resc\t", "<ckpt><rescue>"),
            ("watch my-f\t", "<watch><my-first-run>"),
            ("train some\t", "<train><some.yaml>"),
        ):
            terminal.type(f"keepstep {typed}\n", expected)
    finally:
        terminal.close()


def test_fish_knows_verbs_keys_and_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed (apt: fish)")
    path = script("fish", capsys, tmp_path)
    lines = "; ".join(f"complete -C 'keepstep {words}'" for words in ("fine", "train --proc", "plan model=smol"))
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = ["fish", "--no-config", "-c", f"source {path}; {lines}"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert [line.split("\t")[0] for line in answer.stdout.splitlines()] == ["finetune", "--procs", "model=smollm-135m"]


def test_a_tab_starts_no_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fast by design: the script holds the words, so that it does not wait for an interpreter."""
    path = script("bash", capsys, tmp_path)
    command = f". {path}; PATH={tmp_path}; COMP_LINE='keepstep tr'; COMP_POINT=11; _keepstep; echo ${{COMPREPLY[@]}}"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert answer.stdout == "train\n", answer.stderr


def test_an_unknown_shell_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zhs"]) == 2
    assert "did you mean zsh?" in capsys.readouterr().err


def test_man_page_in_the_repository_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "man"]) == 0
    page = capsys.readouterr().out
    assert page == (ROOT / "docs/keepstep.1").read_text(), "keepstep completion man > docs/keepstep.1"
    assert all(f"\n.SS {verb}\n" in page for verb in VERBS)


@pytest.mark.parametrize("command", commands("docs/shell.md"))
def test_shell_page_commands_run(command: str, tmp_path: Path) -> None:
    program = tmp_path / "keepstep"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m keepstep "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    answer = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_new_takes_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "some/path"]) == 0
    assert load_config(Path("some/path/run.yaml")).config.name == "path"
    assert main(["new", "some/not safe"]) == 2
    assert not Path("some/not safe").exists()


def test_train_takes_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "data=demo", "model=mpt-125m", "--name", "other", "--on", "slurm:azure-h100", "--dry-run"]
    assert main(command) == 0
    assert "--job-name=other" in capsys.readouterr().out
