"""`keepstep eval ppl`: on what the run holds out, on text, on tokens; and what cannot be measured says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import TINY, metrics

from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.core.errors import DataError, UsageError
from keepstep.data.tokenize import train_bpe
from keepstep.train.run import train
from keepstep.train.texttest import read_texts, text_perplexity

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
def test_without_data_it_is_what_the_run_itself_measures(kind: str, texts: tuple[Path, Path], tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match="the model knows 300 only"):
        text_perplexity(run, str(tmp_path / "larger.txt"), windows=4, tokenizer=larger)
    assert main(["export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    # Whatever text another tokenizer would make of the demo's says nothing about this model.
    with pytest.raises(UsageError, match="no held-out data"):
        text_perplexity(tmp_path / "hf", "", windows=4)


def test_a_row_that_is_no_json_is_named_and_a_rare_line_end_inside_one_is_text(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one\u2028two\u0085three"}, ensure_ascii=False) + "\n")
    assert list(read_texts(rows)) == ["one\u2028two\u0085three"]
    rows.write_text('{"text": "one"}\n\n{"text": ""}\n')
    assert list(read_texts(rows)) == ["one", ""], "an empty line is no document, and costs no end-of-text token"
    rows.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(DataError, match="line 2 is no JSON"):
        list(read_texts(rows))
    rows.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_texts(rows))
