"""docs/own-model.md: its commands run, on a tiny model, and its table is what the plan predicts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.doc_blocks import ROOT, commands

PAGE = "docs/own-model.md"
SMALL = [
    "model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.ffn_hidden=32",
    "model.seq_len=512",
]  # fmt: skip
SHORT = ["max_duration=2ba", "schedule.warmup=1ba", "microbatch=2", "global_batch=2", "compute.threads=1"]
MORE_WORDS = {"train": [*SMALL, *SHORT], "finetune": ["model.seq_len=512", *SHORT]}


def conversation(number: int) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
    tool = {"type": "function", "function": {"name": "timer", "description": "Wait.", "parameters": parameters}}
    call = {"type": "function", "function": {"name": "timer", "arguments": {"minutes": number}}}
    asked = {"role": "user", "content": f"Wake me in {number} minutes."}
    return {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_own_model_commands_lead_from_text_to_tool_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my-text").mkdir()
    for name in ("training", "data", "checkpoints", "planning"):
        shutil.copy(ROOT / "docs" / f"{name}.md", "my-text")
    Path("rows.jsonl").write_text("\n".join(json.dumps(conversation(number)) for number in range(24)))
    Path("prompts.txt").write_text("hello\n")
    Path("tools.json").write_text('[{"name": "f", "description": "d", "parameters": {"x": {"type": "str"}}}]')
    for command in commands(PAGE):
        program, verb, *words = shlex.split(command)
        assert program == "keepstep"
        shorter = ["4" if before == "--rows" else word for before, word in zip(["", *words], words, strict=False)]
        assert main([verb, *shorter, *MORE_WORDS.get(verb, [])]) == 0, command
    assert Path("my-tools.html").is_file()
    assert Path("my-tools-hf/model.safetensors").is_file()


def test_own_model_table_is_what_the_plan_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"\| ([\d.]+) hours \| ([\d.]+) hours \|$", (ROOT / PAGE).read_text(), re.M)
    plans = [command for command in commands(PAGE) if command.startswith("keepstep plan")]
    assert len(rows) == len(plans) == 4
    for row, command in zip(rows, plans, strict=True):
        words = shlex.split(command)[1 : shlex.split(command).index("--cluster")]
        for shown, cluster in zip(row, ("rtx-4090:1", "h100:1"), strict=True):
            assert main([*words, "--cluster", cluster, "--json"]) == 0
            predicted = json.loads(capsys.readouterr().out)["run"]["wall_s"] / 3600
            assert float(shown) == pytest.approx(predicted, rel=0.1, abs=0.06), f"{command}: update the table"
