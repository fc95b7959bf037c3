"""The command line as a user meets it: pipes that close, places that cannot be written, streams that are not there."""

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
    # A run goes on whatever becomes of its output, so for its verb nothing has gone wrong.
    [(["models"], 1), (["--help"], 1), (["--version"], 1), (["train", "--help"], 0), (["config", "schema"], 1)],
)
def test_a_pipe_that_nobody_reads_is_no_reason_to_complain(words: list[str], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *words], stdout=writing, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "models"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("error: what was to be written: No space left")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_was_closed_before_is_no_file_of_ours(closed: int, tmp_path: Path) -> None:
    script = (
        "import os, sys; from keepstep.cli.main import main; code = main(['models'])\n"
        f"with open({str(tmp_path / 'own')!r}, 'w') as file: assert file.fileno() > 2, file.fileno()\n"
        "print('said', file=sys.stderr); sys.exit(code)"
    )
    shell = f'exec "$0" -c "$1" {closed}{"<" if closed == 0 else ">"}&-'
    done = subprocess.run(["sh", "-c", shell, sys.executable, script], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own").read_text() == ""


def test_a_place_that_cannot_be_written_is_named_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    assert main(["new", "taken"]) == 1
    assert "error: taken: File exists\n hint: a file lies where a folder" in capsys.readouterr().err
    assert main(["runs", "dashboards", str(tmp_path / "taken" / "inside")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    # What happens to one of many processes, which nobody watches, is told in full.
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(FileExistsError):
        main(["new", "taken"])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_knows_less_than_unicode_costs_characters_and_nothing_else(
    encoding: str, tmp_path: Path
) -> None:
    # A name in another encoding than the system's, as old archives hold them.
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


def test_a_locale_that_is_not_utf8_changes_neither_names_nor_texts(tmp_path: Path) -> None:
    # Python would help itself out of this locale; PYTHONUTF8=0 makes it stand for those that it leaves alone.
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
