"""`keepstep eval ppl`: on what the run holds out, on text, on tokens; and what cannot be measured says so."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.core.errors import DataError, UsageError
from keepstep.data.tokenization import train_bpe
from keepstep.evaluate.text_perplexity import read_texts, text_perplexity
from keepstep.train.trainer import train
from tests.train.tiny_runs import TINY, metrics

VOCAB = 300


def write_rows(path: Path, word: str) -> Path:
    path.write_text("".join(json.dumps({"text": f"{word} {number} " * 12}) + "\n" for number in range(60)))
    return path


def trained(root: Path, *words: str) -> Path:
    tiny = [word for word in TINY if not word.startswith(("model.vocab", "data"))]
    words = (f"model.vocab={VOCAB}", "evaluate.batches=2", f"data.tokenizer={root / 'tokenizer.json'}", *words)
    train(load_config(None, [*tiny, f"runs_dir={root}", "name=run", *words]).config)
    return root / "run"


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    train_bpe(["seen 1 2 3", "other 4 5 6"], VOCAB, tmp_path / "tokenizer.json")
    return write_rows(tmp_path / "seen.jsonl", "seen"), write_rows(tmp_path / "other.jsonl", "other")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["valid_path", "blend"])
def test_text_perplexity_defaults_to_the_runs_validation(kind: str, texts: tuple[Path, Path], tmp_path: Path) -> None:
    seen, other = texts
    ways = {
        "valid_path": (f"data.path={seen}", f"data.valid_path={other}"),
        "blend": (f"data.blend={{'{seen}': 0.75, '{other}': 0.25}}", "data.valid_share=0.3"),
    }
    run = trained(tmp_path, *ways[kind])
    measured = next(row["valid_loss"] for row in reversed(metrics(tmp_path)) if "valid_loss" in row)
    found = text_perplexity(run, "", windows=16, batch=5)
    assert found.loss == pytest.approx(measured, rel=1e-5)
    assert found.tokens == 16 * 16


@pytest.mark.slow
def test_what_cannot_be_measured_says_so(texts: tuple[Path, Path], tmp_path: Path) -> None:
    run = trained(tmp_path, f"data.path={texts[0]}")
    for sizes in ({"windows": 0}, {"windows": 4, "length": 1}, {"windows": 4, "batch": 0}, {"windows": -1}):
        with pytest.raises(UsageError, match="must be at least"):
            text_perplexity(run, str(texts[1]), **sizes)
    train_bpe([chr(one) for one in range(700, 1700)], VOCAB + 500, tmp_path / "larger" / "tokenizer.json")
    (tmp_path / "larger.txt").write_text("".join(map(chr, range(700, 1700))))
    larger = tmp_path / "larger" / "tokenizer.json"
    with pytest.raises(DataError, match=r"but model\.vocab is 300"):
        text_perplexity(run, str(tmp_path / "larger.txt"), windows=4, tokenizer=larger)
    assert main(["export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    # Whatever text another tokenizer would make of the demo's says nothing about this model.
    with pytest.raises(UsageError, match="no held-out data"):
        text_perplexity(tmp_path / "hf", "", windows=4)


def test_read_texts_names_rows_that_are_not_json(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one\u2028two\u0085three"}, ensure_ascii=False) + "\n")
    assert list(read_texts(rows)) == ["one\u2028two\u0085three"]
    rows.write_text('{"text": "one"}\n\n{"text": ""}\n')
    assert list(read_texts(rows)) == ["one", ""], "an empty line is no document, and costs no end-of-text token"
    rows.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(DataError, match="line 2 is not JSON"):
        list(read_texts(rows))
    rows.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_texts(rows))


@pytest.mark.slow
def test_read_texts_opens_built_folders_and_packed_files(texts: tuple[Path, Path], tmp_path: Path) -> None:
    run = trained(tmp_path, f"data.path={texts[0]}")
    plain = text_perplexity(run, str(texts[1]), windows=8)
    # As C4 is published, alone and as a folder of such files.
    packed = tmp_path / "c4" / "c4-validation.00000-of-00008.json.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(texts[1].read_bytes()))
    for data in (packed, packed.parent):
        assert text_perplexity(run, str(data), windows=8) == plain
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line)["text"] for line in texts[1].read_text().splitlines()]
    parquet.write_table(pyarrow.table({"content": rows}), tmp_path / "rows.parquet")
    assert text_perplexity(run, str(tmp_path / "rows.parquet"), windows=8, field="content") == plain
    with pytest.raises(DataError, match="no column 'text'"):
        text_perplexity(run, str(tmp_path / "rows.parquet"), windows=8)
    for form in ("mds", "megatron"):
        out = tmp_path / form
        words = ["--out", str(out), "--format", form, "--tokenizer", str(tmp_path / "tokenizer.json")]
        assert main(["data", "build", str(texts[1]), *words]) == 0
        found = text_perplexity(run, str(out), windows=1_000_000)
        assert found.tokens > plain.tokens, "the whole folder"
        assert found.loss == pytest.approx(plain.loss, rel=0.1), "the same words"


def test_read_texts_refuses_bad_records(tmp_path: Path) -> None:
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": ""}\n{"text": "two"}\n'))
    assert list(read_texts(packed)) == ["one", "two"]
    packed.write_bytes(gzip.compress(b'{"text": "one"}\n{"title": "two"}\n'))
    with pytest.raises(DataError, match="1 missing field"):
        list(read_texts(packed))


@pytest.mark.slow
def test_eval_start_measures_initial_weights(
    texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, f"data.path={texts[0]}")
    words = ["eval", "ppl", str(run), "--data", str(texts[1]), "--windows", "8"]
    assert main([*words, "--out", str(tmp_path / "after.json")]) == 0
    capsys.readouterr()
    assert main([*words, "--start", "--json"]) == 0
    before, after = json.loads(capsys.readouterr().out), json.loads((tmp_path / "after.json").read_text())
    assert before["loss"] - after["loss"] > 0.1, "training helped, and only where it was asked for"


@pytest.mark.parametrize(
    ("action", "option"),
    [("ppl", ["--rows", "8"]), ("ppl", ["--answers", "x"]), ("tools", ["--windows", "8"]), ("lm", ["--data", "x"])],
)
def test_option_of_another_action_is_refused(
    action: str, option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", action, str(tmp_path), *option]) == 2
    assert f"keepstep eval {action}: unknown option {option[0]}" in capsys.readouterr().err
