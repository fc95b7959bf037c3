"""docs/serving.md: its command serves a Hugging Face folder, and its example gets a call that fits the schema."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.data.chat.tokenizer import prepare_tokenizer
from tests.doc_blocks import ROOT, blocks
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "serving.md"


def test_page_serves_a_model_and_calls_a_tool(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    transformers = pytest.importorskip("transformers")
    tokenizer = prepare_tokenizer(tmp_path / "cache", 1)
    vocab = max(json.loads(tokenizer.read_text())["model"]["vocab"].values()) + 64
    shape = {"vocab_size": vocab, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(tmp_path / "model")
    for file in tokenizer.parent.iterdir():
        shutil.copy(file, tmp_path / "model" / file.name)
    (command,) = blocks(PAGE, "sh")
    words = shlex.split(command)[1:]
    words[words.index("8000")] = "0"
    with subprocess.Popen(
        [sys.executable, "-m", "keepstep", *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[-1]
            (example,) = blocks(PAGE, "python")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(example.replace("http://127.0.0.1:8000/v1", address), {})
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
    assert "get_weather" in printed.getvalue()
    assert any(f'"city": "{city}"' in printed.getvalue() for city in ("Oslo", "Bergen"))
    assert process.returncode == 0
