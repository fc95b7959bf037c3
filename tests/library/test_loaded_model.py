"""A run as a table, and its model as something that generates: from the run and from its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import keepstep
from keepstep.cli.main import main
from keepstep.core.errors import UsageError
from keepstep.data.tokenization import train_bpe
from tests.train.tiny_runs import run_here


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loaded")
    lines = [f"line {number} of the text" for number in range(200)]
    train_bpe(lines, 300, root / "tokenizer.json")
    (root / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    words = [f"data.path={root}/text.jsonl", f"data.tokenizer={root}/tokenizer.json", "data.valid_share=0.2"]
    shape = ["model.preset=llama-1b", "model.layers=1", "model.hidden=64", "model.heads=4", "model.kv_heads=2"]
    shape += ["model.vocab=320", "model.seq_len=64", "evaluate.interval=2ba"]
    run_here(root / "runs", *words, *shape, "max_duration=4ba", "checkpoint.interval=4ba")
    return root / "runs/run"


def test_frame_has_a_row_for_each_step(run_folder: Path) -> None:
    pytest.importorskip("pandas")
    run = keepstep.Run(run_folder)
    frame = run.frame()
    assert frame.index.name == "step"
    assert frame["loss"].dropna().tolist() == run.metrics["loss"].tolist()
    assert frame["valid_loss"].dropna().tolist() == run.evaluations["valid_loss"].tolist()


@pytest.mark.slow
def test_export_generates_and_chats_as_its_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_folder.parent / "export"
    assert main(["export", str(run_folder), "--hf", str(out), "--dtype", "fp32"]) == 0
    ours, exported = keepstep.load(run_folder, device="cpu"), keepstep.load(out, device="cpu")
    assert (ours.step, exported.step) == (4, 0)
    written = ours.generate("line 7", max_new_tokens=8)
    assert written == exported.generate("line 7", max_new_tokens=8) == ours.generate("line 7", max_new_tokens=8)
    hello = [{"role": "user", "content": "line"}]
    assert ours.chat(hello, max_new_tokens=4) == exported.chat(hello, max_new_tokens=4)


def test_generate_refuses_a_prompt_without_room(run_folder: Path) -> None:
    model = keepstep.load(run_folder, device="cpu")
    with pytest.raises(UsageError, match="the prompt has 0 tokens"):
        model.generate("")
