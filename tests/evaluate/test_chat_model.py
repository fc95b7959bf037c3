"""Answers: the same whoever shares the batch, whole to the last sign, and input that makes none is told at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.cli.main import main
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.core.errors import DataError, KeepstepError, UsageError
from keepstep.data import tokenization
from keepstep.data.chat.template import ChatTemplate
from keepstep.evaluate import kept_prompts
from keepstep.evaluate.ast_check import judge
from keepstep.evaluate.chat_model import ChatModel, Prompt, Sampling
from keepstep.evaluate.tool_calls import ask, load_questions, write_lines
from keepstep.interop.full_model import load_initial_model, open_device
from keepstep.models.attention_context import KeyValueCache
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer
from tests.train.tiny_runs import run_here

PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tiny_model(tmp_path: Path, template: str = PLAIN, room: int = 32) -> ChatModel:
    path = tmp_path / "tokenizer.json"
    tokenization.train_bpe(["a few words"], tokenization.SMALLEST_VOCAB, path)
    shape = ModelConfig(
        layers=1, hidden=16, heads=2, vocab=tokenization.SMALLEST_VOCAB, seq_len=room, positions="rotary", init_std=0.5
    )
    model = Transformer(shape).eval()
    init_weights(model, 1)
    return ChatModel(
        model=model,
        config=replace(RunConfig(), model=shape),
        step=0,
        tokenizer=tokenization.load(path),
        template=ChatTemplate(template),
        stop_tokens=frozenset(),
    )


def asking(text: str) -> Prompt:
    return Prompt([{"role": "user", "content": text}])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_long_neighbour_does_not_cut_an_answer(temperature: float, tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    sampling = Sampling(temperature, max_new_tokens=12)
    short, long = asking("abcdef"), asking("z" * 30)
    alone = model.answers([short], sampling, batch=2)
    together = model.answers([short, long], sampling, batch=2)
    assert together[0] == alone[0]


def test_ask_refuses_a_long_question_before_the_first_answer(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    done: list[int] = []
    with pytest.raises(DataError, match="question 2 has 40 tokens"):
        model.answers([asking("a"), asking("b" * 40)], Sampling(), 1, done.append)
    assert done == []


def test_stream_shows_incomplete_characters_at_the_end(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    sampling = Sampling(max_new_tokens=9)
    for seed in range(6):
        init_weights(model.model, seed)
        (whole,) = model.answers([asking("ab")], sampling, batch=1)
        assert "".join(model.stream(asking("ab"), sampling)) == whole


def test_template_refusal_is_a_data_error(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match="no system role"):
        model.encode(asking("x"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"messages": ', "line 2"),
        ('{"text": "x"}', "messages is not a list"),
        ('{"messages": "hi"}', "messages is not a list"),
        ('{"messages": []}', "messages is not a list"),
        ('{"messages": [{"role": "alien", "content": "x"}]}', "has the role 'alien'"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [3]}', "a tool is int"),
    ],
)
def test_a_broken_line_is_named(line: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"plain\n{line}\n")
    assert main(["chat", "nowhere", "--file", str(prompts)]) == 4
    error = capsys.readouterr().err
    assert "prompts.txt line 2" in error
    assert told in error


def test_read_texts_names_missing_and_binary_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for words, told in (
        (["--file", "missing"], "--file missing cannot be read: No such file"),
        (["--file", str(tmp_path)], "Is a directory"),
        (["--file", str(tmp_path / "bytes")], "is not UTF-8 text"),
        (["--tools", "missing"], "--tools missing cannot be read"),
    ):
        assert main(["chat", "nowhere", *words]) == 2
        assert told in capsys.readouterr().err


def test_counts_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    commands: list[list[Any]] = [
        ["eval", "tools", "x", "--rows", "0"],
        ["eval", "tools", "x", "--batch", "-1"],
        ["chat", "x", "--max-new-tokens", "0"],
    ]
    for words in commands:
        assert main(words) == 2
        assert "must be a whole number of at least 1" in capsys.readouterr().err


def test_devices_are_checked_by_name_and_presence() -> None:
    assert open_device("cpu").type == "cpu"
    with pytest.raises(UsageError, match="--device is 'gpu'"):
        open_device("gpu")


@pytest.mark.slow
def test_start_of_a_run_resumed_from_another_is_refused(tmp_path: Path) -> None:
    run_here(tmp_path, "name=first")
    (step,) = (tmp_path / "first" / "checkpoints").glob("step_*")
    run_here(tmp_path, "name=second", f"checkpoint.resume_from={step}", "checkpoint.skip_optimizer=true")
    with pytest.raises(UsageError, match="started from the weights of"):
        load_initial_model(tmp_path / "second")
    facts = tmp_path / "first" / "facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "imported_from": "somewhere"}))
    assert load_initial_model(tmp_path / "first")[2] == 6, "what was imported is what it began with"


def test_chat_model_allocates_cache_and_logits_for_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path, room=4096)
    rooms: list[int] = []
    places: list[int] = []
    shown = model.model.tied_output

    def tied_output(hidden_btd: Any, *others: Any) -> Any:
        places.append(hidden_btd.shape[1])
        return shown(hidden_btd, *others)

    class Counted(KeyValueCache):
        def __init__(self, layers: int, capacity: int, padding_b: Any = None, *, longest: int = 0) -> None:
            rooms.append(capacity)
            super().__init__(layers, capacity, padding_b, longest=longest)

    monkeypatch.setattr(kept_prompts, "KeyValueCache", Counted)
    model.model.tied_output = tied_output
    prompt, sampling = asking("abcdef"), Sampling(max_new_tokens=5)
    assert "".join(model.stream(prompt, sampling)) == model.answers([prompt], sampling, batch=1)[0]
    assert rooms == [len(model.encode(prompt)) + 5]
    assert set(places) == {1}


def test_questions_skip_greetings_and_empty_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    hello, asked = {"role": "assistant", "content": "hello"}, {"role": "user", "content": "add 1"}
    wrong = {"role": "assistant", "content": "It is 7.", "weight": 0}
    talks = ([hello, asked, calls], [hello], [asked, calls], [asked, wrong, asked, calls])
    rows = [{"messages": messages, "tools": tools} for messages in talks]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = load_questions(str(path), 10)
    assert [item.task.category for item in questions] == ["simple"] * 3
    assert [len(item.prompt.messages) for item in questions] == [2, 1, 3]
    assert "row 2: there is no user message" in capsys.readouterr().err
    answered = ask(tiny_model(tmp_path), questions, Sampling(max_new_tokens=2), batch=2)
    write_lines(answered.lines, tmp_path / "new" / "answers.jsonl")
    assert len((tmp_path / "new" / "answers.jsonl").read_text().splitlines()) == 3
    assert answered.mean_reward is None


def test_reward_scores_every_answer(tmp_path: Path) -> None:
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    rows = [{"messages": [{"role": "user", "content": text}, calls], "tools": tools} for text in ("add 1", "add one")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    questions, model, sampling = load_questions(str(path), 10), tiny_model(tmp_path), Sampling(max_new_tokens=2)

    def asked_in_digits(messages: Sequence[dict[str, Any]], answer: str, expected: list[dict[str, Any]]) -> float:
        assert isinstance(answer, str)
        assert expected
        return float("1" in str(messages[-1]["content"]))

    answered = ask(model, questions, sampling, batch=2, reward=asked_in_digits)
    assert [line["reward"] for line in answered.lines] == [1.0, 0.0]
    assert answered.mean_reward == 0.5
    with pytest.raises(KeepstepError, match="the reward is nan"):
        ask(model, questions, sampling, batch=2, reward=lambda **_: float("nan"))
    with pytest.raises(KeepstepError, match=r"the reward failed: KeyError: 'no' \(.*test_chat_model.py:\d+\)"):
        ask(model, questions, sampling, batch=2, reward=lambda messages, **_: messages[-1]["no"])


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        "[add(a=1)]",
    ],
)
def test_ast_check_reads_calls_written_as_text(
    written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    asked = {"role": "user", "content": "add 1"}
    said = [{"role": "assistant", "content": text} for text in (written, "<tool_call>{", "I cannot.", written)]
    rows: list[dict[str, Any]] = [{"messages": [asked, answer], "tools": tools} for answer in said]
    del rows[-1]["tools"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    calling, refusing = load_questions(str(path), 10)
    assert (calling.task.category, refusing.task.category) == ("simple", "irrelevance")
    assert judge(calling.task, written).exact
    assert judge(refusing.task, "I cannot.").exact
    told = capsys.readouterr().err
    assert "row 2: the call in its answer cannot be parsed" in told
    assert "1 rows have no tools and were not asked" in told


def test_wrong_answers_are_written_as_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    said = ["add 1", "do not add"]  # The template shows no tools, and must not seem to hide one.
    answers = [call, {"role": "assistant", "content": "You are welcome."}]
    rows = [
        {"messages": [{"role": "user", "content": text}, answer], "tools": tools}
        for text, answer in zip(said, answers, strict=True)
    ]
    path, wrong = tmp_path / "rows.jsonl", tmp_path / "wrong.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    # A model that calls nothing: right where nothing is to be called.
    monkeypatch.setattr("keepstep.cli.model._open_model", lambda _args: tiny_model(tmp_path))
    assert main(["eval", "tools", "x", "--data", str(path), "--max-new-tokens", "2", "--wrong", str(wrong)]) == 0
    (kept,) = load_questions(str(wrong), 10)
    assert kept.conversation == load_questions(str(path), 10)[0].conversation


def test_conversations_with_mixed_answers_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    calls = [{"function": {"name": "add", "arguments": {"a": number}}} for number in range(3)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"add {number}"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ],
            "tools": tools,
        }
        for number, call in enumerate(calls)
    ]
    path, mixed, wrong = (tmp_path / name for name in ("rows.jsonl", "mixed.jsonl", "wrong.jsonl"))
    path.write_text("\n".join(map(json.dumps, rows)))

    class Drawing:
        """Right always, at times and never."""

        def answers(self, prompts: Sequence[Prompt], sampling: Sampling, *_: object) -> list[str]:
            assert sampling.temperature == 1.0
            said = [prompt.messages[-1]["content"].removeprefix("add ") for prompt in prompts]
            assert said == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
            numbers = [0, 0, 0, 7, 1, 7, 7, 7, 7]
            return [f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>' for number in numbers]

    monkeypatch.setattr("keepstep.cli.model._open_model", lambda _args: Drawing())
    words = ["eval", "tools", "x", "--data", str(path), "--attempts", "3", "--mixed", str(mixed), "--wrong", str(wrong)]
    assert main(words) == 0
    assert [item.prompt.messages[-1]["content"] for item in load_questions(str(mixed), 10)] == ["add 1"]
    assert [item.prompt.messages[-1]["content"] for item in load_questions(str(wrong), 10)] == ["add 1", "add 2"]
    assert main(["eval", "tools", "x", "--mixed", str(mixed)]) == 2


def test_ask_refuses_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "answers.jsonl"):
        assert main(["eval", "tools", str(tmp_path / "no-model"), "--answers", str(place)]) == 2
        assert f"{place} cannot be written" in capsys.readouterr().err


def test_prompt_with_half_a_character_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # As a terminal in another encoding sends it, and as JSON writes it where a text was cut between two halves.
    for text in (b"gr\xfc\xdfe".decode(errors="surrogateescape"), "cut \ud83d"):
        with pytest.raises(DataError, match="lone surrogate"):
            tiny_model(tmp_path).encode(Prompt([{"role": "user", "content": text}]))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "cut \ud83d"}]}) + "\n")
    assert main(["chat", "nowhere", "--file", str(prompts)]) == 4
    assert f"{prompts} line 1: it contains half a character" in capsys.readouterr().err


def test_conversations_equal_answers_one_by_one(tmp_path: Path) -> None:
    model, sampling = tiny_model(tmp_path, room=96), Sampling(max_new_tokens=7)
    asked: dict[int, list[str | None]] = {number: [] for number in range(5)}
    turns = [3, 1, 9, 2, 1]

    def reply(number: int, text: str | None) -> Prompt | None:
        asked[number].append(text)
        return (
            asking(prompt_of(number, asked[number]))
            if text is not None and len(asked[number]) < turns[number]
            else None
        )

    def prompt_of(number: int, answers: Sequence[str | None]) -> str:
        return "ask " * (number + 1) + "".join(answer or "" for answer in answers)

    model.converse([asking(prompt_of(number, [])) for number in asked], reply, sampling, 2)
    for number, answers in asked.items():
        for turn, answer in enumerate(answers):
            prompt = asking(prompt_of(number, answers[:turn]))
            if answer is None:
                assert len(model.encode(prompt)) >= model.context_length
            else:
                assert model.answers([prompt], sampling, 1) == [answer]
    assert [len(answers) for number, answers in asked.items() if number != 2] == [3, 1, 2, 1]
    assert asked[2][-1] is None, "it outgrows the context"


def test_a_conversation_computes_only_what_each_prompt_adds(tmp_path: Path) -> None:
    model, computed, lengths = tiny_model(tmp_path, room=160), list[int](), list[int]()
    said = ["ask " * 12]

    def asked() -> Prompt:
        prompt = asking("".join(said))
        lengths.append(len(model.encode(prompt)))
        return prompt

    def reply(*_: object) -> Prompt | None:
        said.append(" more")
        return asked() if len(said) < 6 else None

    model.model.register_forward_pre_hook(lambda _, given: computed.append(given[0].shape[1]))
    model.converse([asked()], reply, Sampling(max_new_tokens=1), 1)
    assert len(lengths) == 5
    assert sum(computed) < sum(lengths) / 2


def test_the_next_turn_of_a_chat_computes_what_is_new(tmp_path: Path) -> None:
    model, fresh, computed = tiny_model(tmp_path, room=512), tiny_model(tmp_path / "fresh", room=512), list[int]()
    fresh.model.load_state_dict(model.model.state_dict())
    model.model.register_forward_pre_hook(lambda _, given: computed.append(given[0].shape[1]))
    messages, sampling = [{"role": "user", "content": "a question " * 6}], Sampling(max_new_tokens=8)
    for turn in range(3):
        computed.clear()
        answer = "".join(model.stream(Prompt(messages), sampling))
        assert answer == fresh.answers([Prompt(messages)], sampling, batch=1)[0]
        prompt = len(model.encode(Prompt(messages)))
        assert (computed[0] == prompt) is (turn == 0)
        assert turn == 0 or computed[0] < prompt / 2
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    # Another conversation shares little; one that was answered before needs its last token only.
    "".join(model.stream(asking("b"), sampling))
    computed.clear()
    "".join(model.stream(Prompt(messages[:3]), sampling))
    assert computed[0] == 1
    assert "".join(model.stream(asking("b"), sampling)) == fresh.answers([asking("b")], sampling, batch=1)[0]


def test_keys_of_other_weights_are_not_kept(tmp_path: Path) -> None:
    model, prompt, sampling = tiny_model(tmp_path, room=512), asking("a question " * 6), Sampling(max_new_tokens=8)
    before = "".join(model.stream(prompt, sampling))
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.copy_(parameter.flip(0))
    after = "".join(model.stream(prompt, sampling))
    assert after == model.answers([prompt], sampling, batch=1)[0] != before
