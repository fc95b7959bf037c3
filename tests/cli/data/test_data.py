"""Every command of docs/data.md, run as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from keepstep.cli.main import main
from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.data.formats.mds_writer import TokenShardWriter, write_index
from keepstep.data.formats.megatron import MegatronWriter, token_dtype
from keepstep.data.open_dataset import open_data
from keepstep.data.prepare.dedup import signature
from keepstep.data.tokenization import load

DOCS = Path(__file__).parents[3] / "docs"


def commands(page: str) -> list[str]:
    """`keepstep …` lines of the page's shell blocks that need nothing but this machine."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.startswith("keepstep")]


@pytest.mark.slow
def test_every_local_command_of_the_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    for number in (0, 1):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::2]]
        (tmp_path / "raw" / f"{number}.jsonl").write_text("".join(lines))
    far = ("hf://", "c4:", "slimpajama")
    found = [line for line in commands("data.md") if not any(word in line for word in far)]
    assert len(found) >= 8
    for line in found:
        words = shlex.split(line, comments=True)[1:]
        if words[0] != "data":
            continue
        assert main(words) == 0, line
        assert "next: " in capsys.readouterr().out, line


def test_inspect_counts_and_decodes(
    tmp_path: Path, tokenizer: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts[:20], texts[0], texts[1]]))
    out = str(tmp_path / "out")
    assert main(["data", "build", str(path), "--out", out, "--tokenizer", str(tokenizer), "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", out, "--json", "--plot", str(tmp_path / "lengths.png")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 22
    assert facts["duplicates"] == 2
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    assert main(["data", "inspect", out, "--show", "3"]) == 0
    assert texts[3] in capsys.readouterr().out


def test_inspect_shows_what_was_asked_for_and_nothing_in_its_place(
    tmp_path: Path, corpus: Path, tokenizer: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["data", "build", str(corpus), "--out", out, "--tokenizer", str(tokenizer), "--workers", "1"]) == 0
    capsys.readouterr()
    for number in (str(len(texts)), "-1"):
        assert main(["data", "inspect", out, f"--show={number}"]) == 2
        assert f"has {len(texts)} documents" in capsys.readouterr().err
    assert main(["data", "inspect", out, "--json", "--show", "7", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)["samples"]
    assert shown == [{"document": 7, "text": texts[7]}, {"document": 2, "text": texts[2]}]
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert main(["data", "inspect", out, "--show", "7"]) == 2
    assert "name one with --tokenizer" in capsys.readouterr().err


def test_inspect_takes_raw_text_with_a_tokenizer(
    tmp_path: Path, corpus: Path, tokenizer: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "inspect", str(corpus), "--cache", str(tmp_path), "--json"]
    assert main(words) == 2
    assert "--tokenizer PATH" in capsys.readouterr().err
    assert main([*words, "--tokenizer", str(tokenizer)]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(texts)


@pytest.mark.parametrize("token", [-100_000, -1, 1 << 60])
@pytest.mark.parametrize("decoded", [True, False])
def test_inspect_names_numbers_that_are_no_tokens(
    token: int, decoded: bool, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MegatronWriter(tmp_path / "x", np.dtype("<i8")) as writer:
        writer.add(np.array([1, 2, token], dtype=np.int64))
    assert main(["data", "inspect", str(tmp_path / "x"), *(["--tokenizer", str(tokenizer)] if decoded else [])]) == 4
    assert f"holds token {token}" in capsys.readouterr().err


def test_inspect_decodes_a_column_of_any_name(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = TokenShardWriter(tmp_path / "set", "shard", np.dtype(np.int32), column="input_ids")
    writer.add(np.array(load(tokenizer).encode("def hello").ids))
    writer.flush()
    write_index(tmp_path / "set", writer.entries)
    words = ["data", "inspect", str(tmp_path / "set"), "--column", "input_ids", "--tokenizer", str(tokenizer)]
    assert main(words) == 0
    assert "def hello" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["build", "train-tokenizer", "dedup", "chat", "pipeline", "merge"])
def test_a_place_that_cannot_be_written_is_one_clear_line(
    action: str, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "a file").touch()
    source = tmp_path / "in.jsonl"
    if action == "merge":
        source = tmp_path / "pairs"
        with MegatronWriter(source / "a", token_dtype(100)) as writer:
            writer.add(np.arange(9))
    words = ["data", action, str(source), "--out", str(tmp_path / "a file" / "out")]
    assert main([*words, *(["--tokenizer", str(tokenizer)] if action in ("build", "pipeline") else [])]) == 4
    said = capsys.readouterr().err
    assert "a file" in said
    assert "check the path, its permissions and the space on its disk" in said


@pytest.mark.parametrize("action", ["train-tokenizer", "dedup"])
def test_a_field_that_no_record_has_is_an_error_and_not_an_empty_result(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"content": "some text"}\n')
    words = ["data", action, str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]
    assert main(words) == 4
    said = capsys.readouterr().err
    assert "1 missing field" in said
    assert "--field" in said
    assert not (tmp_path / "out").exists()
    assert main([*words, "--field", "content"]) == 0


def test_a_build_that_came_to_nothing_says_that_its_folder_can_go(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"content": "some text"}\n')
    out = tmp_path / "out"
    words = ["data", "build", str(tmp_path / "in.jsonl"), "--out", str(out), "--tokenizer", str(tokenizer)]
    right = [*words, "--field", "content"]
    assert main(words) == 4
    assert main(right) == 4
    assert (
        f"none of its tasks is done: if no process works on it, rm -r {out} and start again" in capsys.readouterr().err
    )
    shutil.rmtree(out)
    assert main(right) == 0
    assert main(words) == 4
    assert "rm -r" not in capsys.readouterr().err


def test_a_flag_given_twice_counts_twice(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "word " * count}) + "\n" for count in (2, 20, 200)))
    words = ["data", "build", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert main([*words, "--filter", "min_chars=50", "--filter", "max_chars=500", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == {"min_chars": 1, "max_chars": 1}
    made = tmp_path / "tokenizer.json"
    words = ["data", "train-tokenizer", str(tmp_path / "in.jsonl"), "--out", str(made), "--vocab", "300"]
    for given, special in (([], ["<|endoftext|>"]), (["--special", "<a>", "--special", "<b>"], ["<a>", "<b>"])):
        assert main([*words, *given]) == 0
        assert [item["content"] for item in json.loads(made.read_text())["added_tokens"]] == special


def test_dedup_drops_exact_and_near_duplicates_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"word{number}" for number in range(300)]
    near = [*words[:150], "changed", *words[151:]]
    other = [f"other{number}" for number in range(300)]
    rows = [" ".join(words), " ".join(words).upper() + "  ", " ".join(near), " ".join(other)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    assert main(["data", "dedup", str(path), "--out", str(tmp_path / "out.jsonl"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["exact_duplicates"], report["near_duplicates"], report["kept"]) == (1, 1, 2)
    kept = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert kept == [rows[0], rows[3]]
    assert json.loads((tmp_path / "out.jsonl.report.json").read_text()) == report


def test_the_report_of_dedup_is_no_input(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    assert main(["data", "dedup", str(corpus), "--out", str(tmp_path / "clean" / "unique.jsonl"), "--near", "1"]) == 0
    assert (tmp_path / "clean" / "unique.jsonl.report.json").is_file()
    words = ["--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--workers", "1"]
    assert main(["data", "build", str(tmp_path / "clean"), *words, "--max-reject-share", "0"]) == 0


def test_signatures_estimate_how_much_two_texts_share() -> None:
    first = [f"w{number}" for number in range(1000)]
    second = [*first[:500], *(f"v{number}" for number in range(500))]
    equal = signature(" ".join(first)) == signature(" ".join(second))
    assert equal.mean() == pytest.approx(1 / 3, abs=0.12)


_BUILD = ["build", "none.jsonl", "--out", "x", "--tokenizer", __file__]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "none.jsonl", "--out", "x", "--tokenizer", "none.json"], "--tokenizer none.json is missing"),
        (["verify", "none"], "none holds no build"),
        (["merge", "none", "--out", "x"], "none holds no .bin/.idx pairs"),
        (["inspect", "none"], "no data is there"),
        (["dedup", "none.jsonl", "--out", "x"], "none.jsonl matches no input file"),
        ([*_BUILD, "--limit", "2", "--task-per-file"], "--limit and --task-per-file exclude each other"),
        ([*_BUILD, "--workers", "-2"], "--workers is -2"),
    ],
)
def test_mistakes_are_one_clear_line_and_leave_no_file(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) != 0
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["x", "3/3", "-1/2", "1"])
def test_a_share_that_means_nothing_is_refused(
    text: str, tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "build", str(corpus), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert main([*words, f"--task={text}"]) == 2
    assert "I/N" in capsys.readouterr().err


def test_build_of_nothing_is_an_error(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    words = ["data", "build", str(path), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert main([*words, "--workers", "1"]) == 4
    assert "would hold no document" in capsys.readouterr().err


def test_build_names_supported_types_and_remedies(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.docx").touch()
    rest = ["--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--workers", "1"]
    assert main(["data", "build", str(tmp_path / "a.docx"), *rest]) == 4
    assert "convert it to one of .jsonl" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n{"txt": "words"}\n')
    assert main(["data", "build", str(tmp_path / "a.jsonl"), *rest, "--max-reject-share", "1"]) == 0
    assert "missing field: name the right field with --field" in capsys.readouterr().out


def test_verify_with_mend_does_not_advise_itself(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["data", "build", str(corpus), "--out", str(out), "--tokenizer", str(tokenizer), "--workers", "1"]) == 0
    next(out.glob("*.bin")).write_bytes(b"damaged")
    assert main(["data", "verify", str(out)]) == 4
    assert "--mend" in capsys.readouterr().out
    assert main(["data", "verify", str(out), "--mend"]) == 4
    told = capsys.readouterr().out
    assert "--mend" not in told
    assert "next: the same keepstep data build command again" in told


def test_folder_of_raw_text_is_data(tmp_path: Path, texts: list[str], tokenizer: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:5]))
    (folder / "b.csv").write_text("text\nfrom a table\n")
    (folder / "README.md").write_text("no data")
    config = DataConfig(path=str(folder), tokenizer=str(tokenizer.parent))
    assert tokenizer.name == "tokenizer.json"
    assert sum(len(one.lengths) for one in open_data(str(folder), config, tmp_path / "cache").readers) == 6  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="no data is there"):
        open_data(str(tmp_path / "nothing"), config, tmp_path / "cache")
