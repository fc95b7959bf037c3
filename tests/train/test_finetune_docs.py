"""Every command of the pages on fine-tuning, Hugging Face and evaluation runs, on a model of a few thousand weights."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from keepstep.cli.main import main
from keepstep.data.chat.generated import SMALL, generate_rows
from keepstep.data.chat.tokenizer import VOCAB, prepare_tokenizer

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take for granted."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("desk")
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(folder / "model")
    for file in prepare_tokenizer(folder / "cache", 1).parent.iterdir():
        shutil.copy(file, folder / "model" / file.name)
    rows = [json.dumps(row.conversation.row()) for row in generate_rows(SMALL, 24, 1, "train")]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    for sample in (DOCS / "samples").iterdir():
        shutil.copy(sample, folder / sample.name)
    (folder / "prompts.txt").write_text("hello\nwhat is new?\n")
    (folder / "tools.json").write_text('[{"name": "f", "description": "d", "parameters": {"x": {"type": "str"}}}]')
    (folder / "text.txt").write_text("some words to predict, one after the other. " * 40)
    return folder


def commands(page: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_every_command_of_the_pages_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    pages = ("finetuning.md", "preference.md", "rl.md", "huggingface.md", "evaluation.md")
    for command in [command for page in pages for command in commands(page)]:
        program, *words = shlex.split(command)
        assert program == "keepstep"
        if "bfcl" in words and importlib.util.find_spec("bfcl_eval") is None:
            continue  # requirements/bfcl.txt
        assert main(words) == 0, command


def test_page_shows_the_measured_speed() -> None:
    measured = json.loads((DOCS.parent / "benchmarks" / "results" / "lora_h200.json").read_text())
    page = (DOCS / "finetuning.md").read_text()
    told = f"{measured['tokens_per_s']:,.0f} tokens/s (MFU {measured['mfu']:.1%}, {measured['memory_gib']:.1f} GiB)"
    assert told in page
    assert f"PYTHONPATH=src {measured['command']}\n" in page
