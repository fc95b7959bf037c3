"""A run of the benchmark: right answers are right, a kill loses nothing, and input that cannot be used is told."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.cli.main import main
from keepstep.core.errors import DataError, UsageError
from keepstep.data.chat.template import BUILT_IN
from keepstep.data.chat.tokenizer import VOCAB, prepare_tokenizer
from keepstep.evaluate.bfcl import run as run_module
from keepstep.evaluate.bfcl.benchmark import CATEGORIES, Question, open_benchmark
from keepstep.evaluate.bfcl.run import BenchmarkRun, choose_mode
from keepstep.evaluate.bfcl.scores import score
from keepstep.evaluate.bfcl.verdict import single_turn_error
from keepstep.evaluate.chat_model import ChatModel, Prompt, Reply
from keepstep.observe.leaderboard import leaderboard
from keepstep.observe.run_folder import RunFolder
from tests.evaluate.bfcl.references import reference, written
from tests.evaluate.test_chat_model import PLAIN, tiny_model
from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class KnowingModel(ChatModel):
    """A model that knows the answers: of each question (by its text), those to give one after the other."""

    known: dict[str, list[str]] = field(default_factory=dict)

    def answers_that_fit(
        self, prompts: Sequence[Prompt], _: Any, batch: int, progress: Callable[[int], None]
    ) -> list[str | None]:
        progress(len(prompts))
        return [self._answer(prompt) for prompt in prompts]

    def converse(self, prompts: Sequence[Prompt], reply: Reply, *_: Any) -> None:
        for number, first in enumerate(prompts):
            prompt: Prompt | None = first
            while prompt is not None:
                prompt = reply(number, self._answer(prompt))

    def _answer(self, prompt: Prompt) -> str:
        first = next(message["content"] for message in prompt.messages if message["role"] == "user")
        given = sum(message["role"] == "assistant" for message in prompt.messages)
        left = self.known[first][given:]
        return left[0] if left else "Done."


def right_answers(question: Question) -> list[str]:
    if question.category.endswith("irrelevance"):
        return ["No function fits."]
    if question.category.endswith("relevance"):
        return [f"[{question.functions[0]['name']}(a=1)]"]
    if question.category == "multi_turn_base":
        return [
            text for calls in question.expected for text in ([f"[{', '.join(calls)}]"] if calls else []) + ["Done."]
        ]
    entry = {"function": question.functions}
    return [written(reference(entry, {"ground_truth": question.expected}, question.language, 0), question.language)]


def knowing(tmp_path: Path, questions: Sequence[Question], template: str = PLAIN) -> ChatModel:
    known = {message["content"]: right_answers(item) for item in questions for message in item.turns[0][-1:]}
    return KnowingModel(**vars(tiny_model(tmp_path, template, room=200_000)), known=known)


def test_right_answers_of_every_category_are_right(tmp_path: Path) -> None:
    pytest.importorskip("mpmath")
    benchmark = open_benchmark()
    questions = benchmark.questions(CATEGORIES, 5)
    run = BenchmarkRun(knowing(tmp_path, questions), benchmark, "prompt", 4, 16)
    lines = run.ask(questions, tmp_path / "answers.jsonl")
    wrong = {line["id"]: (line["error"], line["answer"]) for line in lines if line["error"]}
    # Also officially: Java's decoder drops the body of an anonymous class, Python's drops arguments without a name.
    assert set(wrong) == {"simple_java_1", "multi_turn_base_0"}
    assert set(score(lines)) == set(CATEGORIES)


@pytest.mark.parametrize(
    ("category", "text", "expected"),
    [
        ("irrelevance", "[f(a=1)]", "irrelevance_error:decoder_success"),
        ("irrelevance", "[f(a=1", None),
        ("live_irrelevance", "[]", None),
        ("live_relevance", "[f()]", None),
        ("live_relevance", "I cannot.", "relevance_error:decoder_failed"),
        ("simple_python", "I cannot.", "ast_decoder:decoder_failed"),
        ("simple_javascript", "[]", "ast_decoder:decoder_wrong_output_format"),
    ],
)
def test_errors_have_the_leaderboards_names(category: str, text: str, expected: str | None) -> None:
    (question,) = open_benchmark().questions([category], 1)
    assert single_turn_error(question, text, "prompt") == expected


def test_mode_follows_the_template(tmp_path: Path) -> None:
    assert choose_mode(tiny_model(tmp_path)) == "prompt"
    assert choose_mode(tiny_model(tmp_path, BUILT_IN)) == "native"


def test_native_prompt_shows_the_tools_once(tmp_path: Path) -> None:
    benchmark = open_benchmark()
    (question,) = benchmark.questions(["simple_java"], 1)
    run = BenchmarkRun(tiny_model(tmp_path, BUILT_IN), benchmark, "native", 1, 8)
    prompt = run._first_prompt(question)
    assert isinstance(run.model, ChatModel)
    text = run.model.template.prompt(prompt.messages, prompt.tools)
    assert text.count("GeometryPresentation.createPresentation") == 1
    assert "expert in composing functions" not in text
    assert prompt.tools[0]["function"]["parameters"]["properties"]["parent"]["type"] == "string"


def test_question_that_does_not_fit_is_wrong_in_every_category(tmp_path: Path) -> None:
    benchmark = open_benchmark()
    questions = benchmark.questions(["simple_python", "irrelevance", "multi_turn_base"], 2)
    lines = BenchmarkRun(tiny_model(tmp_path), benchmark, "prompt", 2, 8).ask(questions, tmp_path / "answers.jsonl")
    assert [line["error"] for line in lines] == ["context_length"] * 4 + ["multi_turn:force_terminated"] * 2


def test_progress_is_shown_before_a_group_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations are written one by one: all of them may take hours."""
    pytest.importorskip("mpmath")
    monkeypatch.setattr(run_module, "_SHOW_EVERY_S", 0.0)
    benchmark, path = open_benchmark(), tmp_path / "answers.jsonl"
    questions, shown = benchmark.questions(["simple_python", "multi_turn_base"], 2), list[str]()
    knows = knowing(tmp_path, questions)
    BenchmarkRun(knows, benchmark, "prompt", 2, 8, shown.append).ask(questions, path)
    assert "simple_python: 2 of the next 2, not yet on disk" in shown
    counts = [line for line in shown if line.startswith("multi_turn_base")]
    assert counts == ["multi_turn_base: answered 1 of 2", "multi_turn_base: answered 2 of 2"]


def test_conversations_that_ended_are_not_held_again(tmp_path: Path) -> None:
    pytest.importorskip("mpmath")
    benchmark, path = open_benchmark(), tmp_path / "answers.jsonl"
    questions = benchmark.questions(["multi_turn_base"], 3)
    knows = knowing(tmp_path, questions)
    assert isinstance(knows, KnowingModel)
    whole = BenchmarkRun(knows, benchmark, "prompt", 2, 8).ask(questions, tmp_path / "whole.jsonl")
    last = questions[-1].turns[0][-1]["content"]
    del knows.known[last]
    with pytest.raises(KeyError):
        BenchmarkRun(knows, benchmark, "prompt", 2, 8).ask(questions, path)
    kept = path.read_text()
    assert kept.count("\n") > 1, "the first line is no answer"
    knows.known.clear()
    knows.known.update({item.turns[0][-1]["content"]: right_answers(item) for item in questions if item.id not in kept})
    assert last in knows.known
    assert BenchmarkRun(knows, benchmark, "prompt", 2, 8).ask(questions, path) == whole
    assert path.read_text().startswith(kept)


def test_answers_of_another_model_are_not_continued(tmp_path: Path) -> None:
    benchmark, path = open_benchmark(), tmp_path / "answers.jsonl"
    questions = benchmark.questions(["irrelevance"], 3)
    first = BenchmarkRun(knowing(tmp_path, questions), benchmark, "prompt", 2, 8)
    lines = first.ask(questions, path)
    before = path.read_bytes()
    assert first.ask(questions, path) == lines
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match=r"of max_new_tokens = 8, not 9$"):
        replace(first, max_new_tokens=9).ask(questions, path)
    assert isinstance(first.model, ChatModel)
    torch.nn.init.zeros_(next(first.model.model.parameters()))
    with pytest.raises(UsageError, match="other weights"):
        first.ask(questions, path)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another evaluation is writing"):
            first.ask(questions, path)
    path.write_text("some notes\n")
    with pytest.raises(DataError, match="not a file of BFCL answers"):
        first.ask(questions, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a few thousand weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in prepare_tokenizer(folder / "cache", 1).parent.iterdir():
        shutil.copy(file, folder / file.name)
    return folder


def words(folder: Path, answers: Path) -> list[str]:
    asked = ["--categories", "simple_python,live_irrelevance", "--limit", "20", "--batch", "2"]
    return ["eval", "bfcl", str(folder), *asked, "--max-new-tokens", "6", "--answers", str(answers)]


@pytest.mark.slow
def test_killed_run_continues_where_it_was(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "keepstep", *words(folder, killed)], env=environment)
    patience = time.monotonic() + PATIENCE_S
    while (killed.read_bytes().count(b"\n") if killed.exists() else 0) < 9 and time.monotonic() < patience:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = killed.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 9 <= kept.count(b"\n") < 41
    killed.write_bytes(kept + b'{"id": "simple_py')
    assert main([*words(folder, killed), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main(words(folder, whole)) == 0
    table = capsys.readouterr().out
    assert killed.read_bytes().startswith(kept)
    lines = [sorted(path.read_text().splitlines()) for path in (killed, whole)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 41
    assert shown["categories"]["simple_python"]["count"] == 20
    assert shown["live_ast"] is None
    assert "live_irrelevance" in table


def test_command_leaves_its_scores_for_the_page_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--categories", "irrelevance", "--limit", "2", "--max-new-tokens", "2"]
    assert main(["eval", "bfcl", str(folder), *asked, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert json.loads((folder / "bfcl" / "step-0-native.json").read_text()) == shown
    (score, questions) = leaderboard(RunFolder(folder)).rows
    assert score == ["· irrelevance", f"{shown['categories']['irrelevance']['accuracy']:.2%}"]
    assert questions == ["questions", "2"]


def test_command_tells_what_is_missing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "bfcl", str(folder), "--data", str(tmp_path)]) == DataError.exit_code
    assert "pip install --no-deps bfcl-eval==" in capsys.readouterr().err
    assert main(["eval", "bfcl", str(folder), "--categories", "simple_pythn"]) == UsageError.exit_code
    assert "simple_python" in capsys.readouterr().err
