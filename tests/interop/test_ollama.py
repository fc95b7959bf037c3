"""Ollama's Modelfile: templates in Go's language render what the chat template renders; helm has Go's engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep.data.chat.template import BUILT_IN, ChatTemplate, find_template
from keepstep.interop.gguf.ollama import modelfile
from tests.data.chat.test_families import TOOL, real_tokenizer
from tests.launch.manifests import helm

STOPS = ["<|im_end|>"]


def calling(content: str, *cities: str) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}} for city in cities]
    return {"role": "assistant", "content": content, "tool_calls": made}


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS = [
    [turn("user", "Hello")],
    [turn("system", "Be brief."), turn("user", "Hello"), turn("assistant", "Hi"), turn("user", "Rome?")],
    [turn("user", "Rome, Oslo?"), calling("", "Rome", "Oslo"), turn("tool", "20"), turn("tool", "5")],
    [
        turn("system", "Be brief."), turn("user", "Rome?"), calling("I ask.", "Rome"), turn("tool", "20"),
        turn("assistant", "20 degrees"), turn("user", "Oslo, Zürich?"), calling("So", "Oslo", "Zürich"),
        turn("tool", "5"), turn("assistant", "5"), turn("user", "Thanks"),
    ],
]  # fmt: skip


def template_of(text: str) -> str:
    return text.partition('TEMPLATE """')[2].partition('"""')[0]


def in_go(body: str, turns: list[dict[str, Any]], tools: list[Any], folder: Path) -> str:
    """The template rendered by Go's text/template, from the names of Ollama's fields."""

    def message(item: dict[str, Any]) -> dict[str, Any]:
        made = [call["function"] for call in item.get("tool_calls", ())]
        calls = [{"Function": {"Name": call["name"], "Arguments": call["arguments"]}} for call in made]
        return {"Role": item["role"], "Content": item["content"], "ToolCalls": calls}

    (folder / "templates").mkdir(parents=True, exist_ok=True)
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: ollama\nversion: 0.1.0\n")
    values = {"Messages": [message(item) for item in turns], "Tools": tools}
    (folder / "values.yaml").write_text(json.dumps(values))
    # Ollama's function json is helm's toJson.
    body = body.replace("{{ json ", "{{ toJson ")
    shown = 'apiVersion: v1\nkind: ConfigMap\ndata:\n  text: {{ include "ollama" .Values | toJson }}\n'
    (folder / "templates" / "text.yaml").write_text('{{ define "ollama" }}' + body + "{{ end }}" + shown)
    done = helm("template", "release", str(folder))
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["data"]["text"])


def as_go_writes(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["", "qwen-2.5", "qwen-3"])
def test_template_renders_the_same_in_go(family: str, tmp_path: Path) -> None:
    template = find_template(real_tokenizer(family, tmp_path / "tokenizer")) if family else ChatTemplate()
    text, kept = modelfile(template, STOPS)
    assert kept == "tools"
    default = text.partition('SYSTEM """')[2].partition('"""')[0]
    assert bool(default) == (family == "qwen-2.5")
    for tools in ([], [TOOL, TOOL]):
        for turns in CONVERSATIONS:
            expected = template.prompt(turns, tools)
            # Ollama gives the Modelfile's SYSTEM to messages without one.
            given = turns if turns[0]["role"] == "system" or not default else [turn("system", default), *turns]
            for value in (TOOL, *({"city": city} for city in ("Rome", "Oslo", "Zürich"))):
                expected = expected.replace(json.dumps(value, ensure_ascii=False), as_go_writes(value))
            assert in_go(template_of(text), given, tools, tmp_path / "chart") == expected


def test_first_condition_on_calls_starts_with_the_tag_that_ollama_looks_for() -> None:
    conditions = template_of(modelfile(ChatTemplate(), STOPS)[0]).split("{{ if ")[1:]
    first = next(item for item in conditions if "ToolCalls" in item.partition("}}")[0])
    assert first.startswith(".ToolCalls }}<tool_call>\n{{ range")


def test_templates_without_tools_are_said_without_them() -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chatml += "{{ '<|im_start|>assistant\n' }}"
    system = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    text, kept = modelfile(ChatTemplate(system + chatml), ["<|im_end|>", 'a"b'])
    assert kept == "chat"
    assert text.startswith("FROM ./model.gguf\n# Without tools")
    assert 'SYSTEM """Be brief."""\n' in text
    assert text.endswith('PARAMETER stop "<|im_end|>"\nPARAMETER stop "a\\"b"\n')
    assert template_of(text) == template_of(modelfile(ChatTemplate(chatml), [])[0])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% endfor %}",
        "{{ raise_exception('no') }}",
        # Cannot be said inside Go's braces.
        BUILT_IN.replace("Tools:", "{{"),
    ],
)
def test_other_templates_are_left_to_the_reader(source: str) -> None:
    text, kept = modelfile(ChatTemplate(source), STOPS)
    assert kept in ("", "chat")
    assert ("TEMPLATE" in text.replace("as TEMPLATE", "")) == bool(kept)


def test_texts_with_the_names_of_places_stay_as_they_are() -> None:
    text, kept = modelfile(ChatTemplate(BUILT_IN.replace("Tools:", "ALONE AFTER_TOOLS:")), STOPS)
    assert kept == "tools"
    assert text.count("ALONE AFTER_TOOLS:") == 2
