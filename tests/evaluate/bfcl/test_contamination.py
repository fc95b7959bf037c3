"""`data check --against bfcl` finds what a training set has in common with the benchmark, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.core.errors import EXIT_CONFIG, EXIT_DATA
from keepstep.data.chat.generated import SMALL, generate_rows
from keepstep.evaluate.bfcl.benchmark import open_benchmark
from keepstep.evaluate.bfcl.contamination import BenchmarkIndex, check_contamination
from tests.evaluate.bfcl.official import ROOT

TOOL = {
    "name": "own_tool",
    "description": "Paint the garden fence.",
    "parameters": {"type": "object", "properties": {"colour_of_fence": {"type": "string"}}},
}


def row(question: str = "Paint my fence.", tool: Any = TOOL, call: Any = None) -> dict[str, Any]:
    calls = [{"type": "function", "function": call or {"name": tool["name"], "arguments": {"colour_of_fence": "red"}}}]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return {
        "messages": [{"role": "user", "content": question}, answer],
        "tools": [{"type": "function", "function": tool}],
    }


TRIANGLE = "calculate_triangle_area"
CONTAMINATED: dict[str, tuple[dict[str, Any], str]] = {
    "the same question": (
        row("find THE area of a triangle, with a base of 10 units and height of 5 units"),
        "question_normalised",
    ),
    "eight words of a question": (
        row("Please compute: the area of a triangle with a base of 7 cm."),
        "question_ngram",
    ),
    "a function": (
        row(
            tool={
                **TOOL,
                "name": "Calculate_Triangle_Area",
                "parameters": {"properties": {"unit": {}, "base": {}, "height": {}}},
            },
            call={"name": "Calculate_Triangle_Area", "arguments": {"base": 99}},
        ),
        "function_normalised",
    ),
    "a description": (
        row(tool={**TOOL, "description": "Calculate the area of a triangle given its base and height"}),
        "function_normalised",
    ),
    "an answer": (
        row(tool={**TOOL, "name": TRIANGLE}, call={"name": TRIANGLE, "arguments": {"base": 10.0, "height": 5}}),
        "answer_normalised",
    ),
    "an answer of several turns": (
        row(
            tool={**TOOL, "name": "mv"},
            call={"name": "mv", "arguments": {"source": "final_report.pdf", "destination": "temp"}},
        ),
        "answer_normalised",
    ),
}


@pytest.fixture(scope="module")
def index() -> BenchmarkIndex:
    return BenchmarkIndex(open_benchmark(ROOT))


def check(tmp_path: Path, index: BenchmarkIndex, *rows: dict[str, Any]) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return check_contamination(path, index)


@pytest.mark.parametrize("what", CONTAMINATED)
def test_contaminated_row_is_found(what: str, index: BenchmarkIndex, tmp_path: Path) -> None:
    contaminated, kind = CONTAMINATED[what]
    report = check(tmp_path, index, row(), contaminated)
    assert report["contaminated_rows"] == 1
    assert report["by_kind"] == {kind: 1}
    assert report["matches"][0]["row"] == "rows.jsonl:2"


def test_every_question_of_the_benchmark_is_found(index: BenchmarkIndex) -> None:
    questions = open_benchmark(ROOT).questions(["simple_python", "live_multiple", "multi_turn_base"])
    texts = [
        message["content"] for item in questions for turn in item.turns for message in turn if message["role"] == "user"
    ]
    assert len(texts) > 2_000
    assert [text for text in texts if index.text_match(text) is None] == []


@pytest.mark.slow
def test_generated_rows_are_clean(index: BenchmarkIndex, tmp_path: Path) -> None:
    report = check(tmp_path, index, *(item.conversation.row() for item in generate_rows(SMALL, 2_000, 3, "train")))
    assert (report["rows"], report["contaminated_rows"]) == (2_000, 0)
    assert report["questions"] > 3_000
    assert report["functions"] > 3_000
    assert report["answers"] > 3_000


@pytest.mark.slow
def test_command_writes_a_report_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "report.json"
    path.write_text(json.dumps(CONTAMINATED["the same question"][0]) + "\nno row\n")
    assert main(["data", "check", str(path), "--against", "bfcl", "--out", str(out)]) == EXIT_DATA
    assert "rows.jsonl:1  question by normalised" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert (report["contaminated_rows"], report["rejected_rows"]) == (1, 1)
    kept = tmp_path / "kept.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in (CONTAMINATED["the same question"][0], row())))
    assert main(["data", "check", str(path), "--against", "bfcl", "--kept", str(kept)]) == EXIT_DATA
    assert [json.loads(line)["messages"] for line in kept.read_text().splitlines()] == [row()["messages"]]
    assert main(["data", "check", str(path), "--against", "bfcl", "--kept", str(path)]) == EXIT_CONFIG
    capsys.readouterr()
    path.write_text(json.dumps(row()) + "\n")
    assert main(["data", "check", str(path), "--against", "bfcl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data_sha256"] != report["data_sha256"]
    (tmp_path / "corpus.txt").write_text("I was asked to find the area of a triangle with a base of 10 units today.")
    assert main(["data", "check", str(tmp_path / "corpus.txt"), "--against", "bfcl"]) == EXIT_DATA
    assert "--kept" not in capsys.readouterr().out, "which is for conversations alone"
    assert main(["data", "check", str(tmp_path / "absent.jsonl"), "--against", "bfcl"]) == EXIT_DATA
    assert "absent.jsonl" in capsys.readouterr().err
