"""Pipes that close, paths that cannot be written, standard streams that are missing, other encodings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli.main import main

COMMAND = [sys.executable, "-m", "keepstep"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("words", "code"),
    # A run continues without its output, so its verb reports no failure.
    [(["models"], 1), (["--help"], 1), (["--version"], 1), (["train", "--help"], 0), (["config", "schema"], 1)],
)
def test_main_is_quiet_when_the_pipe_closes(words: list[str], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *words], stdout=writing, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_main_reports_a_full_disk_in_two_lines() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "models"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("error: the output cannot be written: No space left")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_main_replaces_closed_standard_streams(closed: int, tmp_path: Path) -> None:
    script = (
        "import os, sys; from keepstep.cli.main import main; code = main(['models'])\n"
        f"with open({str(tmp_path / 'own')!r}, 'w') as file: assert file.fileno() > 2, file.fileno()\n"
        "print('said', file=sys.stderr); sys.exit(code)"
    )
    shell = f'exec "$0" -c "$1" {closed}{"<" if closed == 0 else ">"}&-'
    done = subprocess.run(["sh", "-c", shell, sys.executable, script], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own").read_text() == ""


def test_main_names_an_unwritable_path_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    assert main(["new", "taken"]) == 1
    assert "error: taken: File exists\n hint: there is a file where a folder" in capsys.readouterr().err
    assert main(["runs", "dashboards", str(tmp_path / "taken" / "inside")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    # A worker, which nobody watches, prints the whole traceback.
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(FileExistsError):
        main(["new", "taken"])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_main_replaces_characters_that_the_terminal_lacks(encoding: str, tmp_path: Path) -> None:
    # A file name in another encoding than the system's, as in old archives.
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    Path(folder).mkdir()
    (Path(folder) / "raw.txt").write_text("some text\n")
    words = ["data", "train-tokenizer", folder, "--out", f"{folder}/tokenizer.json", "--vocab", "257"]
    ended = subprocess.run(
        [sys.executable, "-m", "keepstep", *words],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"caf?/tokenizer.json" in ended.stdout


def test_main_reads_utf8_in_any_locale(tmp_path: Path) -> None:
    # Python switches to UTF-8 in this locale by itself; PYTHONUTF8=0 makes it stand for the locales where it does not.
    environment = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    folder = tmp_path / "Gespräche"
    folder.mkdir()
    (folder / "größe.txt").write_text("Größe – 你好\n", encoding="utf-8")
    words = ["data", "train-tokenizer", str(folder), "--out", f"{folder}/tokenizer.json", "--vocab", "257"]
    made = subprocess.run([*COMMAND, *words], env=environment, capture_output=True)
    assert (made.returncode, made.stderr) == (0, b"")
    assert f"{folder}/tokenizer.json".encode() in made.stdout
    row = '{"messages": [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "你好"}]}\n'
    (folder / "reihen.jsonl").write_text(row, encoding="utf-8")
    words = ["data", "show", f"{folder}/reihen.jsonl", "--tokenizer", f"{folder}/tokenizer.json"]
    shown = subprocess.run([*COMMAND, *words], env=environment, capture_output=True)
    assert shown.returncode == 0, shown.stderr.decode()
    assert "你好" in shown.stdout.decode()
